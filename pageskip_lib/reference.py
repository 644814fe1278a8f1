"""The truth that everything else is tested against: plain PyTorch in fp64, one row and one head at a time."""

import torch


def attention(q, k, v, *, lengths=None, scale=None, pages=None, page_size=None):
    """Attention of one query token per sequence, by the definition.

    q [B, Hq, D], k and v [B, Hkv, T, D] of any dtype. With ``pages`` (a PageList) and ``page_size`` only the listed
    pages' tokens take part. Returns fp64 out [B, Hq, D] and lse [B, Hq]; a row without tokens gives 0 and -inf.
    """
    batch, heads, dim = q.shape
    group = heads // k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    out = torch.zeros(batch, heads, dim, dtype=torch.float64)
    lse = torch.full((batch, heads), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        length = k.shape[2] if lengths is None else int(lengths[b])
        for h in range(heads):
            tokens = list(range(length))
            if pages is not None:
                listed = pages.pages[b, h // group, : int(pages.counts[b, h // group])].tolist()
                tokens = [p * page_size + i for p in listed if p >= 0 for i in range(page_size) if p * page_size + i < length]
            if tokens:
                keys, values = (x[b, h // group].cpu()[tokens].double() for x in (k, v))
                scores = keys @ q[b, h].cpu().double() * scale
                lse[b, h] = torch.logsumexp(scores, dim=0)
                out[b, h] = torch.softmax(scores, dim=0) @ values
    return out, lse


def minmax_summary(k, page_size, lengths=None):
    """Smallest and largest key of each page, fp64 [B, Hkv, N, D]; pages that hold no token are NaN."""
    batch, kv_heads, tokens, dim = k.shape
    pages = -(-tokens // page_size)
    kmin, kmax = (torch.full((batch, kv_heads, pages, dim), float("nan"), dtype=torch.float64) for _ in range(2))
    for b in range(batch):
        length = tokens if lengths is None else int(lengths[b])
        for n in range(-(-length // page_size)):
            page = k[b, :, n * page_size : min((n + 1) * page_size, length)].cpu().double()
            kmin[b, :, n], kmax[b, :, n] = page.amin(1), page.amax(1)
    return kmin, kmax


def page_bound(q, kmin, kmax):
    """Quest's bound by its definition, fp64 [B, Hq, N]: the sum over d of max(q_d kmin_d, q_d kmax_d)."""
    q, kmin, kmax = _aligned(q, kmin, kmax)
    return torch.maximum(q * kmin, q * kmax).sum(-1)


def page_bound_center(q, kmin, kmax):
    """The same bound as q . mid + |q| . half, fp64 [B, Hq, N]: centre and radius of each page's range."""
    q, kmin, kmax = _aligned(q, kmin, kmax)
    return (q * (kmin + kmax) / 2).sum(-1) + (q.abs() * (kmax - kmin) / 2).sum(-1)


def _aligned(q, kmin, kmax):
    """q as [B, Hq, 1, D] beside kmin, kmax as [B, Hq, N, D], all fp64 on the CPU."""
    group = q.shape[1] // kmin.shape[1]
    return q.cpu().double()[:, :, None], *(x.cpu().double().repeat_interleave(group, dim=1) for x in (kmin, kmax))


def select(scores, budget, lengths, page_size, row_budgets=None):
    """Page lists by the rule, as nested Python lists [B][Hkv] of ascending page numbers. row_budgets: as ``select_pages`` takes it."""
    lists = []
    for i, (row, length) in enumerate(zip(scores.tolist(), lengths.tolist())):
        own = budget.pages if row_budgets is None else min(max(int(row_budgets[i]), budget.sink + budget.local), budget.pages)
        held = -(-length // page_size)
        forced = [p for p in range(held) if p < budget.sink or p >= held - budget.local]
        lists.append([])
        for head in row:
            rest = [p for p in range(held) if p not in forced and head[p] > float("-inf")]
            best = sorted(rest, key=lambda p: (-head[p], p))
            lists[-1].append(sorted((forced + best)[:own]))
    return lists


def page_mass(q, k, page_size, *, scale=None):
    """The softmax weight of each page, averaged over a KV head's query heads: fp64 [B, Hkv, N], each row adds up to 1.

    q [B, Hq, D], k [B, Hkv, T, D] with T >= 1. What a perfect page selector would rank by (the oracle).
    """
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.cpu().double().repeat_interleave(group, dim=1)
    weights = torch.softmax((keys @ q.cpu().double()[..., None]).squeeze(-1) * scale, dim=-1)
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % page_size))
    return padded.unflatten(-1, (-1, page_size)).sum(-1).unflatten(1, (-1, group)).mean(2)
