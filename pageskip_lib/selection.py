"""From page scores to a page list: budget arithmetic, forced pages, and a top-k whose ties are decided.

Forced pages: the first page (the attention sink: Xiao et al., "Efficient Streaming Language Models with Attention
Sinks", arXiv 2309.17453) and the newest ones, where the current token sits. They count inside the budget.
"""

from dataclasses import dataclass

import torch

from .checks import check_lengths, check_page_size, check_tensor, page_count

LOCAL_TOKENS = 64  # what Budget.for_tokens keeps for sure of the newest text


@dataclass(frozen=True)
class Budget:
    """How many pages a decode step may read per KV head. sink and local pages count inside ``pages``.

    pages: K, all of them. sink: pages kept at the front. local: pages kept at the end, the one being filled among them.
    Raises ValueError when ``pages`` cannot hold the forced pages.
    """

    pages: int
    sink: int = 1
    local: int = 2

    def __post_init__(self):
        for name in ("pages", "sink", "local"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"Budget.{name} must be a whole number of pages, 0 or more, got {value!r}.")
        if self.pages < max(1, self.sink + self.local):
            raise ValueError(
                f"Budget(pages={self.pages}) is below its forced pages ({self.sink} sink + {self.local} local); "
                f"give it at least {max(1, self.sink + self.local)}."
            )

    @classmethod
    def for_tokens(cls, tokens, page_size):
        """The budget of ``tokens`` tokens: tokens // page_size pages, one of them the sink, at least 64 newest tokens local."""
        check_page_size(page_size)
        return cls(pages=int(tokens) // page_size, sink=1, local=page_count(LOCAL_TOKENS, page_size) + 1)


@dataclass
class PageList:
    """Pages to read, per sequence and KV head.

    pages: [B, Hkv, K] int32, ascending page numbers, -1 padding at the tail. counts: [B, Hkv] int32, how many are listed.
    """

    pages: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def from_rows(cls, rows, device="cpu"):
        """Make a list by hand: rows[b][h] is any iterable of page numbers; each is sorted and made unique."""
        rows = [[sorted(set(int(page) for page in head)) for head in row] for row in rows]
        longest = max((len(head) for row in rows for head in row), default=0)
        padded = [[head + [-1] * (longest - len(head)) for head in row] for row in rows]
        counts = [[len(head) for head in row] for row in rows]
        return cls(*(torch.tensor(part, dtype=torch.int32, device=device) for part in (padded, counts)))


def select_pages(scores, budget, lengths, page_size):
    """Pick the pages to read: forced pages first, then the best scores, lowest page first among equals.

    scores: [B, Hkv, N] fp32 (more columns than pages held are fine; a score of -inf is never picked, unless forced).
    budget: a ``Budget``. lengths: [B] int32 on scores' device. page_size: 16, 32, 64 or 128.
    Returns a ``PageList`` with K = budget.pages columns: min(K, pages held) pages each, and all of them when they fit.

    Everything stays on the device and no shape depends on a value, so the call can be captured in a CUDA graph.
    """
    check_tensor("scores", scores, "B, Hkv, N")
    check_page_size(page_size)
    if not isinstance(budget, Budget):
        raise TypeError(f"budget must be a Budget, got {type(budget).__name__}.")
    if not scores.is_floating_point():
        raise TypeError(f"scores must be a float tensor, got {scores.dtype}.")
    batch, kv_heads, pages = scores.shape
    lengths = check_lengths(lengths, batch, pages * page_size, scores.device)
    page = torch.arange(pages, device=scores.device)
    held = page_count(lengths, page_size)[:, None, None]
    forced = (page < budget.sink) | (page >= held - budget.local)
    # Clamped, so that a score of +inf cannot push a forced page out.
    ranked = scores.clamp(max=torch.finfo(scores.dtype).max).masked_fill(forced, float("inf")).masked_fill(page >= held, float("-inf"))
    # A stable sort keeps equal scores in page order; torch.topk promises nothing about ties.
    order = torch.sort(ranked, dim=-1, descending=True, stable=True)
    best, value = order.indices[..., : budget.pages], order.values[..., : budget.pages]
    best = torch.where(value > float("-inf"), best, pages).sort(dim=-1).values.to(torch.int32)
    counts = (best < pages).sum(-1, dtype=torch.int32)
    best = torch.nn.functional.pad(best.masked_fill(best == pages, -1), (0, budget.pages - best.shape[-1]), value=-1)
    return PageList(pages=best, counts=counts)
