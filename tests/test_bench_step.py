"""The benchmark of the skipping path: it times what it says, and counts the bytes that a step must read."""

from dataclasses import replace

import pytest
import torch

from pageskip_lib import DecodeStep, decode, dense_decode, page_scores, select_pages, sparse_decode, summarize_pages
from pageskip_lib.bench import dense, records, step, timing
from pageskip_lib.bench.__main__ import main
from pageskip_lib.bench.ceilings import READ

from helpers import same_bits

FEW = dict(heads=[(4, 2, 64)], shapes=[(2, 4096)])
START = 4096 - step.SPARE  # where a measurement at 4,096 tokens begins


@pytest.fixture(autouse=True)
def small_shapes_select(monkeypatch):
    """Shapes of a few megabytes, which a GPU had better read whole."""
    monkeypatch.setattr(decode, "break_even", lambda k, budget, page_size, card: budget.pages * page_size)


@pytest.fixture
def timed(monkeypatch):
    """What ``measure_step`` and ``measure_sparse`` hand to the harness: (calls, before). Nothing is timed; every arm takes a microsecond."""
    given = []

    def time_arms(calls, *, before=None, **options):
        given[:] = calls, before
        return dict.fromkeys(calls, timing.Timing(1.0, 1.0, 1.0))

    monkeypatch.setattr(step, "time_arms", time_arms)
    return given


def test_bytes_of_a_step_are_summaries_and_listed_pages():
    """Case J2: what is touched, not what is allocated; and so the read that it is compared with reads."""
    k = torch.zeros(3, 2, 4096, 64, dtype=torch.float16)
    decode = DecodeStep(k, k.clone(), torch.full((3,), 4096, dtype=torch.int32), step.BUDGET, heads=4)
    pages = select_pages(page_scores(decode.q, decode.summary), step.BUDGET, decode.lengths, step.PAGE)
    counted = decode.summary.bytes + int(pages.counts.sum()) * step.PAGE * 64 * 2 * 2
    assert step.step_bytes(3, 4096, (4, 2, 64), 2) == counted
    assert step.step_bytes(1, 640, (4, 2, 64), 2) == 2 * (10 * (2 * 64 + 4) + 4 * 64 + 640 * 64 * 2 * 2)  # fewer pages than the budget
    assert step.step_bytes(1, 640, (4, 2, 64), 2, kind="minmax") == 2 * 64 * 2 * 2 * (10 + 640)


@pytest.mark.parametrize("measure, heads, batch, tokens", [(step.measure_step, (4, 2, 64), 2, 4096), (step.measure_sparse, (9, 3, 64), 1, 8192)])
def test_the_plain_read_reads_what_is_counted(measure, heads, batch, tokens, timed, device):
    """Cases J2 and J10: the denominator is a measured read of as many bytes, each call's of its own."""
    rows = measure(heads, batch, tokens, torch.float16, device)
    read = [call.__defaults__[0] for call in timed[0][READ]]
    assert {x.nbytes for x in read} == {row["bytes_touched"] for row in rows} and len({x.data_ptr() for x in read}) == len(read) >= 3


@pytest.mark.parametrize("measure, arm", [(step.measure_step, step.STEP), (step.measure_sparse, step.SPARSE)])
def test_the_rotation_outgrows_the_cache_by_what_is_touched(measure, arm, timed, device, monkeypatch):
    """Case J1: not by what is allocated, which is far more (flashinfer-ai/flashinfer#2213): 20 MB of touched bytes for 6 MB of L2."""
    monkeypatch.setattr(step, "card", lambda device, real=step.card: replace(real(device), l2_bytes=6 << 20))
    rows = measure((4, 2, 64), 1, 4096, torch.float16, device)
    calls = timed[0][arm]
    caches = {call.__self__.k.data_ptr() if arm == step.STEP else call.__defaults__[1].data_ptr() for call in calls}
    assert len(caches) == len(calls) and len(calls) * rows[0]["bytes_touched"] >= 3 * (6 << 20)


def test_every_shape_on_the_gpu_is_rotated_past_an_h200s_cache():
    """Case J1: no shape is so small that the limit on the number of copies keeps it in 60 MB."""
    for heads in dense.HEADS:
        for batch, tokens in step.SHAPES["cuda"]:
            touched = step.step_bytes(batch, tokens, heads, 2)
            assert timing.copies_to_outgrow(60 << 20, touched) * touched >= 3 * (60 << 20), (heads, batch, tokens)


def test_what_is_timed_as_a_step_is_one(timed, device):
    """Cases J3, J4 and J7: it appends its token, and attends to 32 pages a KV head of which its own scores are the reason."""
    step.measure_step((4, 2, 64), 2, 4096, torch.float16, device)
    calls, before = timed
    before()  # the names of its kernels come from a call of the first step
    outs = set()
    for call in calls[step.STEP]:
        one = call.__self__
        assert (one.lengths == START).all()
        lengths, keys, values = one.lengths + 1, one.k.clone(), one.v.clone()
        keys[:, :, START], values[:, :, START] = one.k_new, one.v_new
        summary = summarize_pages(keys, step.PAGE, lengths=lengths, kind="minmax8")
        pages = select_pages(page_scores(one.q, summary), step.BUDGET, lengths, step.PAGE)
        assert (pages.counts == 32).all() and (pages.pages[..., -1] == START // step.PAGE).all()  # the token opens that page
        read = torch.zeros(2, 2, one.k.shape[2] // step.PAGE, dtype=torch.bool, device=device).scatter_(2, pages.pages.long(), True)
        one.v[~read.repeat_interleave(step.PAGE, dim=2)] = float("nan")
        out = call()
        assert (one.lengths == START + 1).all() and torch.equal(one.k[:, :, START], one.k_new) and torch.equal(one.v[:, :, START], one.v_new)
        expected = sparse_decode(one.q, keys, values, pages, page_size=step.PAGE, lengths=lengths)
        torch.testing.assert_close(out, expected, rtol=2**-9, atol=2**-12)
        assert (expected - dense_decode(one.q, keys, values, lengths=lengths)).abs().max() > 2**-6
        outs.add(out.sum().item())
    assert len(outs) == len(calls[step.STEP])  # each of the rotated inputs has a query of its own
    before()
    assert all((call.__self__.lengths == START).all() for call in calls[step.STEP])


def test_the_parts_are_those_of_the_step(timed, device):
    """Case J7: score, select and attend by themselves, over a full cache and the list that the scores make; dense attention sees it all."""
    step.measure_step((4, 2, 64), 2, 4096, torch.float16, device)
    calls, before = timed
    before()
    for n, call in enumerate(calls[step.STEP]):
        one = call.__self__
        score, pages = calls["score"][n](), calls["select"][n]()
        assert same_bits(score, page_scores(one.q, one.summary)) and (pages.counts == 32).all()
        top = calls["torch.topk"][n]().indices
        assert top.shape == (2, 2, 32) and torch.equal(score.gather(2, top).amin(2), score.topk(32).values[..., -1])
        expected = sparse_decode(one.q, one.k, one.v, pages, page_size=step.PAGE, lengths=one.lengths)
        assert same_bits(calls["attend"][n](), expected)
        exact = dense_decode(one.q, one.k[:, :, :4096], one.v[:, :, :4096])
        assert same_bits(calls["pageskip dense"][n](), exact)


def test_the_selection_has_a_row_beside_torchs():
    """Case F10: torch.topk on the same scores, 256 rows of 1,024 of them among the shapes (flashinfer-ai/flashinfer#3009)."""
    sizes = {(batch * heads[1], tokens // step.PAGE) for heads in dense.HEADS for batch, tokens in step.SHAPES["cuda"]}
    assert (256, 1024) in sizes and step.BUDGET.pages == 32
    rows, _ = step.run_step(**FEW)
    assert {"select", "torch.topk"} <= {row["arm"] for row in rows}


@pytest.mark.gpu
def test_the_sparse_kernel_is_what_ran():
    """Case J4: by name, in the step and alone."""
    for rows, arm in ((step.run_step(**FEW)[0], step.STEP), (step.run_sparse(**FEW)[0], step.SPARSE)):
        (names,) = [row["kernels"] for row in rows if row["arm"] == arm]
        assert any("sparse" in name for name in names) and not any("dense" in name for name in names), names


def test_random_pages_are_ascending_and_distinct():
    """Case J5: scattered over the cache, as a selection is, and never the first pages in order."""
    pages = step.random_pages(2, 3, 50 * step.PAGE, "cpu", seed=0).pages
    assert pages.shape == (2, 3, 32) and (pages.diff() > 0).all() and 0 <= pages.min() and pages.max() < 50
    assert (pages.diff() > 1).any(-1).all()
    assert step.random_pages(1, 1, 5 * step.PAGE, "cpu", seed=0).pages.tolist() == [[[0, 1, 2, 3, 4]]]


def test_the_step_and_its_parts_are_timed_on_the_same_inputs(device):
    """Cases J6, J7 and J9: the row says what ran and at which clock, the settings that the keys are random."""
    rows, settings = step.run_step(**FEW)
    assert all(bool(row["kernels"]) == (device == "cuda") and row["sm_mhz"] == rows[0]["sm_mhz"] for row in rows)
    names = [row["arm"] for row in rows]
    assert names[:6] == ["streaming read", "pageskip step", "plain step", "score", "select", "attend"] and "pageskip dense" in names
    flash = next(row["microseconds"] for row in rows if row["arm"].startswith("SDPA"))
    for row in rows:
        assert row["speed_up"] == pytest.approx(flash / row["microseconds"], rel=1e-2)
        assert row["bytes_touched"] == step.step_bytes(2, 4096, (4, 2, 64), dense.DTYPES[device][0].itemsize)
    assert "random keys" in settings["method"] and "speed-up" in step.table(rows)


def test_the_sparse_kernel_is_timed_alone(device):
    rows, _ = step.run_sparse(**FEW)
    assert [row["arm"] for row in rows][:2] == ["streaming read", "pageskip sparse"]
    assert rows[1]["bytes_touched"] == 2 * 2 * 2 * 2048 * 64 * dense.DTYPES[device][0].itemsize


def test_what_calls_change_is_put_back_before_each_measurement(monkeypatch):
    """Case J3: or else the lengths would run on into the end of the cache."""
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    seen = []
    timing.time_arms({"a": [lambda: seen.append("call")]}, repeats=3, seconds_each=1e-9, before=lambda: seen.append("before"))
    assert seen[-6:] == ["before", "call"] * 3


def test_the_command_records_a_step(device, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(step.SHAPES, device, [(1, 2560)])
    monkeypatch.setattr(step, "HEADS", [(4, 2, 64)])
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    main(["step", "--record", "here"])
    assert "1 x 2560" in capsys.readouterr().out and records.load("step", "here")["rows"]
