"""Stage two: merge partial attention results by their log-sum-exp.

Each part is softmax attention over some of the tokens, with its LSE (the natural log of the sum of exp(score)).
Weighted by exp(lse - total), parts add up to attention over all the tokens. The operation is associative, so
it does not matter who merges what first. Method: flash-decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

import torch

from .checks import check_tensor, shape_of
from .runtime import card, resolve_backend, tl, triton


def merge_blocks(splits):
    """(BLOCK_S, BLOCK_D): one program merges so many splits at a time, for so many dims. Small, since many run at once."""
    return (4, 128) if splits <= 4 else (32, 32)


@triton.jit
def merge_row(row, outs, lses, out, lse, rows, splits, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Merge the splits of one row (a query head of a sequence): the BLOCK_D dims of it that the program's second id says."""
    row = row.to(tl.int64)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # Each lane of the block runs a softmax of its own over every BLOCK_S-th split; a fixed block, so that empty splits change no bit.
    top = tl.full([BLOCK_S], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        there = split < splits
        split_lse = tl.load(lses + split * rows + row, mask=there, other=float("-inf"))
        parts = tl.load(outs + (split[:, None] * rows + row) * D + dims[None, :], mask=there[:, None] & (dims < D)[None, :], other=0.0)
        # Read beside its LSE, not after it, so an empty part is dropped here: whatever it holds must not enter, and 0 * NaN is NaN.
        parts = tl.where((split_lse > float("-inf"))[:, None], parts, 0.0)
        new_top = tl.maximum(top, split_lse)
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weights = tl.exp(top - pivot), tl.exp(split_lse - pivot)
        total = total * shrink + weights
        acc = acc * shrink[:, None] + parts * weights[:, None]
        top = new_top
    best = tl.max(top, axis=0)
    pivot = tl.where(best == float("-inf"), 0.0, best)
    shrink = tl.exp(top - pivot)
    total = tl.sum(total * shrink, axis=0)
    nonzero = tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * D + dims, tl.sum(acc * shrink[:, None], axis=0) / nonzero, mask=dims < D)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), pivot + tl.log(nonzero)), mask=tl.program_id(1) == 0)


@triton.jit
def _merge_kernel(outs, lses, out, lse, rows, splits, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # launched early: the partial results are complete only from here on
    merge_row(tl.program_id(0), outs, lses, out, lse, rows, splits, D, BLOCK_S, BLOCK_D)


def empty_result(q):
    """Attention of q [B, Hq, D] over no tokens at all: out 0 in q's dtype, lse [B, Hq] fp32 -inf."""
    # Not zeros_like: that would keep q's strides, and the kernels write contiguous rows.
    return torch.zeros(q.shape, dtype=q.dtype, device=q.device), torch.full(q.shape[:2], float("-inf"), device=q.device)


class Workspace:
    """Scratch and results of a decode call, for reuse: a call that is given one allocates nothing, and its results live in it.

    out [B, Hq, D] in q's dtype and lse [B, Hq] fp32 hold the result; outs [S, B, Hq, D] and lses [S, B, Hq] the partial results of S
    splits, fp32 whatever q's dtype is. Every call writes all of what it reads.
    """

    def __init__(self, q, splits):
        self.splits = splits
        self.out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        partial = splits if splits > 1 else 0  # one split writes the result itself
        self.outs = torch.empty(partial, *q.shape, dtype=torch.float32, device=q.device)
        self.lses = torch.empty(self.outs.shape[:-1], dtype=torch.float32, device=q.device)

    def partials(self, splits):
        """Where stage one writes: the scratch of so many splits, or the result itself when there is nothing to merge."""
        return (self.out, self.lse) if splits == 1 else (self.outs[:splits], self.lses[:splits])

    def merge(self, splits):
        """Stage two over what stage one wrote; returns (out, lse)."""
        if splits > 1:
            launch_merge(*self.partials(splits), self.out, self.lse)
        return self.out, self.lse


def workspace_for(q, splits, given=None):
    """The caller's ``Workspace`` if it fits q [B, Hq, D] and this many splits, else an error; a new one where none is given."""
    if given is None:
        return Workspace(q, splits)
    if not isinstance(given, Workspace):
        raise TypeError(f"workspace must be a Workspace, as decode_workspace makes it, got {type(given).__name__}.")
    if (given.out.shape, given.out.dtype, given.out.device) != (q.shape, q.dtype, q.device):
        raise ValueError(
            f"workspace is for q of {shape_of(given.out)}, {given.out.dtype} on {given.out.device}, "
            f"but q is {shape_of(q)}, {q.dtype} on {q.device}."
        )
    if given.splits < splits:
        raise ValueError(f"workspace holds {given.splits} splits and this call makes {splits}; make it with decode_workspace(q, k).")
    return given


def launch_merge(outs, lses, out, lse):
    """Merge contiguous fp32 outs [S, B, Hq, D] and lses [S, B, Hq] into out [B, Hq, D] (any dtype) and lse [B, Hq]."""
    splits, batch, heads, dim = outs.shape
    rows = batch * heads
    early = card(outs.device).dependent_launch
    block_s, block_d = merge_blocks(splits)
    _merge_kernel[(rows, triton.cdiv(dim, block_d))](
        outs, lses, out, lse, rows, splits, D=dim, BLOCK_S=block_s, BLOCK_D=block_d,
        DEPENDENT=early, num_warps=1, **(dict(launch_pdl=True) if early else {}),
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
