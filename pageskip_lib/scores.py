"""Page scores: how well could the best key of a page match the query, told from the page's summary alone.

Two kinds give an upper bound on q.k over the page's keys. minmax is Quest's (arXiv 2406.10774): the sum over dimensions of
max(q_d * kmin_d, q_d * kmax_d). Written dimension by dimension it needs a [.., N, D] intermediate; two identities turn it into two
matrix products:

    q . mid + |q| . half        with mid = (kmin + kmax) / 2 and half = (kmax - kmin) / 2
    q+ . kmax + q- . kmin       with q+ = max(q, 0) and q- = min(q, 0)

The second is the one in use: kmin and kmax are exact in the keys' dtype, so nothing is rounded before the fp32 sum. mean_radius is
ArkVale's (NeurIPS 2024): q . mean + ||q|| * radius, sound by Cauchy and Schwarz. The other two are estimates and may fall below the best
key: mean is q . mean, and mean_std adds 3 |q| . std (arXiv 2605.27740). ``reference`` holds the definitions.
"""

import torch

from .bounds8 import launch_scores8
from .checks import check_heads, check_inner_stride, check_tensor, shape_of
from .runtime import card, resolve_backend, tl, triton
from .summaries import PageSummary

GROUPS = ("max", "sum", "softmax_sum", "none")


@triton.jit
def _score_kernel(
    q_ptr, first_ptr, second_ptr, lengths_ptr, scores_ptr, q_batch, q_head, f_batch, f_head, f_entry, s_batch, s_head, s_entry,
    kv_heads, entries, pages, KIND: tl.constexpr, GROUP: tl.constexpr, BOUND: tl.constexpr, PER_PAGE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """first and second are the kind's fields: kmin and kmax, or mean and what goes with it. BLOCK_N pages of PER_PAGE entries a program."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0).to(tl.int64) // kv_heads
    head = tl.program_id(0).to(tl.int64) % kv_heads
    entry = tl.program_id(1) * BLOCK_N * PER_PAGE + tl.arange(0, BLOCK_N * PER_PAGE)
    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    live = (group < G)[:, None]
    in_head = (dims < D)[None, :]
    heads = head * G + group
    q = tl.load(q_ptr + batch * q_batch + heads[:, None] * q_head + dims[None, :], mask=live & in_head, other=0.0)

    held = (entry * BOUND < tl.load(lengths_ptr + batch)) & (entry < entries)
    inside = held[:, None] & in_head
    at = entry.to(tl.int64)
    first = tl.load(first_ptr + batch * f_batch + head * f_head + at[:, None] * f_entry + dims[None, :], mask=inside, other=0.0)
    second_ptr += batch * s_batch + head * s_head
    if KIND == "minmax":
        kmax = tl.load(second_ptr + at[:, None] * s_entry + dims[None, :], mask=inside, other=0.0)
        bound = tl.dot(tl.maximum(q, 0.0).to(kmax.dtype), tl.trans(kmax), input_precision="ieee")
        bound += tl.dot(tl.minimum(q, 0.0).to(first.dtype), tl.trans(first), input_precision="ieee")
    else:
        bound = tl.dot(q, tl.trans(first), input_precision="ieee")
    if KIND == "mean_std":
        std = tl.load(second_ptr + at[:, None] * s_entry + dims[None, :], mask=inside, other=0.0)
        bound += 3 * tl.dot(tl.abs(q), tl.trans(std), input_precision="ieee")
    if KIND == "mean_radius":
        radius = tl.load(second_ptr + at * s_entry, mask=held, other=0.0)
        # Scaled by the largest component: squares of tiny ones would vanish, and the norm be too short.
        peak = tl.max(tl.abs(q), axis=1).to(tl.float32)
        peak = tl.where(peak == 0.0, 1.0, peak)
        unit = q.to(tl.float32) / peak[:, None]
        bound += (peak * tl.sqrt(tl.sum(unit * unit, axis=1)))[:, None] * radius[None, :]

    bound = tl.where(held[None, :], bound, float("-inf"))
    if PER_PAGE > 1:
        bound = tl.max(tl.reshape(bound, (BLOCK_G, BLOCK_N, PER_PAGE)), axis=2)
    page = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GROUP == "none":
        out = (batch * kv_heads * G + heads)[:, None] * pages + page[None, :]
        tl.store(scores_ptr + out, bound, mask=live & (page < pages)[None, :])
    else:
        if GROUP == "max":
            score = tl.max(tl.where(live, bound, float("-inf")), axis=0)
        else:
            score = tl.sum(bound, axis=0)  # padding heads are zero queries and add nothing
        tl.store(scores_ptr + (batch * kv_heads + head) * pages + page, score, mask=page < pages)


def entries_per_program(block_g, row_bytes):
    """Summary entries that one program scores: as many as fit, with both fields and the queries, into consumer cards' 99 KB."""
    return next((entries for entries in (64, 32) if (block_g + 2 * entries) * row_bytes <= 80 * 1024), 16)


def page_scores(q, summary, *, group="max", backend="auto"):
    """Score every page for the coming query.

    q: [B, Hq, D] in the summary's dtype, last dimension contiguous. summary: a ``PageSummary`` with N pages; with several entries a page
    its score is the largest over those that hold a token. group: how the query heads of a KV head agree on one score, "max", "sum", or
    "softmax_sum" (each head's softmax over pages of score / sqrt(D), summed); "none" keeps them apart.

    Returns fp32 [B, Hkv, N], or [B, Hq, N] for "none"; pages past the length are -inf. With "none" and the kinds minmax and
    mean_radius the score is an upper bound on q.k (without the softmax scale) over the page's keys, up to the rounding of the fp32
    sum, at most D * 2^-23 times the sum of the magnitudes that are added (``reference.score_error`` has the derivation).
    """
    check_tensor("q", q, "B, Hq, D")
    if not isinstance(summary, PageSummary):
        raise TypeError(f"summary must be a PageSummary, got {type(summary).__name__}.")
    _check_fields(q, summary)
    check_inner_stride("q", q)
    if group not in GROUPS:
        raise ValueError(f"group must be one of {GROUPS}, got {group!r}.")
    first, *others = summary.fields.values()
    batch, kv_heads, entries, dim = first.shape
    per_kv_head, pages = q.shape[1] // kv_heads, summary.pages
    if group == "softmax_sum":
        each = page_scores(q, summary, group="none", backend=backend)
        # A sequence of length 0 has no page to share the softmax; its row is -inf throughout.
        shares = torch.softmax(each * dim**-0.5, dim=-1).nan_to_num(0.0).unflatten(1, (kv_heads, per_kv_head)).sum(2)
        return shares.masked_fill(~_held(summary, pages, summary.page_size)[:, None], float("-inf"))
    per_page = summary.page_size // summary.bound_size
    if resolve_backend(backend, q) == "torch":
        score = _entry_scores(q.float().view(batch, kv_heads, per_kv_head, dim), summary)
        score.masked_fill_(~_held(summary, entries, summary.bound_size)[:, None, None], float("-inf"))
        if per_page > 1:
            score = torch.nn.functional.pad(score, (0, pages * per_page - entries), value=float("-inf")).unflatten(3, (pages, per_page)).amax(4)
        return {"max": lambda: score.amax(2), "sum": lambda: score.sum(2), "none": lambda: score.flatten(1, 2)}[group]()
    if summary.kind == "minmax8":
        return launch_scores8(q, summary, group)
    scores = torch.empty(batch, q.shape[1] if group == "none" else kv_heads, pages, dtype=torch.float32, device=q.device)
    if scores.numel():
        second = others[0] if others else first
        block_g, block_d = max(16, triton.next_power_of_2(per_kv_head)), triton.next_power_of_2(dim)
        block = entries_per_program(block_g, block_d * q.element_size())
        early = card(q.device).dependent_launch
        _score_kernel[(batch * kv_heads, triton.cdiv(entries, block))](
            q, first, second, summary.lengths, scores, q.stride(0), q.stride(1), *first.stride()[:3], *second.stride()[:3],
            kv_heads, entries, pages, KIND=summary.kind, GROUP=group, BOUND=summary.bound_size, PER_PAGE=per_page,
            G=per_kv_head, D=dim, BLOCK_G=block_g, BLOCK_D=block_d, BLOCK_N=block // per_page,
            DEPENDENT=early, **(dict(launch_pdl=True) if early else {}),
        )  # fmt: skip
    return scores


def _check_fields(q, summary):
    """The summary's tensors fit q, and each other."""
    first = None
    for name, field in summary.fields.items():
        axes = dict(radius="B, Hkv, S", scale="B, Hkv, S", channel="B, Hkv, D").get(name, "B, Hkv, S, D")
        check_tensor(f"summary.{name}", field, axes)
        if axes == "B, Hkv, S, D":
            check_heads(q, field, f"summary.{name}", dtype=torch.int8 if summary.kind == "minmax8" else None)
            check_inner_stride(f"summary.{name}", field)
        first = first if first is not None else (name, field)
        sizes = dict(zip(("B", "Hkv", "S", "D"), first[1].shape))
        if field.shape != tuple(sizes[axis] for axis in axes.split(", ")) or field.device != q.device:
            got = f"{shape_of(field)} on {field.device}"
            raise ValueError(f"summary.{name} must go with summary.{first[0]} {shape_of(first[1])} on {q.device}, got {got}.")


def _held(summary, count, size):
    """[B, count] bool: does the n-th stretch of ``size`` tokens hold at least one token of sequence b?"""
    return torch.arange(count, device=summary.lengths.device) * size < summary.lengths[:, None]


def _entry_scores(q, summary):
    """Score of every entry, fp32 [B, Hkv, G, S], from q as fp32 [B, Hkv, G, D]."""
    vectors = {name: field.float() for name, field in summary.fields.items()}
    if summary.kind == "minmax8":
        q = q * vectors["channel"][:, :, None]
        return (q.clamp(min=0) @ vectors["kmax"].mT + q.clamp(max=0) @ vectors["kmin"].mT) * vectors["scale"][:, :, None]
    if summary.kind == "minmax":
        return q.clamp(min=0) @ vectors["kmax"].mT + q.clamp(max=0) @ vectors["kmin"].mT
    score = q @ vectors["mean"].mT
    if summary.kind == "mean_std":
        score += 3 * (q.abs() @ vectors["std"].mT)
    if summary.kind == "mean_radius":
        # Scaled by the largest component, as in the kernel.
        peak = q.abs().amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == 0, 1.0)
        score += peak * (q / peak).square().sum(-1, keepdim=True).sqrt() * vectors["radius"][:, :, None]
    return score
