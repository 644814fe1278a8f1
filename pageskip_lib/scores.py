"""Page scores: an upper bound on q.k for every key of a page, from the page's summary alone.

The bound is Quest's (arXiv 2406.10774): the sum over dimensions of max(q_d * kmin_d, q_d * kmax_d). Written
dimension by dimension it needs a [.., N, D] intermediate; two identities turn it into two matrix products:

    q . mid + |q| . half        with mid = (kmin + kmax) / 2 and half = (kmax - kmin) / 2
    q+ . kmax + q- . kmin       with q+ = max(q, 0) and q- = min(q, 0)

The second is the one in use: kmin and kmax are exact in the keys' dtype, so nothing is rounded before the fp32 sum.
``reference.page_bound`` and ``reference.page_bound_center`` hold the definition and the first identity.
"""

import torch

from .checks import check_heads, check_inner_stride, check_tensor
from .runtime import resolve_backend, tl, triton
from .summaries import PageSummary

GROUPS = ("max", "sum", "softmax_sum", "none")
BLOCK_PAGES = 64


@triton.jit
def _score_kernel(
    q_ptr, kmin_ptr, kmax_ptr, lengths_ptr, scores_ptr, q_batch, q_head, s_batch, s_head, s_page, kv_heads, pages,
    PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64) // kv_heads
    head = tl.program_id(0).to(tl.int64) % kv_heads
    page = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    live = (group < G)[:, None]
    in_head = (dims < D)[None, :]
    heads = head * G + group
    q = tl.load(q_ptr + batch * q_batch + heads[:, None] * q_head + dims[None, :], mask=live & in_head, other=0.0)

    held = page * PAGE < tl.load(lengths_ptr + batch)
    at = batch * s_batch + head * s_head + page.to(tl.int64)[:, None] * s_page + dims[None, :]
    inside = held[:, None] & (page < pages)[:, None] & in_head
    kmin = tl.load(kmin_ptr + at, mask=inside, other=0.0)
    kmax = tl.load(kmax_ptr + at, mask=inside, other=0.0)
    bound = tl.dot(tl.maximum(q, 0.0).to(kmax.dtype), tl.trans(kmax), input_precision="ieee")
    bound += tl.dot(tl.minimum(q, 0.0).to(kmin.dtype), tl.trans(kmin), input_precision="ieee")

    if GROUP == "none":
        out = (batch * kv_heads * G + heads)[:, None] * pages + page[None, :]
        tl.store(scores_ptr + out, tl.where(held[None, :], bound, float("-inf")), mask=live & (page < pages)[None, :])
    else:
        if GROUP == "max":
            score = tl.max(tl.where(live, bound, float("-inf")), axis=0)
        else:
            score = tl.sum(tl.where(live, bound, 0.0), axis=0)
        out = (batch * kv_heads + head) * pages + page
        tl.store(scores_ptr + out, tl.where(held, score, float("-inf")), mask=page < pages)


def page_scores(q, summary, *, group="max", backend="auto"):
    """Score every page for the coming query.

    q: [B, Hq, D] in the summary's dtype, last dimension contiguous. summary: a ``PageSummary`` with N pages. group: how the query heads of a KV head
    agree on one score, "max", "sum", or "softmax_sum" (each head's softmax over pages of bound / sqrt(D), summed); "none" keeps them apart.

    Returns fp32 [B, Hkv, N], or [B, Hq, N] for "none"; pages past the length are -inf. With "none" the score is
    the upper bound on q.k (without the softmax scale) over the page's keys, up to fp32 rounding of the sum.
    """
    check_tensor("q", q, "B, Hq, D")
    if not isinstance(summary, PageSummary):
        raise TypeError(f"summary must be a PageSummary, got {type(summary).__name__}.")
    check_heads(q, summary.kmin, "summary.kmin")
    check_inner_stride("q", q)
    check_inner_stride("summary.kmin", summary.kmin)
    if summary.kmin.stride() != summary.kmax.stride():
        raise ValueError("summary.kmin and summary.kmax must be laid out alike, got two different strides.")
    if group not in GROUPS:
        raise ValueError(f"group must be one of {GROUPS}, got {group!r}.")
    if group == "softmax_sum":
        each = page_scores(q, summary, group="none", backend=backend)
        # A sequence of length 0 has no page to share the softmax; its row is -inf throughout.
        shares = torch.softmax(each * q.shape[-1] ** -0.5, dim=-1).nan_to_num(0.0)
        shares = shares.unflatten(1, (summary.kmin.shape[1], -1)).sum(2)
        return shares.masked_fill(~_held(summary)[:, None], float("-inf"))
    batch, kv_heads, pages, dim = summary.kmin.shape
    per_kv_head = q.shape[1] // kv_heads
    if resolve_backend(backend, q) == "torch":
        grouped = q.float().view(batch, kv_heads, per_kv_head, dim)
        bound = grouped.clamp(min=0) @ summary.kmax.float().transpose(2, 3)
        bound += grouped.clamp(max=0) @ summary.kmin.float().transpose(2, 3)
        score = {"max": lambda: bound.amax(2), "sum": lambda: bound.sum(2), "none": lambda: bound.flatten(1, 2)}[group]()
        return score.masked_fill(~_held(summary)[:, None], float("-inf"))
    scores = torch.empty(batch, q.shape[1] if group == "none" else kv_heads, pages, dtype=torch.float32, device=q.device)
    if scores.numel():
        _score_kernel[(batch * kv_heads, triton.cdiv(pages, BLOCK_PAGES))](
            q, summary.kmin, summary.kmax, summary.lengths, scores,
            q.stride(0), q.stride(1), *summary.kmin.stride()[:3], kv_heads, pages,
            PAGE=summary.page_size, G=per_kv_head, D=dim, BLOCK_G=max(16, triton.next_power_of_2(per_kv_head)),
            BLOCK_D=triton.next_power_of_2(dim), BLOCK_N=BLOCK_PAGES, GROUP=group,
        )  # fmt: skip
    return scores


def _held(summary):
    """[B, N] bool: does page n hold at least one token of sequence b?"""
    first_token = torch.arange(summary.kmin.shape[2], device=summary.lengths.device) * summary.page_size
    return first_token < summary.lengths[:, None]
