"""Budgets, forced pages and the top-k, against the rule spelled out in plain Python."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageskip_lib import Budget, PageList, reference, select_pages

from helpers import int32, randn

INF = float("inf")
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


@given(
    data=st.data(),
    page_size=st.sampled_from([16, 64]),
    sink=st.integers(0, 2),
    local=st.integers(0, 3),
    extra=st.integers(0, 6),
    pages=st.integers(1, 12),
)
@MANY
def test_selection_follows_the_rule(device, data, page_size, sink, local, extra, pages):
    """Cases A6, F1, F4, F5 and F6: many ties, -inf scores, short rows, forced pages among the best."""
    budget = Budget(max(1, sink + local) + extra, sink, local)
    values = st.sampled_from([-INF, -1.0, -0.0, 0.0, 0.0, 1.0, 1.0, 2.5])
    scores = torch.tensor(data.draw(st.lists(st.lists(values, min_size=pages, max_size=pages), min_size=4, max_size=4), "scores"))
    lengths = int32([data.draw(st.integers(0, pages * page_size), "length") for _ in range(2)])
    scores = scores.view(2, 2, pages)
    found = select_pages(scores.to(device), budget, lengths.to(device), page_size)
    assert found.pages.shape == (2, 2, budget.pages) and found.counts.shape == (2, 2)
    assert lists_of(found) == reference.select(scores, budget, lengths, page_size)


@pytest.mark.parametrize("pages", [33, 1024, 8193])
def test_all_scores_equal(pages, device):
    """Cases F1 and E8: K distinct pages, the lowest ones among equals."""
    found = select_pages(torch.zeros(1, 1, pages, device=device), Budget(32), int32([pages * 16], device), 16)
    assert lists_of(found) == [[list(range(30)) + [pages - 2, pages - 1]]]


def test_a_few_winners_among_ties(device):
    """Case F1: winners are always in, and the lowest of the tied pages fill the rest."""
    scores = torch.zeros(1, 1, 1024, device=device)
    winners = [100, 500, 511, 512, 1000]
    scores[..., winners] = 1.0
    found = select_pages(scores, Budget(32), int32([1024 * 16], device), 16)
    assert lists_of(found) == [[sorted([*range(25), *winners, 1022, 1023])]]


def test_ties_are_broken_alike_every_time_and_in_any_batch(device):
    """Case F6: B = 1, B = 64, and again."""
    scores = (randn(1, 2, 200) * 2).round().to(device)
    alone = lists_of(select_pages(scores, Budget(16), int32([3200], device), 16))
    for _ in range(5):
        batch = select_pages(scores.expand(64, 2, 200), Budget(16), int32([3200] * 64, device), 16)
        assert lists_of(batch) == alone * 64


@pytest.mark.parametrize("held", [0, 1, 5, 32])
def test_fewer_pages_than_the_budget(held, device):
    """Case F4: all of them, then -1; also when the scores have fewer columns than the budget."""
    for columns in (held, 40):
        scores = randn(1, 2, columns, device=device)
        found = select_pages(scores, Budget(32), int32([held * 16], device), 16)
        assert found.pages.shape == (1, 2, 32)
        assert lists_of(found) == [[list(range(held))] * 2]


def test_no_sequences(device):
    """Case A7: B = 0."""
    found = select_pages(torch.zeros(0, 2, 5, device=device), Budget(4), torch.zeros(0, dtype=torch.int32, device=device), 16)
    assert found.pages.shape == (0, 2, 4) and found.counts.shape == (0, 2)


@pytest.mark.parametrize("length", [1, 16, 17, 33, 160])
def test_the_page_being_filled_is_always_listed(length, device):
    """Cases G6 and G5: the newest page and the sink, however low their scores."""
    scores = torch.arange(10.0, device=device).flip(0)[None, None]
    scores = scores.scatter(2, torch.zeros(1, 1, 1, dtype=torch.long, device=device), -1e30)
    (picked,) = lists_of(select_pages(scores, Budget(3, sink=1, local=1), int32([length], device), 16))[0]
    assert 0 in picked and (length - 1) // 16 in picked


def test_forced_pages_with_scores_of_minus_infinity(device):
    """Case A6: every score is -inf, so the forced pages are all there is."""
    scores = torch.full((1, 1, 10), -INF, device=device)
    assert lists_of(select_pages(scores, Budget(6), int32([160], device), 16)) == [[[0, 8, 9]]]


def test_forced_pages_come_before_infinite_scores(device):
    """Case G5: a page that scores +inf (fp32 keys near the largest number) does not push the newest page out."""
    scores = torch.full((1, 1, 10), INF, device=device)
    assert lists_of(select_pages(scores, Budget(4), int32([160], device), 16)) == [[[0, 1, 8, 9]]]


def test_forced_pages_that_are_also_the_best(device):
    """Case F5: each page once, so the freed places go to the next best."""
    scores = torch.arange(10.0, device=device)[None, None].clone()
    scores[..., 0] = 100.0
    assert lists_of(select_pages(scores, Budget(5), int32([160], device), 16)) == [[[0, 6, 7, 8, 9]]]


@pytest.mark.parametrize("held", [1, 2, 3])
def test_sink_and_local_overlap_in_short_rows(held, device):
    """Case F5: fewer pages than sink + local."""
    found = select_pages(torch.zeros(1, 1, 8, device=device), Budget(4, sink=2, local=2), int32([held * 16 - 1], device), 16)
    assert lists_of(found) == [[list(range(held))]]


def test_columns_past_the_length_are_ignored(device):
    """Scores of pages that the row does not hold may be anything."""
    scores = torch.tensor([[[3.0, 1.0, 2.0, 9.0, INF]]], device=device)
    found = select_pages(scores, Budget(2, sink=0, local=1), int32([40], device), 16)
    assert lists_of(found) == [[[0, 2]]]


def test_selection_leaves_the_scores_alone(device):
    scores = randn(1, 2, 20, device=device)
    before = scores.clone()
    select_pages(scores, Budget(4), int32([320], device), 16)
    assert torch.equal(scores, before)


@pytest.mark.gpu
def test_selection_equals_the_cpu_on_the_gpu(device):
    """Case F7: many rows with many ties, constants among them."""
    scores = (randn(512, 8, 1024) * 3).round()
    scores[::7] = 1.0
    lengths = torch.randint(0, 16385, (512,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    here = select_pages(scores, Budget(32), lengths, 16)
    there = select_pages(scores.to(device), Budget(32), lengths.to(device), 16)
    assert torch.equal(here.pages, there.pages.cpu()) and torch.equal(here.counts, there.counts.cpu())


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
    """Case F8: one budget for all rows; a list of them is refused."""
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
