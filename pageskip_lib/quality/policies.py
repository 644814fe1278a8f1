"""Which pages a decode step reads. All policies force the same sink and local pages; they differ in what fills the rest."""

from dataclasses import dataclass

import torch

from ..checks import check_bound_size, check_page_size, page_count
from ..scores import GROUPS, page_scores
from ..selection import Budget, select_pages
from ..summaries import check_kind, entry_bytes
from .coarse import coarse_bytes, coarse_mass

DENSE_LAYERS = 2  # layers 0 and 1 spread their attention over most pages: no short list holds it, however ranked (07 shows it; Quest does the same)


@dataclass
class Policy:
    """Keep the best pages by ``score``; subclasses say what best means.

    budget: a ``Budget`` in pages of ``page_size`` tokens. dense_layers: the first so many layers read everything.
    """

    budget: Budget
    page_size: int = 16
    dense_layers: int = DENSE_LAYERS

    name = None
    reads = None  # to choose by: None, "summaries" or "keys"

    def __post_init__(self):
        check_page_size(self.page_size)

    def summary_bytes(self, tokens, dim, element_size):
        """What choosing reads, for one KV head."""
        return 0

    def choose(self, layer_idx, q, keys, lengths, summary):
        """The ``PageList`` for q [B, Hq, D] over the first lengths [B] int32 of the keys [B, Hkv, T, D], or None to read everything.

        summary(kind="minmax", bound_size=None) makes the layer's ``PageSummary``, for policies that read it.
        """
        if layer_idx < self.dense_layers:
            return None
        return select_pages(self.score(q, keys, summary), self.budget, lengths, self.page_size)

    def pages_of(self, keys):
        """[B, Hkv, N], the shape of this layer's scores."""
        return (*keys.shape[:2], page_count(keys.shape[2], self.page_size))


@dataclass
class FullPolicy:
    """Every page: exact attention, the control."""

    page_size: int = 16

    name = "full"
    reads = None

    def choose(self, layer_idx, q, keys, lengths, summary):
        return None


@dataclass
class SummaryPolicy(Policy):
    """Ranks pages by their summaries. kind, bound_size: of the summaries, as ``summarize_pages`` takes them.

    The default kind is the cheapest bound that is sure: what its summaries save in bytes buys pages (notebooks 07 and 08).
    """

    kind: str = "minmax8"
    bound_size: int | None = None

    reads = "summaries"

    def __post_init__(self):
        super().__post_init__()
        check_kind(self.kind)
        self.bound_size = check_bound_size(self.bound_size, self.page_size)

    def summary_bytes(self, tokens, dim, element_size):
        return page_count(tokens, self.bound_size) * entry_bytes(self.kind, dim, element_size)


@dataclass
class PageskipPolicy(SummaryPolicy):
    """The pages with the highest score: by default the bound on q.k (Quest, arXiv 2406.10774), the largest over the group's query heads.

    group: as ``page_scores`` takes it, but for "none".
    """

    group: str = "max"

    name = "pageskip"

    def __post_init__(self):
        super().__post_init__()
        if self.group not in GROUPS or self.group == "none":
            raise ValueError(f"group must be one of {GROUPS[:-1]}, since a KV head has one list, got {self.group!r}.")

    def score(self, q, keys, summary):
        return page_scores(q, summary(kind=self.kind, bound_size=self.bound_size), group=self.group)


@dataclass
class AdaptivePolicy(SummaryPolicy):
    """Every page that seems to hold at least ``least`` of the attention, up to the budget: heads that look in one place read little.

    least: 0 to 1. What a page seems to hold is the softmax over pages of its score / sqrt(D), averaged over the group's query heads. The
    score bounds the best key, so these are guesses: good for telling a flat head from a peaked one, not for keeping a promised share.
    So ``least`` is tuned for the bytes that a step may read on average; ``budget`` caps every KV head's list, forced pages included.
    """

    least: float = 1 / 256

    name = "adaptive"

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.least <= 1.0:
            raise ValueError(f"least must be a share of the attention, 0 to 1, got {self.least}.")

    def score(self, q, keys, summary):
        shares = page_scores(q, summary(kind=self.kind, bound_size=self.bound_size), group="softmax_sum") / (q.shape[1] // keys.shape[1])
        return shares.masked_fill(shares < self.least, float("-inf"))


@dataclass
class CoarsePolicy(Policy):
    """The pages with the most attention by a coarse copy of the keys (``coarse``). group: "max" or "sum" over a KV head's query heads."""

    group: str = "sum"

    name = "coarse"
    reads = "keys"

    def __post_init__(self):
        super().__post_init__()
        if self.group not in ("max", "sum"):
            raise ValueError(f"group must be 'max' or 'sum', got {self.group!r}.")

    def choose(self, layer_idx, q, keys, lengths, summary):
        if layer_idx < self.dense_layers:
            return None
        return select_pages(coarse_mass(q, keys, lengths, self.page_size, self.group), self.budget, lengths, self.page_size)

    def summary_bytes(self, tokens, dim, element_size):
        return coarse_bytes(tokens, dim)


class WindowPolicy(Policy):
    """The newest pages, and the sink (StreamingLLM, arXiv 2309.17453)."""

    name = "window"

    def score(self, q, keys, summary):
        shape = self.pages_of(keys)
        return torch.arange(shape[-1], dtype=torch.float32, device=keys.device).expand(shape)


@dataclass
class RandomPolicy(Policy):
    """Pages drawn anew for every layer, step and KV head; the same seed draws the same pages on every device."""

    seed: int = 0

    name = "random"

    def __post_init__(self):
        super().__post_init__()
        self._generator = torch.Generator().manual_seed(self.seed)

    def score(self, q, keys, summary):
        return torch.rand(self.pages_of(keys), generator=self._generator).to(keys.device)


POLICIES = {policy.name: policy for policy in (FullPolicy, PageskipPolicy, AdaptivePolicy, CoarsePolicy, WindowPolicy, RandomPolicy)}
