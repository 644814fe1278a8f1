"""The whole step: what it appends, what it selects, and that a captured one does the same at every length."""

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageskip_lib import Budget, CacheFull, PageSummary, dense_decode, page_scores, select_pages, sparse_decode, summarize_pages
from pageskip_lib import bounds8, decode, dense, runtime
from pageskip_lib.decode import DecodeStep
from pageskip_lib.merge import Workspace

from helpers import each_backend, int32, randn, same_bits

BUDGET = Budget(pages=4, sink=1, local=2)


def make_step(lengths, *, tokens=256, heads=4, kv_heads=2, dim=64, budget=BUDGET, page_size=16, dtype=torch.float32, device="cpu",
    backend="torch", kind="minmax8",
):  # fmt: skip
    """A step over a cache that is full of random numbers, past the lengths too. It reads everything only where the budget holds it all."""
    k, v = (randn(len(lengths), kv_heads, tokens, dim, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
    with mock.patch.object(decode, "break_even", lambda k, budget, page_size, card: budget.pages * page_size):
        return DecodeStep(k, v, int32(lengths, device), budget, heads=heads, page_size=page_size, backend=backend, kind=kind)


def token(step, seed):
    """q, k_new, v_new for one call."""
    shapes = (step.q.shape, step.k_new.shape, step.v_new.shape)
    return [randn(*shape, seed=seed * 10 + n, dtype=step.q.dtype, device=step.q.device) for n, shape in enumerate(shapes)]


def poison_past(step):
    """NaN in the cache past the lengths."""
    for row, length in enumerate(step.lengths.tolist()):
        step.k[row, :, length:] = step.v[row, :, length:] = float("nan")


def rebuilt(step):
    """The summary that the step should have, made anew from its keys; the sizes of the channels are chosen once and stay."""
    exact = summarize_pages(step.k, step.page_size, lengths=step.lengths, backend="torch")
    if step.kind == "minmax":
        return exact
    kmin, kmax, scale = bounds8.encode(exact.kmin, exact.kmax, step.summary.channel)
    return PageSummary("minmax8", step.page_size, step.lengths, kmin=kmin, kmax=kmax, scale=scale, channel=step.summary.channel)


def expected(step, q):
    """The same step by separate calls on the cache as it is now, summaries rebuilt from the keys."""
    summary = rebuilt(step)
    pages = select_pages(page_scores(q, summary, group=step.group, backend=step.backend), step.budget, step.lengths, step.page_size, backend=step.backend)
    return sparse_decode(q, step.k, step.v, pages, page_size=step.page_size, lengths=step.lengths, backend=step.backend)


@each_backend
@pytest.mark.parametrize("kind", ["minmax8", "minmax"])
def test_steps_across_page_boundaries_equal_a_rebuild(kind, backend, device):
    """Cases G1 and E7: the first token of a page resets its summary, later ones merge, and the newest page is always read."""
    step = make_step([0, 15, 130], device=device, backend=backend, kind=kind)
    for n in range(36):
        q, k_new, v_new = token(step, n)
        before = step.lengths.clone()
        out = step(q, k_new, v_new)
        assert (step.lengths == before + 1).all()
        for row, length in enumerate(before.tolist()):
            assert torch.equal(step.k[row, :, length], k_new[row]) and torch.equal(step.v[row, :, length], v_new[row])
        held = torch.arange(16, device=device) * 16 < step.lengths[:, None]
        truth = rebuilt(step).fields
        for name in [name for name in truth if name != "channel"]:
            assert torch.equal(step.summary.fields[name].movedim(2, 1)[held], truth[name].movedim(2, 1)[held])
        assert same_bits(out, expected(step, q))


@each_backend
def test_a_cache_within_the_budget_is_read_whole(backend, device):
    """Case F4: with pages to spare the step is dense decode, bit for bit, whether the cache can never outgrow the budget or has not yet."""
    for pages, length, selects in ((16, 100, False), (15, 100, False), (7, 111, False), (7, 112, True)):
        step = make_step([length, 3], budget=Budget(pages=pages), device=device, backend=backend)
        q, k_new, v_new = token(step, 0)
        assert step.selects == selects
        out = step(q, k_new, v_new)
        assert same_bits(out, expected(step, q)) or not selects
        if not selects:
            k, v = step.k[:, :, : step.dense_up_to], step.v[:, :, : step.dense_up_to]
            assert same_bits(out, dense_decode(q, k, v, lengths=step.lengths, backend=backend))


@pytest.mark.parametrize("kind", ["minmax8", "minmax"])
@pytest.mark.parametrize("splits", [1, 3, 9])
def test_reading_everything_does_not_wait_for_the_append(splits, kind, device):
    """Case F4 again, with and without a merge: the token that attention took from the caller is in the cache and in the summaries after the call."""
    with mock.patch.object(dense, "choose_splits", lambda *shape: splits):
        step = make_step([0, 15, 130], budget=Budget(pages=16), device=device, backend="triton", kind=kind)
        step.workspace = Workspace(step.q, splits)
        for n in range(3):
            q, k_new, v_new = token(step, n)
            poison_past(step)
            out = step(q, k_new, v_new)
            assert same_bits(out, dense_decode(q, step.k, step.v, lengths=step.lengths, backend="triton"))
            assert step.lengths.tolist() == [n + 1, n + 16, n + 131]
            truth = rebuilt(step).fields
            assert all(torch.equal(step.summary.fields[name][row, :, :held], truth[name][row, :, :held])
                for name in truth if name != "channel" for row, held in enumerate((1, 2, 9)))  # fmt: skip
            for row, length in enumerate(step.lengths.tolist()):
                assert torch.equal(step.k[row, :, length - 1], k_new[row]) and torch.equal(step.v[row, :, length - 1], v_new[row])


@each_backend
def test_a_full_cache_refuses_and_loses_nothing(backend, device):
    step = make_step([254, 7], device=device, backend=backend)
    step(*token(step, 0))
    step(*token(step, 1))
    kept = [x.clone() for x in (step.k, step.v, step.q, *step._state())]
    with pytest.raises(CacheFull, match="256 tokens"):
        step(*token(step, 2))
    for before, now in zip(kept, (step.k, step.v, step.q, *step._state())):
        assert torch.equal(before, now)
    step.set_lengths(int32([100, 9], device))
    step(*token(step, 2))
    assert step.lengths.tolist() == [101, 10]


@each_backend
def test_going_back_forgets_the_keys_that_were_dropped(backend, device):
    """A page that is cut gets a summary of what is left, not of what it once held."""
    step = make_step([20], device=device, backend=backend)
    q, k_new, v_new = token(step, 0)
    step(q, k_new + 100, v_new)
    assert step.exact[1].max() > 50
    step.set_lengths(int32([20], device))
    assert step.exact[1].max() < 50
    assert all(torch.equal(step.summary.fields[name][:, :, :2], field[:, :, :2]) for name, field in rebuilt(step).fields.items() if name != "channel")
    assert same_bits(step(q, k_new, v_new), expected(step, q))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3), steps=st.integers(1, 20), page_size=st.sampled_from([16, 32, 64]))
def test_any_run_of_steps_equals_a_rebuild(lengths, steps, page_size):
    step = make_step(lengths, tokens=96, page_size=page_size, budget=Budget(pages=1, sink=0, local=1))
    for n in range(steps):
        q, k_new, v_new = token(step, n)
        out = step(q, k_new, v_new)
    assert same_bits(out, expected(step, q))


def test_wrong_tokens_are_refused_before_anything_is_written(device):
    step = make_step([20], device=device)
    q, k_new, v_new = token(step, 0)
    for wrong in ((q[:, :2], k_new, v_new), (q, k_new.double(), v_new), (q, k_new, None)):
        with pytest.raises(ValueError, match="must be a tensor of shape"):
            step(*wrong)
    assert step.lengths.tolist() == [20] and step.room == 236
    if device == "cpu":
        with pytest.raises(RuntimeError, match="CUDA graph needs tensors on a CUDA GPU"):
            step.capture()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_captured_step_equals_an_eager_one_at_every_length(dtype, device):
    """Cases D9, E1, E2, E5 and E6: growing, shrinking, short of the budget and past it, from one graph, and no new memory."""
    make = lambda: make_step([5, 700], tokens=4096, budget=Budget(pages=8), dtype=dtype, device=device, backend="triton")  # noqa: E731
    eager, captured = make(), make().capture()
    assert captured.lengths.tolist() == [5, 700]
    for n, lengths in enumerate([None, [100, 4000], [0, 0], [127, 128], [3000, 1]]):
        for step in (eager, captured):
            if lengths:
                step.set_lengths(int32(lengths, device))
        for _ in range(20):
            given = token(eager, n)
            assert same_bits(eager(*given), captured(*given))
        assert torch.equal(eager.lengths, captured.lengths)
    given, before = token(captured, 99), torch.cuda.memory_allocated()
    captured.set_lengths(int32([10, 10], device))
    for _ in range(1000):
        captured(*given)
    assert torch.cuda.memory_allocated() <= before + 2 * sum(tensor.nbytes for tensor in captured._state())


def test_break_even_counts_bytes():
    """All that fits is read; on a GPU also what is read sooner than chosen from."""
    k = torch.empty(1, 2, 10, 128, dtype=torch.float16)
    card = lambda bandwidth: runtime.Card("", sms=132, l2_bytes=0, shared_bytes=0, dependent_launch=True, bandwidth=bandwidth)  # noqa: E731
    assert decode.break_even(k, Budget(32), 64, card(0)) == 2048
    assert 16_384 < decode.break_even(k, Budget(32), 64, card(4.9e12)) < 32_768
    assert 2048 < decode.break_even(k.expand(32, 2, 10, 128), Budget(32), 64, card(4.9e12)) < 4096


def test_what_an_append_cannot_keep_current_is_refused():
    k = torch.zeros(1, 1, 64, 64)
    for wrong, message in ((dict(kind="mean"), "kind must be"), (dict(budget=Budget(2, local=0)), "budget.local")):
        with pytest.raises(ValueError, match=message):
            DecodeStep(k, k.clone(), int32([0]), wrong.pop("budget", BUDGET), heads=1, **wrong)
