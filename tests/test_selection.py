"""Budgets, forced pages and the top-k, against the rule spelled out in plain Python."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageskip_lib import Budget, PageList, reference, select_pages, selection

from helpers import Guarded, Unlaunchable, each_backend, far_apart, int32, randn

INF, NAN, BIGGEST = float("inf"), float("nan"), torch.finfo(torch.float32).max
VALUES = [-INF, NAN, INF, BIGGEST, -BIGGEST, -1.0, -0.0, 0.0, 2**-149, -(2**-149), 2**-126, 1.0, 1.0, 1.0 + 2**-23, 2.5]
MANY = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def lists_of(found):
    """[B][Hkv] lists of page numbers, after checking the layout: ascending, distinct, -1 padding at the tail, right counts."""
    assert found.pages.dtype == found.counts.dtype == torch.int32
    lists = []
    for row, counts in zip(found.pages.tolist(), found.counts.tolist()):
        for head, count in zip(row, counts):
            assert head[:count] == sorted(set(head[:count])) and all(page >= 0 for page in head[:count])
            assert head[count:] == [-1] * (len(head) - count)
        lists.append([head[:count] for head, count in zip(row, counts)])
    return lists


@each_backend
@given(
    data=st.data(),
    page_size=st.sampled_from([16, 64]),
    sink=st.integers(0, 2),
    local=st.integers(0, 3),
    extra=st.integers(0, 6),
    pages=st.integers(1, 12),
)
@MANY
def test_selection_follows_the_rule(backend, device, data, page_size, sink, local, extra, pages):
    """Cases A6, F1, F4, F5, F6 and F8: many ties, extreme scores, short rows, forced pages among the best, budgets of their own."""
    budget = Budget(max(1, sink + local) + extra, sink, local)
    values = st.sampled_from(VALUES)
    scores = torch.tensor(data.draw(st.lists(st.lists(values, min_size=pages, max_size=pages), min_size=4, max_size=4), "scores"))
    lengths = int32([data.draw(st.integers(0, pages * page_size), "length") for _ in range(2)])
    scores = scores.view(2, 2, pages)
    own = data.draw(st.none() | st.lists(st.integers(-1, 14), min_size=2, max_size=2), "row budgets")
    given_own = None if own is None else int32(own, device)
    found = select_pages(scores.to(device), budget, lengths.to(device), page_size, row_budgets=given_own, backend=backend)
    assert found.pages.shape == (2, 2, budget.pages) and found.counts.shape == (2, 2)
    assert lists_of(found) == reference.select(scores, budget, lengths, page_size, own)


@each_backend
@pytest.mark.parametrize("pages", [1, 31, 32, 33, 64, 500, 1024, 4097, 8193, 16384])
@pytest.mark.parametrize("kind", ["distinct", "ties", "extremes"])
def test_rows_of_every_width(backend, pages, kind, device):
    """Case E8: also past 8,192 pages, against the rule; budgets below, near and above the row."""
    scores = randn(2, 2, pages, seed=pages)
    if kind == "ties":
        scores = (scores * 2).round()
    if kind == "extremes":
        scores = torch.tensor(VALUES)[torch.randint(len(VALUES), (2, 2, pages), generator=torch.Generator().manual_seed(pages))]
    lengths = int32([pages * 16, pages * 11])
    for budget in (Budget(3), Budget(8), Budget(min(512, pages + 3), sink=0, local=0), Budget(pages + 100)):
        found = select_pages(scores.to(device), budget, lengths.to(device), 16, backend=backend)
        assert lists_of(found) == reference.select(scores, budget, lengths, 16)


@each_backend
@pytest.mark.parametrize("pages", [33, 1024, 8193])
def test_all_scores_equal(backend, pages, device):
    """Cases F1 and E8: K distinct pages, the lowest ones among equals."""
    found = select_pages(torch.zeros(1, 1, pages, device=device), Budget(32), int32([pages * 16], device), 16, backend=backend)
    assert lists_of(found) == [[list(range(30)) + [pages - 2, pages - 1]]]


@each_backend
def test_a_few_winners_among_ties(backend, device):
    """Case F1: winners are always in, and the lowest of the tied pages fill the rest."""
    scores = torch.zeros(1, 1, 1024, device=device)
    winners = [100, 500, 511, 512, 1000]
    scores[..., winners] = 1.0
    found = select_pages(scores, Budget(32), int32([1024 * 16], device), 16, backend=backend)
    assert lists_of(found) == [[sorted([*range(25), *winners, 1022, 1023])]]


@each_backend
def test_ties_are_broken_alike_every_time_and_in_any_batch(backend, device):
    """Case F6: B = 1, many sequences, and again."""
    scores = (randn(1, 2, 200) * 2).round().to(device)
    alone = lists_of(select_pages(scores, Budget(16), int32([3200], device), 16, backend=backend))
    interpreted = backend == "triton" and device == "cpu"  # a row at a time
    for size in (1, 9) if interpreted else (1, 64, 64, 64):
        batch = select_pages(scores.expand(size, 2, 200), Budget(16), int32([3200] * size, device), 16, backend=backend)
        assert lists_of(batch) == alone * size


@each_backend
@pytest.mark.parametrize("held", [0, 1, 5, 32])
def test_fewer_pages_than_the_budget(backend, held, device):
    """Case F4: all of them, then -1; also when the scores have fewer columns than the budget."""
    for columns in (held, 40):
        scores = randn(1, 2, columns, device=device)
        found = select_pages(scores, Budget(32), int32([held * 16], device), 16, backend=backend)
        assert found.pages.shape == (1, 2, 32)
        assert lists_of(found) == [[list(range(held))] * 2]


@each_backend
@pytest.mark.parametrize("batch, kv_heads", [(0, 2), (2, 0)])
def test_no_rows(backend, batch, kv_heads, device, monkeypatch):
    """Case A7: B = 0, without a launch on an empty grid."""
    monkeypatch.setattr(selection, "_select_kernel", Unlaunchable())
    found = select_pages(torch.zeros(batch, kv_heads, 5, device=device), Budget(4), int32([80] * batch, device), 16, backend=backend)
    assert found.pages.shape == (batch, kv_heads, 4) and found.counts.shape == (batch, kv_heads)


@each_backend
@pytest.mark.parametrize("columns", [0, 7])
def test_nothing_held(backend, columns, device):
    """Cases A6 and A7: every length 0, whatever the scores hold."""
    scores = torch.full((2, 2, columns), NAN, device=device)
    found = select_pages(scores, Budget(4), int32([0, 0], device), 16, backend=backend)
    assert lists_of(found) == [[[], []]] * 2


@each_backend
@pytest.mark.parametrize("length", [1, 16, 17, 33, 160])
def test_the_page_being_filled_is_always_listed(backend, length, device):
    """Cases G6 and G5: the newest page and the sink, however low their scores."""
    scores = torch.arange(10.0, device=device).flip(0)[None, None]
    scores = scores.scatter(2, torch.zeros(1, 1, 1, dtype=torch.long, device=device), -1e30)
    (picked,) = lists_of(select_pages(scores, Budget(3, sink=1, local=1), int32([length], device), 16, backend=backend))[0]
    assert 0 in picked and (length - 1) // 16 in picked


@each_backend
def test_forced_pages_with_scores_of_minus_infinity(backend, device):
    """Case A6: every score is -inf, so the forced pages are all there is."""
    scores = torch.full((1, 1, 10), -INF, device=device)
    assert lists_of(select_pages(scores, Budget(6), int32([160], device), 16, backend=backend)) == [[[0, 8, 9]]]


@each_backend
def test_forced_pages_come_before_infinite_scores(backend, device):
    """Case G5: a page that scores +inf (fp32 keys near the largest number) does not push the newest page out."""
    scores = torch.full((1, 1, 10), INF, device=device)
    assert lists_of(select_pages(scores, Budget(4), int32([160], device), 16, backend=backend)) == [[[0, 1, 8, 9]]]


@each_backend
def test_forced_pages_that_are_also_the_best(backend, device):
    """Case F5: each page once, so the freed places go to the next best."""
    scores = torch.arange(10.0, device=device)[None, None].clone()
    scores[..., 0] = 100.0
    assert lists_of(select_pages(scores, Budget(5), int32([160], device), 16, backend=backend)) == [[[0, 6, 7, 8, 9]]]


@each_backend
@pytest.mark.parametrize("held", [1, 2, 3])
def test_sink_and_local_overlap_in_short_rows(backend, held, device):
    """Case F5: fewer pages than sink + local."""
    found = select_pages(torch.zeros(1, 1, 8, device=device), Budget(4, sink=2, local=2), int32([held * 16 - 1], device), 16, backend=backend)
    assert lists_of(found) == [[list(range(held))]]


@each_backend
def test_columns_past_the_length_are_ignored(backend, device):
    """Scores of pages that the row does not hold may be anything."""
    scores = torch.tensor([[[3.0, 1.0, 2.0, 9.0, INF, NAN]]], device=device)
    found = select_pages(scores, Budget(2, sink=0, local=1), int32([40], device), 16, backend=backend)
    assert lists_of(found) == [[[0, 2]]]


@each_backend
def test_scores_that_are_not_numbers(backend, device):
    """NaN of either sign is never picked, unless forced, and takes no place."""
    scores = torch.tensor([NAN, 1.0, NAN, 3.0, -NAN, 2.0, NAN, NAN], device=device)[None, None]
    assert lists_of(select_pages(scores, Budget(4, sink=1, local=1), int32([128], device), 16, backend=backend)) == [[[0, 3, 5, 7]]]
    assert lists_of(select_pages(scores, Budget(7, sink=1, local=1), int32([128], device), 16, backend=backend)) == [[[0, 1, 3, 5, 7]]]


@each_backend
def test_infinity_is_above_the_largest_number(backend, device):
    scores = torch.tensor([0.0, BIGGEST, BIGGEST, INF, 0.0], device=device)[None, None]
    assert lists_of(select_pages(scores, Budget(2, sink=0, local=0), int32([80], device), 16, backend=backend)) == [[[1, 3]]]


@each_backend
def test_zeros_of_both_signs_are_equal(backend, device):
    scores = torch.tensor([-(2**-149), -0.0, 0.0, -0.0, 0.0, 2**-149], device=device)[None, None]
    assert lists_of(select_pages(scores, Budget(3, sink=0, local=0), int32([96], device), 16, backend=backend)) == [[[1, 2, 5]]]


@each_backend
def test_nothing_but_the_forced_pages_fits(backend, device):
    """Case G15: with K = sink + local no score counts, however high."""
    scores = torch.full((1, 1, 40), INF, device=device)
    assert lists_of(select_pages(scores, Budget(3), int32([640], device), 16, backend=backend)) == [[[0, 38, 39]]]


@each_backend
def test_row_budgets(backend, device):
    """Case F8: budgets 1, 7 and 32 give min(k, pages held) pages each, the same ones as a call of their own."""
    scores = randn(6, 2, 50, device=device)
    lengths, own = int32([800, 800, 800, 0, 5 * 16, 20 * 16], device), int32([1, 7, 32] * 2, device)
    found = select_pages(scores, Budget(32, sink=0, local=1), lengths, 16, row_budgets=own, backend=backend)
    assert found.counts.tolist() == [[1] * 2, [7] * 2, [32] * 2, [0] * 2, [5] * 2, [20] * 2]
    for row, pages in enumerate([1, 7, 32] * 2):
        alone = select_pages(scores[row : row + 1], Budget(pages, sink=0, local=1), lengths[row : row + 1], 16, backend=backend)
        assert lists_of(found)[row] == lists_of(alone)[0]


@each_backend
def test_row_budgets_are_brought_into_range(backend, device):
    """Cases F8 and G15: never below the forced pages, never above the static budget."""
    own = int32([-(2**31), 0, 2, 3, 4, 8, 9, 2**31 - 1], device)
    found = select_pages(torch.zeros(8, 1, 30, device=device), Budget(8), int32([480] * 8, device), 16, row_budgets=own, backend=backend)
    assert found.counts.flatten().tolist() == [3, 3, 3, 3, 4, 8, 8, 8]
    assert lists_of(found)[0] == [[0, 28, 29]]


@each_backend
def test_below_at_and_above_the_budget(backend, device):
    """Case E6: nothing depends on a length that the host knows; one list is written again and again, and holds no trace of the last."""
    scores = randn(1, 2, 40)
    out = PageList(torch.full((1, 2, 8), 77, dtype=torch.int32, device=device), torch.full((1, 2), 77, dtype=torch.int32, device=device))
    for held in (40, 5, 8, 9, 0, 7, 40):
        lengths = int32([held * 16])
        assert select_pages(scores.to(device), Budget(8), lengths.to(device), 16, out=out, backend=backend) is out
        assert lists_of(out) == reference.select(scores, Budget(8), lengths, 16)


@each_backend
def test_nothing_is_written_beside_the_list(backend, device):
    guarded = Guarded()
    for pages, columns in ((1, 3), (40, 3), (40, 8), (40, 77), (2, 200)):
        out = PageList(guarded.make((3, 2, columns), torch.int32, device), guarded.make((3, 2), torch.int32, device))
        select_pages(torch.zeros(3, 2, pages, device=device), Budget(columns), int32([pages * 16, 16, 0], device), 16, out=out, backend=backend)
    assert guarded.intact()


@each_backend
def test_without_lengths_every_page_is_held(backend, device):
    scores = randn(2, 2, 40, device=device)
    found = select_pages(scores, Budget(8), None, 16, backend=backend)
    assert lists_of(found) == lists_of(select_pages(scores, Budget(8), int32([640] * 2, device), 16, backend=backend))


@each_backend
def test_scores_with_strides(backend, device):
    """Heads first, columns out of a wider table, one row for all."""
    scores = randn(3, 2, 50)
    expected = reference.select(scores, Budget(8), int32([800, 300, 20]), 16)
    here, lengths = scores.to(device), int32([800, 300, 20], device)
    heads_first = here.transpose(0, 1).contiguous().transpose(0, 1)
    wider = torch.full((3, 2, 57), INF, device=device)
    wider[..., 3:53] = here
    for laid_out in (heads_first, wider[..., 3:53]):
        assert not laid_out.is_contiguous()
        assert lists_of(select_pages(laid_out, Budget(8), lengths, 16, backend=backend)) == expected
    one_for_all = select_pages(here[:1, :1].expand(3, 2, 50), Budget(8), lengths[:1].expand(3), 16, backend=backend)
    assert lists_of(one_for_all) == [[expected[0][0]] * 2] * 3


@each_backend
@pytest.mark.parametrize("axis", [0, 1])
def test_score_offsets_past_2_to_31(backend, axis, device, tmp_path):
    """Case B1."""
    scores, lengths = randn(3, 3, 40), int32([640, 100, 333])
    found = select_pages(far_apart(scores.to(device), axis, tmp_path), Budget(8), lengths.to(device), 16, backend=backend)
    assert lists_of(found) == reference.select(scores, Budget(8), lengths, 16)


def test_more_pages_than_the_kernel_counts(device, monkeypatch):
    """Case E8: refused by the kernel, taken by PyTorch."""
    scores = torch.zeros(1, 1, 32769, device=device)
    lengths = int32([32769 * 16], device)
    assert lists_of(select_pages(scores, Budget(4), lengths, 16, backend="torch")) == [[[0, 1, 32767, 32768]]]
    monkeypatch.setattr(selection, "_select_kernel", Unlaunchable())
    with pytest.raises(ValueError, match="^scores may have 32768 pages at most, got 32769; use larger pages, or backend='torch'.$"):
        select_pages(scores, Budget(4), lengths, 16, backend="triton")


@each_backend
def test_as_many_pages_as_the_kernel_counts(backend, device):
    """All equal, none forced: a count that needs all of its 16 bits."""
    found = select_pages(torch.zeros(1, 1, 32768, device=device), Budget(40, sink=0, local=0), int32([32768 * 16], device), 16, backend=backend)
    assert lists_of(found) == [[list(range(40))]]
    found = select_pages(torch.zeros(1, 1, 32768, device=device), Budget(32768), int32([32768 * 16], device), 16, backend=backend)
    assert lists_of(found) == [[list(range(32768))]]


@each_backend
def test_selection_leaves_the_scores_alone(backend, device):
    scores = randn(1, 2, 20, device=device)
    before = scores.clone()
    select_pages(scores, Budget(4), int32([320], device), 16, backend=backend)
    assert torch.equal(scores, before)


def random_rows(rows, pages, seed=0):
    """Scores [rows, 1, pages], a third of them with many ties, some constant; and lengths, a few of them 0."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, 1, pages, generator=generator)
    scores[1::3] = (scores[1::3] * 3).round()
    scores[::7] = 1.0
    lengths = torch.randint(0, pages * 16 + 1, (rows,), generator=generator, dtype=torch.int32)
    lengths[::50] = 0
    return scores, lengths


@pytest.mark.gpu
def test_ten_thousand_rows_on_the_gpu(device):
    """Case F7: the very pages of the PyTorch path on the CPU, and the scores that torch.topk finds among the pages held."""
    scores, lengths = random_rows(10_000, 1024)
    here = select_pages(scores, Budget(32, sink=0, local=0), lengths, 16)
    there = select_pages(scores.to(device), Budget(32, sink=0, local=0), lengths.to(device), 16)
    assert torch.equal(here.pages, there.pages.cpu()) and torch.equal(here.counts, there.counts.cpu())
    held = torch.arange(1024) * 16 < lengths[:, None, None]
    best = scores.masked_fill(~held, -INF).topk(32).values
    listed = there.pages.cpu().long()
    found = scores.gather(2, listed.clamp(min=0)).masked_fill(listed < 0, -INF).sort(descending=True).values
    assert torch.equal(found, best)


@pytest.mark.gpu
def test_512_rows_of_16384_pages_on_the_gpu(device):
    """Cases E8, F6 and F7: the full size, a hundred times the same bits."""
    scores, lengths = random_rows(512, 16384)
    scores, lengths = scores.view(256, 2, 16384).to(device), lengths[::2].contiguous().to(device)
    expected = select_pages(scores, Budget(512), lengths, 16, backend="torch")
    for _ in range(100):
        found = select_pages(scores, Budget(512), lengths, 16)
        assert torch.equal(found.pages, expected.pages) and torch.equal(found.counts, expected.counts)


@pytest.mark.gpu
@each_backend
def test_one_graph_for_growing_and_shrinking_lengths(backend, device):
    """Cases D9, E5 and E6: captured once with ``out``, right below, at and above the budget; the kernel allocates nothing at all."""
    scores, lengths, own = randn(4, 2, 1024, device=device), int32([1] * 4, device), int32([32, 32, 7, 3], device)
    out = select_pages(scores, Budget(32), lengths, 64, row_budgets=own, backend=backend)
    graph = torch.cuda.CUDAGraph()  # before the count: it allocates 1 KB for itself
    with torch.cuda.graph(graph):
        before, made = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
        select_pages(scores, Budget(32), lengths, 64, row_budgets=own, out=out, backend=backend)
        assert torch.cuda.memory_allocated() == before
        assert backend == "torch" or torch.cuda.memory_stats()["allocation.all.allocated"] == made  # not even for a moment
    for tokens in (100, 2048, 2049, 65536, 0, 2047, 65536, 1):
        lengths.copy_(int32([tokens, tokens // 2, tokens, tokens // 3]))
        scores.copy_(randn(4, 2, 1024, seed=tokens))
        graph.replay()
        assert lists_of(out) == reference.select(scores.cpu(), Budget(32), lengths.cpu(), 64, own.tolist())


@pytest.mark.gpu
def test_lengths_out_of_range_on_the_gpu(device):
    """Values are not read there, so both paths bring them into the range from 0 to the pages of the scores."""
    scores = randn(4, 2, 40, device=device)
    wrong, right = int32([-5, 641, 2**31 - 1, -(2**31)], device), int32([0, 640, 640, 0], device)
    for backend in ("torch", "triton"):
        found = [select_pages(scores, Budget(8), lengths, 16, backend=backend) for lengths in (wrong, right)]
        assert lists_of(found[0]) == lists_of(found[1])


# --- budgets and hand-made lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, page_size, pages, local", [(2048, 64, 32, 2), (512, 16, 32, 5), (1000, 32, 31, 3), (1024, 128, 8, 2)])
def test_budget_for_tokens(tokens, page_size, pages, local):
    assert Budget.for_tokens(tokens, page_size) == Budget(pages, sink=1, local=local)


@pytest.mark.parametrize("length_in_page", [1, 5, 16])
def test_budget_for_tokens_keeps_the_newest_64(length_in_page, device):
    """Wherever in its page the newest token sits."""
    length = 20 * 16 + length_in_page
    found = select_pages(torch.zeros(1, 1, 21, device=device), Budget.for_tokens(256, 16), int32([length], device), 16)
    tokens = {page * 16 + i for page in lists_of(found)[0][0] for i in range(16)}
    assert set(range(length - 64, length)) <= tokens


@pytest.mark.parametrize("pages, sink, local", [(1, 1, 2), (2, 1, 2), (0, 0, 0), (3, 4, 0)])
def test_budget_below_its_forced_pages_is_refused(pages, sink, local):
    """Case G15: no clamping, no negative top-k, but a sentence that says how many are needed."""
    needed = max(1, sink + local)
    with pytest.raises(ValueError, match=rf"Budget\(pages={pages}\).*at least {needed}\.$"):
        Budget(pages, sink, local)


def test_smallest_budgets():
    """Case G15: exactly the forced pages, and a single free one."""
    assert (Budget(3).pages, Budget(1, 0, 0).pages, Budget(1, 1, 0).pages) == (3, 1, 1)


@pytest.mark.parametrize("field", ["pages", "sink", "local"])
@pytest.mark.parametrize("value", [-1, 2.0, "8", True, None, [1, 7, 32]])
def test_budget_fields_are_whole_numbers(field, value):
    """Case F8: one static budget for all rows; a list of them is refused (``row_budgets`` takes it)."""
    with pytest.raises(ValueError, match=rf"^Budget\.{field} must be a whole number of pages"):
        Budget(**{"pages": 8, field: value})


def test_budget_cannot_be_changed_behind_its_check():
    with pytest.raises(AttributeError):
        Budget(8).pages = 0


def test_page_list_from_rows(device):
    found = PageList.from_rows([[[3, 1, 1], []], [[0], range(2)]], device)
    assert found.pages.tolist() == [[[1, 3], [-1, -1]], [[0, -1], [0, 1]]]
    assert found.counts.tolist() == [[2, 0], [1, 2]]
    assert lists_of(found) == [[[1, 3], []], [[0], [0, 1]]]
