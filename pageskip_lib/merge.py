"""Stage two: merge partial attention results by their log-sum-exp.

Each part is softmax attention over some of the tokens, with its LSE (the natural log of the sum of exp(score)).
Weighted by exp(lse - total), parts add up to attention over all the tokens. The operation is associative, so
it does not matter who merges what first. Method: flash-decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

import torch

from .checks import check_tensor, shape_of
from .runtime import card, resolve_backend, tl, triton

MERGE_BLOCK = 16  # splits merged at a time


@triton.jit
def _merge_kernel(outs, lses, out, lse, rows, splits, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # launched early: the partial results are complete only from here on
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + block
        top = tl.maximum(top, tl.load(lses + split * rows + row, mask=split < splits, other=float("-inf")))
    pivot = tl.max(top, axis=0)
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)

    # A fixed block, whatever the number of splits: empty ones at the end add exact zeros and change no bit.
    total = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + block
        split_lse = tl.load(lses + split * rows + row, mask=split < splits, other=float("-inf"))
        weights = tl.exp(split_lse - pivot)
        # An empty part has weight 0, and whatever its buffer holds must not enter: 0 * NaN is NaN.
        live = (split_lse > float("-inf"))[:, None] & (dims < D)[None, :]
        parts = tl.load(outs + (split[:, None] * rows + row) * D + dims[None, :], mask=live, other=0.0)
        total += weights
        acc += parts * weights[:, None]
    total = tl.sum(total, axis=0)
    nonzero = tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * D + dims, tl.sum(acc, axis=0) / nonzero, mask=dims < D)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), pivot + tl.log(nonzero)))


def empty_result(q):
    """Attention of q [B, Hq, D] over no tokens at all: out 0 in q's dtype, lse [B, Hq] fp32 -inf."""
    # Not zeros_like: that would keep q's strides, and the kernels write contiguous rows.
    return torch.zeros(q.shape, dtype=q.dtype, device=q.device), torch.full(q.shape[:2], float("-inf"), device=q.device)


def new_result(q):
    """Room for out [B, Hq, D] in q's dtype and lse [B, Hq] fp32; the merge writes all of it."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def new_partials(splits, q):
    """Scratch for stage one: outs [splits, B, Hq, D] and lses [splits, B, Hq], fp32 whatever q's dtype is."""
    outs = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    return outs, torch.empty(outs.shape[:-1], dtype=torch.float32, device=q.device)


def launch_merge(outs, lses, out, lse):
    """Merge contiguous fp32 outs [S, B, Hq, D] and lses [S, B, Hq] into out [B, Hq, D] (any dtype) and lse [B, Hq]."""
    splits, batch, heads, dim = outs.shape
    rows = batch * heads
    early = card(outs.device).dependent_launch
    _merge_kernel[(rows,)](
        outs, lses, out, lse, rows, splits, D=dim, BLOCK_S=MERGE_BLOCK, BLOCK_D=triton.next_power_of_2(dim),
        DEPENDENT=early, **(dict(launch_pdl=True) if early else {}),
    )  # fmt: skip


def merge_partials(outs, lses, *, backend="auto"):
    """Merge S partial attention results over disjoint tokens.

    outs: [S, B, Hq, D], each part normalised on its own. lses: [S, B, Hq] fp32, natural log; an empty part has
    lse = -inf, and its outs may hold anything. Returns (out [B, Hq, D] in outs' dtype, lse [B, Hq] fp32). With
    every part empty, out is 0 and lse -inf. Arithmetic is in the dtype of lses.
    Raises ValueError or TypeError for shapes or dtypes that do not fit.
    """
    check_tensor("outs", outs, "S, B, Hq, D")
    check_tensor("lses", lses, "S, B, Hq")
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"lses must have the shape of outs without its last dimension, got {shape_of(lses)} for {shape_of(outs)}.")
    if outs.shape[0] == 0:
        raise ValueError("outs must hold at least one part, got none.")
    if not outs.is_floating_point() or lses.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"outs must be a float tensor and lses float32, got {outs.dtype} and {lses.dtype}.")
    if outs.device != lses.device:
        raise ValueError(f"lses must be on outs' device {outs.device}, got {lses.device}.")
    if resolve_backend(backend, outs) == "triton":
        out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:], dtype=torch.float32)
        if out.numel():
            launch_merge(outs.contiguous(), lses.contiguous(), out, lse)
        return out, lse
    total = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - total.masked_fill(total == float("-inf"), 0.0))
    parts = outs.to(lses.dtype).masked_fill((lses == float("-inf"))[..., None], 0.0)
    return (parts * weights[..., None]).sum(0).to(outs.dtype), total
