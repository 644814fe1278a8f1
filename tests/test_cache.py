"""The paged cache: after any operations its pages hold the right tokens, its summaries equal a rebuild, and no page is lost or owned twice."""

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pageskip_lib import CacheFull, PagedKVCache, bounds8, page_scores, reference, runtime, summarize_pages

from helpers import each_backend, each_backend_and_dtype, randn, same_bits, waiting_fails

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


# --- one thing at a time -------------------------------------------------------------------------------------------------


@each_backend_and_dtype
@pytest.mark.parametrize("kind", ["minmax8", "minmax"])
def test_one_by_one_across_page_boundaries_equals_a_rebuild(backend, dtype, kind, device):
    """Cases G1 and G3: after every token, heads and dims that are no powers of two, and a score sees the token that was just appended."""
    cache = make_cache(pool=9, kv_heads=3, dim=80, dtype=dtype, kind=kind, device=device, backend=backend)
    known = [tuple(x[0] for x in tokens((1, 3, length, 80), row, cache)) for row, length in enumerate((0, 15, 30))]
    for row, (keys, values) in enumerate(known):
        cache.append(keys[None], values[None], rows=[row])
    for step in range(18):
        q, (k_new, v_new) = randn(3, 6, 80, seed=99, dtype=dtype, device=device), one_token(cache, 10 + step)
        cache.append(k_new, v_new)
        known = [(torch.cat([keys, k[:, None]], 1), torch.cat([values, v[:, None]], 1)) for (keys, values), k, v in zip(known, k_new, v_new)]
        assert_holds(cache, *zip(*known))
        score = page_scores(q, cache.summary, group="none", backend=backend)
        for row, (keys, _) in enumerate(known):
            best = reference.best_key(q[row : row + 1], keys[None], PAGE)
            bound = score[row, :, : best.shape[2]].cpu()
            assert (bound >= best[0] - 1e-3).all() and (score[row, :, best.shape[2] :] == -float("inf")).all()


@each_backend
def test_many_at_once_equals_one_by_one(backend, device):
    """Case K5: the end of a page that was begun, whole pages, and the beginning of the next, for rows of different lengths at once."""
    whole, single = (make_cache(pool=12, row_pages=5, device=device, backend=backend, kind="minmax", shuffle=n) for n in (0, 1))
    for cache in (whole, single):
        cache.append(*tokens((2, 2, 5, 64), 0, cache), rows=[2, 0])
        cache.append(*tokens((1, 2, 16, 64), 1, cache), rows=[0])
    for row, count in ((2, 1), (0, 50), (2, 43), (1, 16)):
        k_new, v_new = tokens((1, 2, count, 64), count, whole)
        whole.append(k_new, v_new, rows=[row])
        for n in range(count):
            single.append(k_new[:, :, n], v_new[:, :, n], rows=[row])
    assert whole.host_lengths == single.host_lengths == [71, 16, 49]
    keys, values = zip(*[(k[:, :length], v[:, :length]) for k, v, length in zip(*single.view(), single.host_lengths)])
    for cache in (whole, single):
        assert_holds(cache, keys, values)


@each_backend
def test_rows_that_are_left_out_stay_as_they_are(backend, device):
    """Rows in any order, with gaps; not even the summary of a row that is not named is written to."""
    cache = make_cache(device=device, backend=backend)
    cache.append(*tokens((3, 2, 20, 64), 0, cache))
    before = [tensor[1].clone() for tensor in (cache.table, cache.lengths, *cache.summary.fields.values(), *cache._exact)]
    k_new, v_new = one_token(cache, 1, rows=[2, 0])
    cache.append(k_new, v_new, rows=[2, 0])
    assert cache.lengths.tolist() == [21, 20, 21]
    k, v = cache.view()
    for n, row in enumerate((2, 0)):
        assert same_bits(k[row, :, 20], k_new[n]) and same_bits(v[row, :, 20], v_new[n])
    after = [tensor[1] for tensor in (cache.table, cache.lengths, *cache.summary.fields.values(), *cache._exact)]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after))


@each_backend
def test_a_shared_page_is_copied_by_whoever_writes_first(backend, device):
    """Whole pages stay shared, the last partial one is copied once, and a row that was cut back into a shared page copies that one."""
    cache = make_cache(device=device, backend=backend)
    k, v = (x[0] for x in tokens((1, 2, 40, 64), 0, cache))
    cache.append(k[None], v[None], rows=[0])
    cache.fork(0, 2)
    assert cache.free_pages == POOL - 3 and cache.table[0].tolist() == cache.table[2].tolist()
    k_new, v_new = one_token(cache, 1, rows=[0, 2])
    cache.append(k_new, v_new, rows=[0, 2])
    assert cache.free_pages == POOL - 4 and (cache.table[0] == cache.table[2]).tolist() == [True, True, False, True]
    none = k[:, :0]
    assert_holds(cache, *([torch.cat([x, new[0, :, None]], 1), none, torch.cat([x, new[1, :, None]], 1)] for x, new in ((k, k_new), (v, v_new))))
    cache.truncate([41, 0, 20])
    assert cache.free_pages == POOL - 3
    cache.append(k_new[1:], v_new[1:], rows=[2])
    assert cache.free_pages == POOL - 4 and (cache.table[0] == cache.table[2]).tolist() == [True, False, False, True]
    assert_holds(
        cache, *([torch.cat([x, new[0, :, None]], 1), none, torch.cat([x[:, :20], new[1, :, None]], 1)] for x, new in ((k, k_new), (v, v_new)))
    )
    cache.free(0)
    assert cache.free_pages == POOL - 2  # what row 2 shares with nobody now is still its own


@each_backend
def test_out_of_room_nothing_is_lost(backend, device):
    """A row that is full, a pool that is empty, and one that has pages for some rows only; also for the copy of a shared page."""
    cache = make_cache(pool=5, device=device, backend=backend)
    cache.append(*tokens((1, 2, 64, 64), 0, cache), rows=[0])
    cache.append(*tokens((1, 2, 16, 64), 1, cache), rows=[1])
    state = lambda: [x.clone() for x in (cache.k, cache.v, cache.table, cache.lengths, *cache.summary.fields.values(), *cache._exact)]  # noqa: E731
    before, books = state(), (list(cache._free), list(cache._owners), list(cache.host_lengths))
    for rows, message in (([0], "Row 0 holds 64 of at most 64 tokens"), ([1, 2], "0 free pages of 5 and this takes 2"), ([2], "this takes 1")):
        with pytest.raises(CacheFull, match=message):
            cache.append(*one_token(cache, 2, rows), rows=rows)
    cache.fork(1, 2)
    cache.truncate([64, 16, 10])
    with pytest.raises(CacheFull, match="0 free pages of 5 and this takes 1"):
        cache.append(*one_token(cache, 2, [2]), rows=[2])
    cache.free(2)
    assert (cache._free, cache._owners, cache.host_lengths) == books
    assert all(torch.equal(a[:2].nan_to_num(), b[:2].nan_to_num()) for a, b in zip(before, state()))
    cache.truncate([48, 16, 0])
    cache.append(*one_token(cache, 2, [1]), rows=[1])
    assert cache.host_lengths == [48, 17, 0]


@each_backend
def test_channels_are_sized_by_what_a_row_begins_with(backend, device):
    """And not by what another sequence left in that row: bits must not depend on who was there before."""
    cache = make_cache(rows=2, device=device, backend=backend)
    k, v = tokens((1, 2, 20, 64), 0, cache)
    k[..., ::2] *= 2.0**-6
    for _ in range(2):
        cache.append(k, v, rows=[1])
        expected = summarize_pages(k, PAGE, kind="minmax8").channel
        assert same_bits(cache.summary.channel[1:], expected) and len(expected.unique()) > 2
        cache.append(*one_token(cache, 1, [1]), rows=[1])
        assert same_bits(cache.summary.channel[1:], expected)
        cache.free(1)
        assert (cache.summary.channel == 1).all()
    cache.append(*one_token(cache, 1, [1]), rows=[1])
    assert (cache.summary.channel == 1).all()


def test_bad_input_is_refused_before_anything_changes(device):
    cache = make_cache(device=device)
    k, v = one_token(cache, 0)
    for given, message in (
        (dict(k_new=k[:2], v_new=v), r"k_new must have shape \[3, 2, 64\] or \[3, 2, n, 64\], got \[2, 2, 64\]"),
        (dict(k_new=k, v_new=v[:, :, None]), "v_new must have k_new's shape"),
        (dict(k_new=k, v_new=v.half()), "v_new must have the cache's dtype"),
        (dict(k_new=None, v_new=v), "k_new must be a torch tensor"),
        (dict(k_new=k, v_new=v, rows=[0, 1, 1]), "Rows must be different ints from 0 to 2"),
        (dict(k_new=k, v_new=v, rows=[0, 1, 3]), "Rows must be different ints from 0 to 2"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            cache.append(given.pop("k_new"), given.pop("v_new"), **given)
    cache.append(k, v)
    for lengths in ([1, 1], [1, 1, 2], [1, -1, 0], [1, 1, True]):
        with pytest.raises(ValueError, match="lengths must"):
            cache.truncate(lengths)
    with pytest.raises(ValueError, match="target must be an empty row, but row 1 holds 1 tokens"):
        cache.fork(0, 1)
    with pytest.raises(ValueError, match="Rows must be different"):
        cache.free(-1)
    assert cache.host_lengths == cache.lengths.tolist() == [1, 1, 1]
    for wrong in (dict(pool=0), dict(dim=65), dict(page_size=24), dict(kind="mean"), dict(dtype=torch.float64), dict(rows=1.0)):
        with pytest.raises((ValueError, TypeError), match="must be"):
            make_cache(**wrong)


def test_tokens_of_any_strides(device):
    """What a projection returns is a transposed view."""
    cache, plain = (make_cache(device=device, backend=backend) for backend in ("auto", "torch"))
    k, v = (x.transpose(0, 1) for x in tokens((2, 3, 64), 0, cache))
    cache.append(k, v)
    plain.append(k.contiguous(), v.contiguous())
    for mine, other in zip(cache.view(), plain.view()):
        assert same_bits(mine[:, :, :1], other[:, :, :1])


@pytest.mark.gpu
def test_an_append_never_waits_for_the_gpu(device):
    """Case E5: PyTorch raises at each synchronisation, whether pages are taken, copied, shared, cut off or freed."""
    cache = make_cache(pool=40, row_pages=8, dtype=torch.float16, device=device, backend="auto")
    one, many = one_token(cache, 0), tokens((3, 2, 20, 64), 1, cache)

    def everything():
        for _ in range(20):
            cache.append(*one)
        cache.append(one[0][:2], one[1][:2], rows=[2, 0])
        cache.append(*many)
        cache.free(2)
        cache.fork(0, 2)
        cache.append(*one)
        cache.truncate([30, 16, 0])
        cache.truncate([0, 0, 0])

    everything()  # compiles what there is to compile
    with waiting_fails():
        everything()


@pytest.mark.gpu
def test_a_pool_beyond_2_to_31_elements(device):
    """Case B1: a page number times the page's size passes 2^31 (vllm-project/vllm#47671)."""
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    cache = PagedKVCache(33000, 8, 128, rows=1, row_pages=2, dtype=torch.float16, device=device)
    assert cache.k.numel() > 2**31
    cache._free.reverse()
    k, v = tokens((1, 8, 128), 0, cache)
    cache.append(k, v)
    assert cache.table[0, 0] == 32999
    assert same_bits(cache.k[32999, :, 0], k[0]) and same_bits(cache.view()[1][:, :, 0], v)
