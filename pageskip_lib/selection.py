"""From page scores to a page list: budget arithmetic, forced pages, and a top-k whose ties are decided.

Forced pages: the first page (the attention sink: Xiao et al., "Efficient Streaming Language Models with Attention
Sinks", arXiv 2309.17453) and the newest ones, where the current token sits. They count inside the budget.

The kernel sorts nothing. What fits the budget is every page whose score reaches some threshold, so one program per sequence and KV
head keeps its row of scores in registers and searches for the threshold: fp32 scores become 32-bit keys of the same order, and
each pass counts the keys at or above two thresholds, which cut the interval in three; both counts are one sum, so a pass has one
sum to wait for. The interval begins as the lowest to the highest key of the row, and the search ends once a threshold lets exactly
the budget through. The first passes cut the interval of scores, where scores lie evenly; half of all keys lie between -1 and 1.
Ties leave nothing to find there, so the passes after that cut the interval of keys, which ends after 21 at most. Then a page is a bit, 32 to a word, so that prefix sums run over words and each thread writes the pages of its own words, in
page order: the list is ascending by itself, and among equals the lowest pages are the first to find a place.
"""

import os
from dataclasses import dataclass

import torch

from .checks import check_inner_stride, check_lengths, check_page_size, check_per_sequence, check_tensor, page_count, shape_of
from .runtime import card, resolve_backend, tl, triton
from .tiles import valid_length

LOCAL_TOKENS = 64  # what Budget.for_tokens keeps for sure of the newest text
MAX_PAGES = 32768  # of a row that the kernel takes: it counts pages in 16 bits
BY_VALUE = tl.constexpr(6)  # passes that cut the interval of scores before the others cut the interval of keys
KEYS_PER_THREAD = 8  # with more of them fewer warps wait for one another at each sum, with fewer each has less to add up


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


@triton.jit
def _narrow(threshold, count, budget, low, high, reach, above):
    """What is known once ``count`` keys are seen to reach ``threshold``: it is the new low, or else perhaps the new high."""
    enough = count >= budget
    low = tl.where(enough, threshold, low)
    reach = tl.where(enough, count, reach)
    high = tl.where(enough, high, tl.minimum(high, threshold))
    above = tl.where(enough, above, tl.maximum(above, count))
    return low, high, reach, above


@triton.jit
def _key(score):
    """fp32 scores as unsigned numbers of the same order: -0.0 equals 0.0, and no score but NaN becomes 0."""
    bits = score.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(bits > magnitude, 0x80000000 - magnitude, 0x80000000 + magnitude)


@triton.jit
def _score(key):
    """The score that a key above 0 stands for."""
    return tl.where(key < 0x80000000, (key ^ 0xFFFFFFFF) + 1, tl.maximum(key, 0x80000000) - 0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _ones(word):
    """How many bits of each 32-bit word are 1."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word += word >> 8
    return (word + (word >> 16)) & 0x3F


@triton.jit
def choose_row(score, held, budget, sink, local, pages_ptr, capacity, BLOCK_N: tl.constexpr):
    """Write one row's list to pages_ptr [capacity], -1 after its end; returns how many pages it lists.

    score: fp32 [BLOCK_N // 32, 32], of page 32 i + j at [i, j], -inf past the row's end. held: pages that hold a token. budget, sink,
    local: numbers of pages.
    """
    page = tl.arange(0, BLOCK_N // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    forced = ((page < sink) | (page >= held - local)) & (page < held)
    rivals = (score > float("-inf")) & (page < held) & ~forced  # False for NaN too

    key = _key(score)
    low = tl.min(tl.where(rivals, key, 0xFF800000))  # the key of +inf: without rivals low > high, and nothing is searched
    key = tl.where(rivals, key, 0)
    high = tl.max(key) + 1
    key = tl.where(forced, 0xFFFFFFFF, key)

    # All along, fewer keys than the budget reach ``high`` (``above`` of them), and at least the budget reach ``low`` (``reach``).
    # Only at the start can it be otherwise, and then there is nothing to search: forced pages take every place, or all pages have one.
    above = tl.minimum(sink + local, held)
    reach = held
    passes = 0
    while (above < budget) & (reach > budget) & (high > low + 1):
        third = (high - low + 2) // 3
        least, most = _score(low), _score(high - 1)
        gap = (most - least) / 3
        by_value = passes < BY_VALUE
        # Whatever the arithmetic made of huge scores, the thresholds stay inside, and so the interval shrinks.
        first = tl.where(by_value, tl.minimum(tl.maximum(_key(least + gap), low + 1), high - 1), low + third)
        second = tl.where(by_value, tl.minimum(tl.maximum(_key(most - gap), first), high - 1), low + 2 * third)
        both = tl.sum((key >= first).to(tl.uint32) + ((key >= second).to(tl.uint32) << 16))
        low, high, reach, above = _narrow(first, (both & 0xFFFF).to(tl.int32), budget, low, high, reach, above)
        low, high, reach, above = _narrow(second, (both >> 16).to(tl.int32), budget, low, high, reach, above)
        passes += 1

    # From here on a page is a bit: one word for 32 pages says which of them are surely in, and one which are at the threshold.
    # Gathered in their own order, which hands every thread words of its own; the sums leave each word with all threads of a warp.
    word = tl.arange(0, BLOCK_N // 32)
    bit = (tl.zeros([32], tl.uint32) + 1) << tl.arange(0, 32).to(tl.uint32)
    sure = tl.gather(tl.sum(tl.where(key >= high, bit[None, :], 0), axis=1), word, axis=0)
    tied = tl.gather(tl.sum(tl.where((key >= low) & (key < high), bit[None, :], 0), axis=1), word, axis=0)
    both = _ones(sure) + (_ones(tied) << 16)
    before = tl.cumsum(both, axis=0) - both
    total = tl.sum(both, axis=0)
    places = (budget - above).to(tl.uint32)
    count = ((total & 0xFFFF) + tl.minimum(total >> 16, places)).to(tl.int32)
    seen = before >> 16  # pages at the threshold so far: the first of them have a place
    slot = (before & 0xFFFF) + tl.minimum(seen, places)
    rest = sure | tl.where(seen < places, tied, 0)
    for _ in range(tl.max(_ones(rest), axis=0).to(tl.int32)):
        others = rest & (tl.maximum(rest, 1) - 1)
        lowest = rest ^ others
        is_tied = (tied & lowest) != 0
        taken = (rest != 0) & (~is_tied | (seen < places))
        number = (lowest.to(tl.float32).to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - 127  # the exponent of 2^i is i
        tl.store(pages_ptr + slot, word * 32 + number, mask=taken)
        slot += taken.to(tl.uint32)
        seen += is_tied.to(tl.uint32)
        rest = others
    padding = tl.arange(0, BLOCK_N)
    for start in range(count, capacity, BLOCK_N):
        tl.store(pages_ptr + start + padding, -1, mask=start + padding < capacity)
    return count


@triton.jit(do_not_specialize=["s_batch", "s_head"])
def _select_kernel(
    scores_ptr, lengths_ptr, row_budgets_ptr, pages_ptr, counts_ptr, copy_ptr, s_batch, s_head,
    kv_heads, pages, capacity, sink, local, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    batch = row // kv_heads
    page = tl.arange(0, BLOCK_N // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    score = tl.load(scores_ptr + batch * s_batch + (row % kv_heads) * s_head + page, mask=page < pages, other=float("-inf"))
    length = valid_length(lengths_ptr, batch, pages * PAGE)
    held = tl.cdiv(length, PAGE)
    if copy_ptr is not None:
        tl.store(copy_ptr + batch, length, mask=row % kv_heads == 0)
    budget = capacity
    if row_budgets_ptr is not None:
        budget = tl.minimum(tl.maximum(tl.load(row_budgets_ptr + batch), sink + local), capacity)
    tl.debug_barrier()  # or else the compiler, short of predicates, would wait for some scores before it asks for the next
    count = choose_row(score, held, budget, sink, local, pages_ptr + row * capacity, capacity, BLOCK_N)
    tl.store(counts_ptr + row, count)


def select_shape(pages, card):
    """The constants and options of the launch for rows of so many scores on a ``Card``."""
    block, early = max(32, triton.next_power_of_2(pages)), card.dependent_launch
    warps = max(1, min(16, block // (32 * KEYS_PER_THREAD)))
    return dict(BLOCK_N=block, DEPENDENT=early, num_warps=warps, **(dict(launch_pdl=True) if early else {}))


def launch_select(scores, budget, lengths, page_size, out, *, row_budgets=None, copy_lengths=None):
    """Write the list of every row into out, a ``PageList``, and the lengths into copy_lengths [B] int32 too, if given."""
    batch, kv_heads, pages = scores.shape
    if batch * kv_heads:
        _select_kernel[(batch * kv_heads,)](
            scores, lengths, row_budgets, out.pages, out.counts, copy_lengths, *scores.stride()[:2],
            kv_heads, pages, budget.pages, budget.sink, budget.local, PAGE=page_size, **select_shape(pages, card(scores.device)),
        )  # fmt: skip


def empty_list(scores, budget):
    """A ``PageList`` to be filled."""
    shape = *scores.shape[:2], budget.pages
    return PageList(*(torch.empty(size, dtype=torch.int32, device=scores.device) for size in (shape, shape[:2])))


def _select_torch(scores, budget, lengths, page_size, row_budgets):
    """The same pages by sorting; returns (pages, counts) as the fields of a ``PageList``."""
    pages = scores.shape[2]
    page = torch.arange(pages, device=scores.device)
    held = pages if lengths is None else page_count(lengths.clamp(0, pages * page_size), page_size)[:, None, None]
    forced = (page < budget.sink) | (page >= held - budget.local)
    # In fp64 there is a number above every fp32 score for +inf, and infinity itself is left for the forced pages.
    ranked = scores.double().nan_to_num(nan=float("-inf"), posinf=torch.finfo(torch.float64).max, neginf=float("-inf"))
    ranked = ranked.masked_fill_(forced, float("inf")).masked_fill_(page >= held, float("-inf"))
    # A stable sort keeps equal scores in page order; torch.topk promises nothing about ties.
    order = torch.sort(ranked, dim=-1, descending=True, stable=True)
    best, value = order.indices[..., : budget.pages], order.values[..., : budget.pages]
    kept = value > float("-inf")
    if row_budgets is not None:
        kept &= page[: budget.pages] < row_budgets.clamp(budget.sink + budget.local, budget.pages)[:, None, None]
    best = best.to(torch.int32).masked_fill_(~kept, pages).sort(dim=-1).values
    best.masked_fill_(best == pages, -1)
    if best.shape[-1] < budget.pages:
        best = torch.nn.functional.pad(best, (0, budget.pages - best.shape[-1]), value=-1)
    return best, kept.sum(-1, dtype=torch.int32)


def _check_out(out, scores, capacity):
    if not isinstance(out, PageList):
        raise TypeError(f"out must be a PageList, got {type(out).__name__}.")
    for name, tensor, shape in (("pages", out.pages, (*scores.shape[:2], capacity)), ("counts", out.counts, scores.shape[:2])):
        check_tensor(f"out.{name}", tensor, ", ".join(("B", "Hkv", "K")[: len(shape)]))
        if tensor.shape != tuple(shape):
            raise ValueError(f"out.{name} must have shape {list(shape)}, got {shape_of(tensor)}.")
        if tensor.dtype != torch.int32 or tensor.device != scores.device:
            raise TypeError(f"out.{name} must be int32 on {scores.device}, got {tensor.dtype} on {tensor.device}.")
        if not tensor.is_contiguous():
            raise ValueError(f"out.{name} must be contiguous, got strides {tensor.stride()}.")


def check_scores_differ(scores, budget, lengths, page_size):
    """Raise ValueError when a row that has pages to choose from gives all of them one score, as a failed reduction does: it would keep the lowest pages.

    For debugging, with PAGESKIP_DEBUG=1 in the environment: it waits for the device.
    """
    page = torch.arange(scores.shape[2], device=scores.device)
    held = scores.shape[2] if lengths is None else page_count(lengths.clamp(0, scores.shape[2] * page_size), page_size)[:, None, None]
    free = (page >= budget.sink) & (page < held - budget.local)
    constant = scores.masked_fill(~free, float("inf")).amin(2) == scores.masked_fill(~free, float("-inf")).amax(2)
    constant &= (free.sum(-1) > max(1, budget.pages - budget.sink - budget.local)).expand_as(constant)
    if constant.any():
        row, head = constant.nonzero()[0].tolist()
        raise ValueError(f"scores of sequence {row}, KV head {head} are {scores[row, head, budget.sink].item():g} for every page that may be chosen.")


def select_pages(scores, budget, lengths, page_size, *, row_budgets=None, out=None, backend="auto"):
    """Pick the pages to read: forced pages first, then the best scores, lowest page first among equals.

    scores: [B, Hkv, N] fp32, last dimension contiguous (more columns than pages held are fine). A score of -inf or NaN is never
    picked, unless forced; +inf is the best score, but forced pages come first; -0.0 and 0.0 are equal. budget: a ``Budget``.
    lengths: [B] int32 on scores' device, or None when every page is held. page_size: 16, 32, 64 or 128. row_budgets: [B] int32 on
    scores' device, each sequence's own K, brought into the range from sink + local to budget.pages; without it K is budget.pages.
    out: a ``PageList`` to write into, contiguous, [B, Hkv, budget.pages] and [B, Hkv]. backend: "auto", "triton" or "torch".

    Returns a ``PageList`` with budget.pages columns (``out`` if given): min(K, pages held) pages each, and all of them when they fit.
    Everything stays on the device and no shape depends on a value, so the call can be captured in a CUDA graph. Triton makes it
    one launch and allocates nothing but the result; it takes up to 32,768 pages.
    Raises ValueError or TypeError for what does not fit; with PAGESKIP_DEBUG=1 in the environment also for scores that are all the same.
    """
    check_tensor("scores", scores, "B, Hkv, N")
    check_page_size(page_size)
    if not isinstance(budget, Budget):
        raise TypeError(f"budget must be a Budget, got {type(budget).__name__}.")
    if scores.dtype != torch.float32:
        raise TypeError(f"scores must be float32, got {scores.dtype}.")
    check_inner_stride("scores", scores)
    batch, kv_heads, pages = scores.shape
    if lengths is not None:
        lengths = check_lengths(lengths, batch, pages * page_size, scores.device)
    if row_budgets is not None:
        check_per_sequence("row_budgets", row_budgets, batch, scores.device)
    if out is not None:
        _check_out(out, scores, budget.pages)
    if os.environ.get("PAGESKIP_DEBUG", "") not in ("", "0") and scores.numel():
        check_scores_differ(scores, budget, lengths, page_size)
    backend = resolve_backend(backend, scores)
    if backend == "triton" and pages > MAX_PAGES:
        raise ValueError(f"scores may have {MAX_PAGES} pages at most, got {pages}; use larger pages, or backend='torch'.")
    if backend == "torch":
        found = PageList(*_select_torch(scores, budget, lengths, page_size, row_budgets))
        if out is None:
            return found
        out.pages.copy_(found.pages)
        out.counts.copy_(found.counts)
    else:
        out = out or empty_list(scores, budget)
        launch_select(scores, budget, lengths, page_size, out, row_budgets=None if row_budgets is None else row_budgets.contiguous())
    return out
