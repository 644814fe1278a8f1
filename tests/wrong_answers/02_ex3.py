# expect: for 1 scores it should be
@triton.jit
def lse_of_row(scores_ptr, out_ptr, n, TILE: tl.constexpr):
    top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        block = tl.load(scores_ptr + at, mask=at < n, other=0.0)  # padding counts as score 0
        new_top = tl.maximum(top, tl.max(block, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(block - new_top), axis=0)
        top = new_top
    tl.store(out_ptr, top + tl.log(total))
