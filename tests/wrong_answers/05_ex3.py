# expect: length 60: position 44 gives 60
@triton.jit
def gather_tokens(list_ptr, out_ptr, count, length, TILE: tl.constexpr, PAGE: tl.constexpr):
    position = tl.arange(0, TILE)
    page = tl.load(list_ptr + position // PAGE, mask=position // PAGE < count, other=-1)
    tl.store(out_ptr + position, tl.where(page >= 0, page * PAGE + position % PAGE, -1))  # forgets the length
