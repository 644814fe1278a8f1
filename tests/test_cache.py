"""The paged cache: after any operations its pages hold the right tokens, its summaries equal a rebuild, and no page is lost or owned twice."""

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pageskip_lib import CacheFull, PagedKVCache, bounds8, page_scores, reference, runtime, summarize_pages

from helpers import each_backend, each_backend_and_dtype, randn, same_bits

NAN = float("nan")
ROWS, POOL, ROW_PAGES, PAGE = 3, 7, 4, 16  # a pool that three rows of four pages can exhaust


def make_cache(*, pool=POOL, rows=ROWS, row_pages=ROW_PAGES, kv_heads=2, dim=64, page_size=PAGE, dtype=torch.float32, device="cpu",
    backend="torch", kind="minmax8", shuffle=0,
):  # fmt: skip
    """A cache whose unused memory is NaN, and whose pages are handed out in no order."""
    cache = PagedKVCache(
        pool, kv_heads, dim, rows=rows, row_pages=row_pages, page_size=page_size, dtype=dtype, device=device, kind=kind, backend=backend
    )
    random.Random(shuffle).shuffle(cache._free)
    poison_free(cache)
    return cache


def poison_free(cache):
    """What a free page holds must never matter, nor what the summaries hold past a length."""
    for pool in (cache.k, cache.v):
        pool[cache._free] = NAN
    unused = torch.arange(cache.table.shape[1], device=cache.k.device) * cache.page_size >= cache.lengths[:, None]
    for name, field in cache.summary.fields.items():
        if name != "channel":
            field.movedim(2, 1)[unused] = NAN if field.is_floating_point() else 99


def tokens(shape, seed, cache):
    return tuple(randn(*shape, seed=2 * seed + n, dtype=cache.k.dtype, device=cache.k.device) for n in (0, 1))


def one_token(cache, seed, rows=None):
    _, kv_heads, _, dim = cache.k.shape
    return tokens((len(cache.lengths) if rows is None else len(rows), kv_heads, dim), seed, cache)


def assert_pages_are_owned_right(cache):
    """The host's books, the device's table and lengths, and the free list tell one story."""
    table, pool = cache.table.tolist(), len(cache.k)
    assert cache.lengths.tolist() == cache.host_lengths
    held = [[page for page in row if page >= 0] for row in table]
    for row, pages, length in zip(table, held, cache.host_lengths):
        assert len(pages) == -(-length // cache.page_size) and row == pages + [-1] * (len(row) - len(pages))
        assert len(set(pages)) == len(pages)
    in_use = {page for pages in held for page in pages}
    assert sorted([*in_use, *cache._free]) == list(range(pool))
    assert cache._owners == [sum(page in pages for pages in held) for page in range(pool)]
    assert cache._pages == held and cache.free_pages == pool - len(in_use)


def assert_summary_equals_a_rebuild(cache, keys, backend="torch"):
    """Every entry that holds a token, bit for bit, from the rows' true ``keys`` [Hkv, length, D]; the sizes of the channels as they are."""
    for row, known in enumerate(keys):
        count = -(-known.shape[1] // cache.page_size)
        truth = summarize_pages(known[None], cache.page_size, backend=backend).fields
        if cache.summary.kind == "minmax8":
            truth = dict(zip(("kmin", "kmax", "scale"), bounds8.encode(*truth.values(), cache.summary.channel[row : row + 1])))
        for name, field in truth.items():
            assert same_bits(cache.summary.fields[name][row, :, :count], field[0]), (row, name)


def assert_holds(cache, keys, values):
    """``keys`` and ``values``: what each row should hold, [Hkv, length, D]."""
    assert_pages_are_owned_right(cache)
    k, v = cache.view()
    for row, length in enumerate(cache.host_lengths):
        assert same_bits(k[row, :, :length], keys[row]) and same_bits(v[row, :, :length], values[row])
    assert_summary_equals_a_rebuild(cache, keys)


class CacheMachine(RuleBasedStateMachine):
    """Any sequence of operations, beside a model that is three lists of tensors and knows no pages."""

    backend = "torch"

    @initialize(shuffle=st.integers(0, 99), kind=st.sampled_from(["minmax8", "minmax"]))
    def start(self, shuffle, kind):
        self.cache = make_cache(shuffle=shuffle, kind=kind, backend=self.backend)
        self.rows = [(torch.zeros(2, 0, 64), torch.zeros(2, 0, 64)) for _ in range(ROWS)]
        self.seed = 0

    def pages_needed(self, rows, count):
        """What must be free for this append, by a count of its own: new pages, and one copy for each sharer of a last page but one."""
        lengths = [self.rows[row][0].shape[1] for row in rows]
        new = sum(-(-(length + count) // PAGE) - -(-length // PAGE) for length in lengths)
        writers = [int(self.cache.table[row, length // PAGE]) for row, length in zip(rows, lengths) if length % PAGE]
        owners = self.cache.table.flatten().tolist()
        return new + sum(min(writers.count(page), owners.count(page) - 1) for page in set(writers))

    def appended(self, rows, k_new, v_new, given):
        fits = all(self.rows[row][0].shape[1] + k_new.shape[2] <= ROW_PAGES * PAGE for row in rows)
        if fits and self.pages_needed(rows, k_new.shape[2]) <= self.cache.free_pages:
            self.cache.append(*given, rows=rows)
            for n, row in enumerate(rows):
                self.rows[row] = tuple(torch.cat([old, new[n]], dim=1) for old, new in zip(self.rows[row], (k_new, v_new)))
        else:
            before = [tensor.clone() for tensor in (self.cache.k, self.cache.v)]
            with pytest.raises(CacheFull):
                self.cache.append(*given, rows=rows)
            for pool, kept in zip((self.cache.k, self.cache.v), before):
                assert torch.equal(pool.nan_to_num(), kept.nan_to_num())

    some_rows = st.lists(st.integers(0, ROWS - 1), min_size=0, max_size=ROWS, unique=True)

    @rule(rows=some_rows, times=st.integers(1, 5))
    def append_one_by_one(self, rows, times):
        for _ in range(times):
            self.seed += 1
            k_new, v_new = one_token(self.cache, self.seed, rows)
            self.appended(rows, k_new[:, :, None], v_new[:, :, None], (k_new, v_new))

    @rule(rows=some_rows, count=st.integers(0, 40))
    def append_many(self, rows, count):
        self.seed += 1
        k_new, v_new = tokens((len(rows), 2, count, 64), self.seed, self.cache)
        self.appended(rows, k_new, v_new, (k_new, v_new))

    @rule(data=st.data())
    def truncate(self, data):
        lengths = [data.draw(st.integers(0, keys.shape[1])) for keys, _ in self.rows]
        self.cache.truncate(lengths)
        self.rows = [(keys[:, :length], values[:, :length]) for (keys, values), length in zip(self.rows, lengths)]
        poison_free(self.cache)

    @rule(row=st.integers(0, ROWS - 1))
    def free(self, row):
        self.cache.free(row)
        self.rows[row] = tuple(x[:, :0] for x in self.rows[row])
        poison_free(self.cache)

    @rule(source=st.integers(0, ROWS - 1), other=st.integers(1, ROWS - 1))
    def fork(self, source, other):
        target = (source + other) % ROWS
        if self.rows[target][0].shape[1]:
            self.free(target)
        self.cache.fork(source, target)
        self.rows[target] = self.rows[source]

    @invariant()
    def holds(self):
        assert_holds(self.cache, *zip(*self.rows))


class InterpretedCacheMachine(CacheMachine):
    backend = "triton"


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)

TestInterpretedCache = pytest.mark.skipif(not runtime.INTERPRETED, reason="needs Triton's interpreter")(InterpretedCacheMachine.TestCase)
TestInterpretedCache.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
