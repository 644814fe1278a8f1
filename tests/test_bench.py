"""The timing harness and the dense benchmark: what is timed is right, rotated, and labelled. Nothing here judges speed."""

import pytest
import torch

from pageskip_lib.bench import dense, records, timing
from pageskip_lib.bench.__main__ import main


def test_rotation_is_larger_than_the_cache():
    for l2, one in [(60e6, 1e6), (60e6, 2.1e9), (0, 5), (60e6, 33.6e6)]:
        copies = timing.copies_to_outgrow(int(l2), int(one))
        assert 3 <= copies <= 256 and (copies == 256 or copies * one >= 3 * l2)


def test_every_arm_is_called_and_the_median_is_reported(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    called = []
    arms = {name: [lambda name=name: called.append(name)] for name in ("a", "b")}
    times = timing.time_arms(arms, repeats=4, seconds_each=1e-5)
    assert set(called) == {"a", "b"} and all(time.low <= time.median <= time.high for time in times.values())


def test_summary_is_median_and_quartiles():
    assert timing.summary([1, 2, 3, 4, 100]) == timing.Timing(median=3, low=2, high=4)


def test_arms_take_turns(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    order = []
    monkeypatch.setattr(timing, "_cpu_seconds", lambda calls, replays: order.append(calls[0]) or 1.0)
    timing.time_arms({"a": ["a"], "b": ["b"]}, repeats=3)
    assert order[-6:] == ["a", "b"] * 3


def test_a_wrong_arm_is_not_timed(device):
    dtype = torch.float16 if device == "cuda" else torch.float32
    arms = dense.arms_for(device)
    dense.check_arms(arms, device, dtype)
    arms["halves the keys"] = lambda q, k, v: dense.dense_decode(q, k[:, :, ::2].contiguous(), v[:, :, ::2].contiguous())
    with pytest.raises(RuntimeError, match="halves the keys is off by"):
        dense.check_arms(arms, device, dtype)
    arms["halves the keys"] = lambda q, k, v: dense.dense_decode(q, k, v) * float("nan")
    with pytest.raises(RuntimeError, match="is off by nan"):
        dense.check_arms(arms, device, dtype)


@pytest.mark.gpu
def test_the_streaming_read_reads_everything():
    """Its sum is compared with a number, so a kernel that skips its input would be seen to store nothing."""
    x, out = torch.zeros(10_000, device="cuda", dtype=torch.float32), torch.zeros((), device="cuda")
    x[9_999] = 12345.678
    dense.read_once(x, out)
    assert out.item() == pytest.approx(12345.678)


def test_the_command_prints_ratios_and_records(device, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(dense.SHAPES, device, [(1, 256), (2, 128)])
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    main(["dense", "--record", "here"])
    printed = capsys.readouterr().out
    assert "best peer/ours" in printed and "1 x 256" in printed and "median of 12" in printed
    assert records.names("dense") == ["here"]
    recorded = records.load("dense", "here")
    assert {"machine", "date", "method", "dtype", "heads"} <= set(recorded["settings"])
    row = recorded["rows"][0]
    assert set(row) == {"batch", "tokens", "arm", "microseconds", "low", "high", "kv_bytes", "share_of_read"}
    element = 2 if device == "cuda" else 4
    assert row["kv_bytes"] == 2 * 1 * 2 * 256 * 128 * element


def test_a_missing_record_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match="dense_moon.json; of dense it has .*h200"):
        records.load("dense", "moon")


def test_the_readme_shows_the_recorded_table():
    readme = (records.RECORDED.parent.parent / "README.md").read_text(encoding="utf-8")
    run = records.load("dense", "h200")
    took = {(row["batch"], row["tokens"], row["arm"]): row["microseconds"] for row in run["rows"]}
    arms = ("pageskip dense", "SDPA flash", "SDPA cuDNN", "streaming read")
    for batch, tokens in dict.fromkeys((row["batch"], row["tokens"]) for row in run["rows"]):
        assert f"| {batch} x {tokens:,} | " + " | ".join(f"{took[batch, tokens, arm]:.1f}" for arm in arms) + " |" in readme
        ours, best = took[batch, tokens, arms[0]], min(took[batch, tokens, arm] for arm in arms[1:3])
        assert best / ours >= 0.98  # "level with the best or ahead of it"
        if tokens * batch >= 8 * 65536:
            assert took[batch, tokens, "streaming read"] / ours >= 0.95  # "within 5% of a plain read"
    assert run["settings"]["date"] in readme and run["settings"]["machine"]["name"] in readme
