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
    kmin, kmax = (torch.full((*k.shape[:2], -(-k.shape[2] // page_size), k.shape[3]), float("nan"), dtype=torch.float64) for _ in range(2))
    for b, n, keys in _stretches(k, page_size, lengths):
        kmin[b, :, n], kmax[b, :, n] = keys.amin(1), keys.amax(1)
    return kmin, kmax


def page_bound(q, kmin, kmax):
    """Quest's bound by its definition, fp64 [B, Hq, N]: the sum over d of max(q_d kmin_d, q_d kmax_d)."""
    q, kmin, kmax = _aligned(q, kmin, kmax)
    return torch.maximum(q * kmin, q * kmax).sum(-1)


def page_bound_center(q, kmin, kmax):
    """The same bound as q . mid + |q| . half, fp64 [B, Hq, N]: centre and radius of each page's range."""
    q, kmin, kmax = _aligned(q, kmin, kmax)
    return (q * (kmin + kmax) / 2).sum(-1) + (q.abs() * (kmax - kmin) / 2).sum(-1)


def mean_summary(k, size, lengths=None):
    """Mean and standard deviation of every dimension over ``size`` tokens, fp64 [B, Hkv, S, D]; NaN where there is no token."""
    mean, std = (torch.full((*k.shape[:2], -(-k.shape[2] // size), k.shape[3]), float("nan"), dtype=torch.float64) for _ in range(2))
    for b, n, keys in _stretches(k, size, lengths):
        mean[b, :, n], std[b, :, n] = keys.mean(1), keys.std(1, correction=0)
    return mean, std


def farthest(k, centre, size, lengths=None):
    """Distance of the farthest of ``size`` keys from a centre [B, Hkv, S, D], fp64 [B, Hkv, S]; 0 where there is no token."""
    radius = torch.zeros(centre.shape[:3], dtype=torch.float64)
    for b, n, keys in _stretches(k, size, lengths):
        radius[b, :, n] = (keys - centre[b, :, n, None].cpu().double()).norm(dim=-1).amax(1)
    return radius


def best_key(q, k, page_size, lengths=None):
    """The largest q.k of each page, fp64 [B, Hq, N]; -inf for a page without tokens. What a bound must never be below."""
    best = torch.full((q.shape[0], q.shape[1], -(-k.shape[2] // page_size)), float("-inf"), dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b, n, keys in _stretches(k, page_size, lengths):
        best[b, :, n] = (keys.repeat_interleave(group, dim=0) @ q[b].cpu().double()[..., None]).amax((1, 2))
    return best


def _stretches(k, size, lengths):
    """(b, n, keys [Hkv, tokens, D] in fp64) of every stretch of ``size`` tokens that holds one."""
    for b in range(k.shape[0]):
        length = k.shape[2] if lengths is None else int(lengths[b])
        for n in range(-(-length // size)):
            yield b, n, k[b, :, n * size : min((n + 1) * size, length)].cpu().double()


def page_score(q, summary):
    """Every kind's score by its definition, from the numbers that a ``PageSummary`` stores: fp64 [B, Hq, N], -inf past the length."""
    return _per_page(_terms(q, summary)[0], summary)


def score_error(q, summary):
    """How far an fp32 score may be from ``page_score``, fp64 [B, Hq, N].

    A sum of D products in fp32, in any order, is off by at most (D + 1) * 2^-24 of the sum of their magnitudes, to first order; adding the
    second product, or the norm times the radius (about D / 2 roundings), keeps within that. Hardware may cut instead of round, which doubles
    it: D * 2^-23. What falls below the smallest normal fp32 number, 2^-126, may be flushed to 0, once for each product.

    The kernel of minmax8 rounds the query to 2^14 - 1 units of its largest component, and adds what that can lose: half a unit times a code
    of 127 for each dim. So its score is up to 128 units of the entry's scale above, for each dim, and what is flushed was up to 2^26 times.
    """
    magnitude = _terms(q, summary)[1]
    error = 2**-23 * magnitude + 2**-126
    if summary.kind == "minmax8":
        group = q.shape[1] // summary.kmin.shape[1]
        channel, scale = (x.cpu().double().repeat_interleave(group, dim=1) for x in (summary.channel, summary.scale))
        error = error + 128 / (2**14 - 1) * (q.cpu().double() * channel).abs().amax(-1)[..., None] * scale + 2**-100
    return _per_page(q.shape[-1] * error, summary)


def _terms(q, summary):
    """(score, sum of the magnitudes that it adds up) of every entry, fp64 [B, Hq, S]."""
    if summary.kind in ("minmax", "minmax8"):
        kmin, kmax = summary.kmin.double(), summary.kmax.double()
        if summary.kind == "minmax8":
            unit = summary.scale.double()[..., None] * summary.channel.double()[:, :, None]
            kmin, kmax = kmin * unit, kmax * unit
        largest = torch.maximum(kmin.abs(), kmax.abs())
        return page_bound(q, kmin, kmax), page_bound(q.abs(), -largest, largest)
    group = q.shape[1] // summary.mean.shape[1]
    fields = {name: field.cpu().double().repeat_interleave(group, dim=1) for name, field in summary.fields.items()}
    q = q.cpu().double()[:, :, None]
    along, around = q * fields["mean"], 0.0
    if summary.kind == "mean_std":
        around = 3 * (q.abs() * fields["std"]).sum(-1)
    if summary.kind == "mean_radius":
        around = q.norm(dim=-1) * fields["radius"]
    return along.sum(-1) + around, along.abs().sum(-1) + around


def _per_page(entries, summary):
    """The largest value over each page's entries that hold a token, [B, Hq, N]."""
    first_token = torch.arange(entries.shape[-1]) * summary.bound_size
    entries = entries.masked_fill((first_token >= summary.lengths.cpu()[:, None])[:, None], float("-inf"))
    per_page = summary.page_size // summary.bound_size
    return torch.nn.functional.pad(entries, (0, -entries.shape[-1] % per_page), value=float("-inf")).unflatten(-1, (-1, per_page)).amax(-1)


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
