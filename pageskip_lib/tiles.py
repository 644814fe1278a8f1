"""The one helper that both attention kernels share: an online-softmax update with one tile of tokens.

Method: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), as used by
FlashAttention (arXiv 2205.14135).
"""

from .runtime import tl, triton

# exp(x) = exp2(x * log2(e)): the GPU has an exp2 instruction, so scores are kept in units of log2.
LOG2_E = 1.4426950408889634


@triton.jit
def valid_length(lengths_ptr, batch, tokens):
    """The tokens of a sequence that count: its entry of lengths, kept inside the cache, or all of them without lengths."""
    length = tokens
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), tokens)
    return length


@triton.jit
def attend_tile(q, keys, values, valid, scale_log2, row_max, row_sum, acc):
    """Fold one tile into the running softmax of a KV head's query heads.

    q [M, D], keys and values [TILE, D] in the cache's dtype, valid [TILE] bool, scale_log2 = scale * log2(e);
    row_max, row_sum [M] and acc [M, D] in fp32. An all-invalid tile changes nothing, also as the first one.
    """
    # "ieee" matters for fp32 inputs only: the default (tf32) would keep 10 bits of the keys.
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # While nothing valid has been seen new_max is -inf, and -inf - (-inf) would be NaN for ever after.
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - pivot[:, None])
    shrink = tl.exp2(row_max - pivot)
    row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def store_partial(out_ptr, lse_ptr, rows, dims, live, row_max, row_sum, acc, D: tl.constexpr):
    """Write one split's result: out[row] = acc / row_sum and its natural-log LSE, or 0 and -inf if it saw no token.

    rows [M] are row numbers of out [*, D] and lse [*]; live [M] masks the padding rows of the group.
    """
    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    # log2 -> natural log. The 1.0 keeps log2 away from 0 in rows that hold nothing.
    lse = (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * 0.6931471805599453
    lse = tl.where(empty, float("-inf"), lse)
    tl.store(lse_ptr + rows, lse, mask=live)
    tl.store(out_ptr + rows[:, None] * D + dims[None, :], out, mask=live[:, None] & (dims < D)[None, :])
