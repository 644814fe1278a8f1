"""How much of the attention do the chosen pages hold? One captured layer, one way of choosing, several budgets in bytes.

The truth is the softmax in fp64 over all tokens that a step could see (``reference.page_mass`` is its definition by page). Budgets are shares of
the cache's own bytes (2 * tokens * D numbers a KV head), page summaries included, so that ways of choosing are compared at equal bytes read.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..bounds8 import encode
from ..checks import check_bound_size, check_page_size, page_count
from ..scores import GROUPS, page_scores
from ..selection import Budget
from ..summaries import PageSummary, check_kind, entry_bytes, summarize_pages
from .coarse import coarse_bytes, coarse_mass

POLICIES = ("oracle", "pageskip", "coarse", "window", "random")
AGGREGATORS = (*GROUPS, "union")
KIND_NAMES = {"minmax": "bound", "minmax8": "bound in 8 bits", "mean_radius": "mean + radius", "mean_std": "mean + 3 std", "mean": "mean"}
GROUP_NAMES = {"none": "own lists", "union": "union of lists"}


def ranking(scores, forced, held=None):
    """Page numbers best first, as ``select_pages`` would take them: forced pages, then by score, the lowest page first among equals.

    scores: [.., N]. forced, held: bool, broadcastable to it; pages that are not held come last.
    """
    ranked = scores.clamp(max=torch.finfo(scores.dtype).max).masked_fill(forced, float("inf"))
    if held is not None:
        ranked = ranked.masked_fill(~held, float("-inf"))
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices


def mass_curve(mass, scores, *, sink=1, local=2):
    """Attention mass kept by the first 1, 2, ... N pages of a ranking.

    mass: [B, Hkv, N], each page's share of the softmax (``reference.page_mass``). scores: [B, Hkv, N], the ranking, highest first;
    the first ``sink`` and last ``local`` pages come before all others. Returns N floats, averaged over B and Hkv; the last is 1.
    """
    pages = mass.shape[-1]
    page = torch.arange(pages, device=scores.device)
    order = ranking(scores.double(), (page < sink) | (page >= pages - local))
    return mass.gather(-1, order.to(mass.device)).cumsum(-1).mean((0, 1)).tolist()


@dataclass(frozen=True)
class Setting:
    """One way to choose pages.

    policy: "oracle" (by true mass, averaged over the KV head's query heads), "pageskip" (by page score), "coarse" (by mass on a coarse copy of
    the keys, with a group of "max" or "sum"), "window" or "random".
    kind, bound_size, group: of pageskip's scores, as ``summarize_pages`` and ``page_scores`` take them. Two groups let every query head rank
    pages for itself: all heads take their next best page in turn until the pages of the group together fill the budget. With "none" a head
    then attends to its own list only, with "union" to all that the group has read.
    """

    policy: str
    page_size: int
    kind: str | None = None
    bound_size: int | None = None
    group: str | None = None

    def __post_init__(self):
        check_page_size(self.page_size)
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {self.policy!r}.")
        if self.policy == "coarse" and self.group not in ("max", "sum"):
            raise ValueError(f"group must be 'max' or 'sum' for coarse keys, got {self.group!r}.")
        if self.policy != "pageskip":
            return
        check_kind(self.kind)
        if self.group not in AGGREGATORS:
            raise ValueError(f"group must be one of {AGGREGATORS}, got {self.group!r}.")
        object.__setattr__(self, "bound_size", check_bound_size(self.bound_size, self.page_size))

    @property
    def label(self):
        """A few words for tables and legends."""
        if self.policy == "coarse":
            return f"keys in 2 bits, page {self.page_size}, {self.group}"
        if self.policy != "pageskip":
            return f"{self.policy}, page {self.page_size}"
        finer = f" of {self.bound_size}" if self.bound_size != self.page_size else ""
        return f"{KIND_NAMES[self.kind]}{finer}, page {self.page_size}, {GROUP_NAMES.get(self.group, self.group)}"

    def summary_bytes(self, tokens, dim, element_size):
        """Bytes of one KV head's summaries, which a choice reads: 0 for a policy without scores."""
        if self.policy == "coarse":
            return coarse_bytes(tokens, dim)
        if self.policy != "pageskip":
            return 0
        return page_count(tokens, self.bound_size) * entry_bytes(self.kind, dim, element_size)

    def pages_within(self, share, tokens, dim, element_size):
        """K: the whole pages that fit, beside the summaries, into ``share`` of the cache's bytes. Below 0 where the summaries alone do not fit."""
        room = int(share * 2 * tokens * dim * element_size) - self.summary_bytes(tokens, dim, element_size)
        return room // (2 * self.page_size * dim * element_size)


class Layer:
    """One layer of a ``Captured``: S steps, softmax weights in fp64 [S, Hkv, G, T], and what follows from them."""

    def __init__(self, captured, index):
        self.q, self.lengths = captured.queries[:, index, 0], captured.lengths
        self.keys, self.values = captured.keys[index], captured.values[index]
        self.index = index
        kv_heads, self.tokens, self.dim = self.keys.shape
        q = self.q.double().unflatten(1, (kv_heads, -1))
        past = torch.arange(self.tokens) >= self.lengths[:, None, None, None]
        self.weights = torch.softmax((q @ self.keys.double().mT * captured.scale).masked_fill(past, float("-inf")), dim=-1)
        self._pages, self._summaries = {}, {}

    def by_page(self, page_size):
        """(mass [S, Hkv, G, N], the weighted sum of values [S, Hkv, G, N, D]) of each page, fp64."""
        if page_size not in self._pages:
            padding = -self.tokens % page_size
            weights = torch.nn.functional.pad(self.weights, (0, padding)).unflatten(-1, (-1, page_size))
            values = torch.nn.functional.pad(self.values.double(), (0, 0, 0, padding)).unflatten(1, (-1, page_size))
            sums = weights.permute(1, 3, 0, 2, 4).flatten(2, 3) @ values  # one product for each KV head and page
            sums = sums.unflatten(2, self.weights.shape[:3:2]).permute(2, 0, 3, 1, 4).contiguous()
            self._pages[page_size] = weights.sum(-1), sums
        return self._pages[page_size]

    @cached_property
    def exact(self):
        """Attention's output over everything, fp64 [S, Hkv, G, D]."""
        return self.weights @ self.values.double()[None]

    def summary(self, page_size, kind, bound_size):
        """The ``PageSummary`` that each of the S steps would see. Entries do not depend on the page size, so page sizes share them."""
        if (kind, bound_size) not in self._summaries:
            options = dict(kind=kind, bound_size=bound_size, backend="torch")
            whole = summarize_pages(self.keys[None], page_size, **options).fields
            fields = {name: entries.repeat(len(self.q), *[1] * (entries.dim() - 1)) for name, entries in whole.items()}
            for n, length in enumerate(self.lengths.tolist()):  # steps differ only in the entry that was being filled
                entry = (length - 1) // bound_size
                filled = self.keys[None, :, entry * bound_size : length]
                part = summarize_pages(filled, page_size, **options | dict(kind="minmax" if kind == "minmax8" else kind)).fields
                if kind == "minmax8":  # in the whole's channels
                    part = dict(zip(("kmin", "kmax", "scale"), encode(*part.values(), whole["channel"])))
                for name, entries in part.items():
                    fields[name][n, :, entry] = entries[0, :, 0]
            self._summaries[kind, bound_size] = PageSummary(kind, page_size, self.lengths, **fields, bound_size=bound_size)
        return replace(self._summaries[kind, bound_size], page_size=page_size)

    def scores(self, setting):
        """What the setting ranks pages by: [S, Hkv, N], or [S, Hkv, G, N] where query heads rank for themselves."""
        mass = self.by_page(setting.page_size)[0]
        if setting.policy == "oracle":
            return mass.mean(2)
        if setting.policy == "coarse":
            keys = self.keys.expand(len(self.q), *self.keys.shape)
            return coarse_mass(self.q, keys, self.lengths, setting.page_size, setting.group)
        if setting.policy == "window":
            return torch.arange(mass.shape[-1], dtype=torch.float32).expand(mass[:, :, 0].shape)
        if setting.policy == "random":
            return torch.rand(mass[:, :, 0].shape, generator=torch.Generator().manual_seed(self.index))
        apart = setting.group in ("none", "union")
        summary = self.summary(setting.page_size, setting.kind, setting.bound_size)
        scores = page_scores(self.q, summary, group="none" if apart else setting.group, backend="torch")
        return scores.unflatten(1, mass.shape[1:3]) if apart else scores


def measure(layer, setting, shares):
    """What the setting's choice keeps at each budget (share of the cache's bytes). A list, one entry a share, None where the forced pages do not fit.

    An entry is a dict of fp64 [S, Hkv]: mass (of the attended pages, mean over the group's query heads), forced (the mass of the sink and
    local pages alone), error (|sparse output - exact output| / |exact output|, mean over the heads), top1 and top4 (share of the 1 and 4 heaviest
    pages outside the forced ones that are attended), read (bytes of pages and summaries over bytes of the cache).
    """
    page_size, size = setting.page_size, layer.keys.element_size()
    mass, sums = layer.by_page(page_size)
    heads, pages = mass.shape[1:3], mass.shape[-1]
    length, page = layer.lengths.long(), torch.arange(pages)
    held = page_count(length, page_size)
    rule = Budget.for_tokens(layer.tokens, page_size)
    forced = ((page < rule.sink) | (page >= held[:, None] - rule.local)) & (page < held[:, None])
    inside = (torch.clamp(length[:, None] - page * page_size, 0, page_size) / length[:, None]).double()  # share of the tokens, [S, N]
    scores = layer.scores(setting)
    if scores.dim() == 3:
        scores = scores[:, :, None]
    lifted = (slice(None), None, None)
    own = ranking(scores, forced[lifted], (page < held[:, None])[lifted]).argsort(-1)  # rank of each page, [S, Hkv, 1 or G, N]
    together = own.amin(2)  # in turn: the heads' first choices, then their second ones
    ranks = together[:, :, None] if setting.group == "union" else own
    turns = torch.nn.functional.pad(together.sort(-1).values, (0, 1), value=pages)
    outside = mass.mean(2).masked_fill(forced[:, None], -1.0).masked_fill((page >= held[:, None])[:, None], -1.0)
    best = outside.topk(min(4, pages), dim=-1)
    summaries = torch.tensor([setting.summary_bytes(n, layer.dim, size) / (2 * n * layer.dim * size) for n in length.tolist()], dtype=torch.float64)
    alone = (mass.mean(2) * forced[:, None]).sum(-1)
    results = []
    for share in shares:
        budget = torch.tensor([setting.pages_within(share, n, layer.dim, size) for n in length.tolist()])
        if (budget < forced.sum(-1)).any():
            results.append(None)
            continue
        # Largest number of turns after which the group has read at most the budget: the rank of the first page that no longer fits.
        limit = turns.gather(-1, budget.clamp(max=pages)[:, None, None].expand(-1, heads[0], 1))
        attended = (ranks < limit[..., None]).double().expand(-1, -1, heads[1], -1)
        kept = (attended * mass).sum(-1)
        out = (attended[..., None, :] @ sums).squeeze(-2) / kept.clamp(min=torch.finfo(torch.float64).tiny)[..., None]
        found = attended.mean(2).gather(-1, best.indices) * (best.values >= 0)
        top = {f"top{r}": found[..., :r].sum(-1) / (best.values[..., :r] >= 0).sum(-1).clamp(min=1) for r in (1, 4)}
        read = ((together < limit) * inside[:, None]).sum(-1) + summaries[:, None]
        error = ((out - layer.exact).norm(dim=-1) / layer.exact.norm(dim=-1)).mean(2)
        results.append(dict(mass=kept.mean(2), forced=alone, error=error, **top, read=read))
    return results
