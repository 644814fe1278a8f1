"""The benchmark of the skipping path: it times what it says, and counts the bytes that a step must read."""

import pytest
import torch

from pageskip_lib import DecodeStep, page_scores, select_pages
from pageskip_lib.bench import dense, records, step, timing
from pageskip_lib.bench.__main__ import main

FEW = dict(heads=[(4, 2, 64)], shapes=[(2, 4096)])


def test_bytes_of_a_step_are_summaries_and_listed_pages():
    k = torch.zeros(3, 2, 4096, 64, dtype=torch.float16)
    decode = DecodeStep(k, k.clone(), torch.full((3,), 4096, dtype=torch.int32), step.BUDGET, heads=4)
    pages = select_pages(page_scores(decode.q, decode.summary), step.BUDGET, decode.lengths, step.PAGE)
    counted = decode.summary.bytes + int(pages.counts.sum()) * step.PAGE * 64 * 2 * 2
    assert step.step_bytes(3, 4096, (4, 2, 64), 2) == counted
    assert step.step_bytes(1, 640, (4, 2, 64), 2) == 2 * 64 * 2 * 2 * (10 + 640)  # fewer pages than the budget


def test_random_pages_are_ascending_and_distinct():
    pages = step.random_pages(2, 3, 50 * step.PAGE, "cpu", seed=0).pages
    assert pages.shape == (2, 3, 32) and (pages.diff() > 0).all() and 0 <= pages.min() and pages.max() < 50
    assert step.random_pages(1, 1, 5 * step.PAGE, "cpu", seed=0).pages.tolist() == [[[0, 1, 2, 3, 4]]]


def test_the_step_and_its_parts_are_timed_on_the_same_inputs(device):
    rows, settings = step.run_step(**FEW)
    names = [row["arm"] for row in rows]
    assert names[:5] == ["streaming read", "pageskip step", "score", "select", "attend"] and "pageskip dense" in names
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
