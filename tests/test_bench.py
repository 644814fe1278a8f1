"""The timing harness and the dense benchmark: what is timed is right, rotated, and labelled. Nothing here judges speed."""

import importlib.util
import io
import time

import PIL.Image
import pytest
import torch
from torch.nn.attention import SDPBackend

from pageskip_lib import dense_decode
from pageskip_lib.bench import ceilings, dense, peers, records, timing
from pageskip_lib.bench.__main__ import main
from pageskip_lib.controls import png, title_of


def test_rotation_is_larger_than_the_cache():
    """Case J1: three times, unless that takes more than 256 copies."""
    for l2, one in [(60e6, 1e6), (60e6, 2.1e9), (0, 5), (60e6, 33.6e6)]:
        copies = timing.copies_to_outgrow(int(l2), int(one))
        assert 3 <= copies <= 256 and (copies == 256 or copies * one >= 3 * l2)


def test_every_arm_is_called_and_the_median_is_reported(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    called = []
    arms = {name: [lambda name=name: called.append(name)] for name in ("a", "b")}
    times = timing.time_arms(arms, repeats=4, seconds_each=1e-5)
    assert set(called) == {"a", "b"} and all(time.low <= time.median <= time.high for time in times.values())


def test_on_a_cpu_inputs_take_turns_from_one_measurement_to_the_next(monkeypatch):
    """Case J1: with many sets of inputs a measurement is one call, and none comes round again before the others."""
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    called = []
    timing.time_arms({"a": [lambda n=n: called.append(n) or time.sleep(0.002) for n in range(7)]}, repeats=11, seconds_each=1e-3)
    assert called == [n % 7 for n in range(3 + 11)], "three calls to see how long one takes, then one a measurement"


def test_summary_is_median_and_quartiles():
    assert timing.summary([1, 2, 3, 4, 100]) == timing.Timing(median=3, low=2, high=4)


def test_arms_take_turns(monkeypatch):
    """Cases J8 and J9: a clock that changes meets every arm."""
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    order = []
    monkeypatch.setattr(timing, "_cpu_seconds", lambda calls, count: order.append(next(calls)) or 1.0)
    timing.time_arms({"a": ["a"], "b": ["b"]}, repeats=3)
    assert order[-6:] == ["a", "b"] * 3


def dtype_of(device):
    return dense.DTYPES[device][0]


@pytest.mark.parametrize("heads", dense.HEADS)
def test_every_arm_is_right(heads, device):
    """Case H6: a baseline's output is compared with fp64 before its time counts."""
    found = peers.arms(device, dtype_of(device))
    assert [arm.name for arm in found[:2]] == ["pageskip dense", "SDPA flash" if device == "cuda" else "SDPA"]
    for arm in found:
        dense.check_arm(arm, heads, dtype_of(device), device)


@pytest.mark.parametrize(
    "wrong", [lambda q, k, v: dense_decode(q, k[:, :, ::2], v[:, :, ::2]), lambda q, k, v: dense_decode(q, k, v) * float("nan")], ids=["half", "nan"]
)
def test_a_wrong_arm_is_not_timed(wrong, device):
    with pytest.raises(RuntimeError, match="mine is off by"):
        dense.check_arm(peers.Arm("mine", peers.each(wrong)), dense.HEADS[0], dtype_of(device), device)


def test_both_layouts_are_the_same_bytes():
    ((_, kv),) = dense.make_sets(1, (4, 2, 64), 3, 10, torch.float32, "cpu")
    for tokens_first, inner in ((False, (64 * 10, 64)), (True, (64, 2 * 64))):
        k, v = dense.views(kv, tokens_first)
        assert k.shape == v.shape == (3, 2, 10, 64) and k.stride()[1:3] == inner
        assert k.data_ptr() == kv.data_ptr() and v.data_ptr() == kv[1].data_ptr()


def test_a_peer_that_refuses_a_shape_gets_a_row_that_says_so(device, monkeypatch):
    def refuse(q, k, v):
        raise RuntimeError("no kernel for this shape\nand a page of advice")

    found = [*peers.arms(device, dtype_of(device))[:2], peers.Arm("picky", peers.each(refuse))]
    rows = dense.measure_shape(found, (4, 2, 64), 1, 256, dtype_of(device), device, lambda: None)
    assert [row["error"] for row in rows if "error" in row] == ["RuntimeError: no kernel for this shape"]
    assert len(rows) == 4 and all(row["microseconds"] > 0 for row in rows[:3])
    assert "-" in dense.table(rows).splitlines()[-1]


def test_what_ran_is_named(device):
    """Case H1: the time of a baseline means little without the name of the kernel that ran."""
    q, k, v = (torch.randn(shape, dtype=dtype_of(device), device=device) for shape in ((1, 4, 64), (1, 2, 300, 64), (1, 2, 300, 64)))
    if device == "cuda":
        assert timing.kernel_names(lambda: dense_decode(q, k, v, splits=2)) == ["_dense_kernel", "_merge_kernel"]
        assert any("flash" in name for name in timing.kernel_names(lambda: peers.sdpa(q, k, v, SDPBackend.FLASH_ATTENTION)))
    else:
        assert "flash_attention_for_cpu" in timing.kernel_names(lambda: peers.sdpa(q, k, v, SDPBackend.FLASH_ATTENTION))[0]


@pytest.mark.gpu
def test_the_streaming_read_reads_everything():
    """Its sum is compared with a number, so a kernel that skips its input would be seen to store nothing."""
    x, out = torch.zeros(10_000, device="cuda", dtype=torch.float32), torch.zeros((), device="cuda")
    x[9_999] = 12345.678
    ceilings.read_once(x, out)
    assert out.item() == pytest.approx(12345.678)


def test_ceilings_count_both_sides_of_a_copy(device):
    rows, _ = ceilings.run_ceilings(sizes=[1])
    read, copy = rows
    assert (read["arm"], copy["arm"]) == (ceilings.READ, ceilings.COPY) and copy["bytes"] == 2 * read["bytes"]
    for row in rows:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["microseconds"] / 1e3)
    assert "GB/s" in ceilings.table(rows)


def test_the_command_prints_ratios_and_records(device, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(dense.SHAPES, device, [(1, 256), (2, 128)])
    monkeypatch.setattr(dense, "HEADS", [(12, 2, 128)])
    monkeypatch.setattr(dense, "run_ceilings", lambda sizes: ([dict(arm="copy", gb_per_s=1.0)], {}))
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    main(["dense", "--record", "here"])
    printed = capsys.readouterr().out
    assert "best peer/ours" in printed and "1 x 256" in printed and "median of 12" in printed
    assert records.names("dense") == ["here"]
    recorded = records.load("dense", "here")
    assert {"machine", "date", "method", "ceilings_gb_per_s"} <= set(recorded["settings"])
    assert len(recorded["rows"]) == 2 * sum(len(peers.arms(device, dtype)) + 1 for dtype in dense.DTYPES[device])
    row = recorded["rows"][0]
    assert {"heads", "kv_heads", "head_dim", "dtype", "batch", "tokens", "arm", "microseconds", "low", "high", "kernels"} <= set(row)
    assert row["kv_bytes"] == 2 * 1 * 2 * 256 * 128 * (2 if device == "cuda" else 4)


def test_progress_adds_up(device, monkeypatch):
    monkeypatch.setattr(dense, "run_ceilings", lambda sizes: ([], {}))
    seen = []
    few = dict(heads=[(4, 2, 64)], dtypes=[dtype_of(device)], shapes=[(1, 128)])
    dense.run_dense(**few, progress=lambda: seen.append(1))
    assert len(seen) == dense.measurements(**few)


def test_a_missing_record_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match="dense_moon.json; of dense it has .*h200"):
        records.load("dense", "moon")


@pytest.fixture(scope="module")
def recorded():
    """{(heads, dtype, batch, tokens): {arm: row}} of the H200's record, arms that refused left out."""
    points = {}
    for row in records.load("dense", "h200")["rows"]:
        if "error" not in row:
            points.setdefault((row["heads"], row["dtype"], row["batch"], row["tokens"]), {})[row["arm"]] = row
    return points


README = (records.RECORDED.parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_shows_the_recorded_table(recorded):
    arms = ("pageskip dense", "SDPA cuDNN", "SDPA flash", "FlashInfer", "FA3", "FlexAttention", "streaming read")
    for batch in (1, 8, 32):
        for tokens in (1024, 16384, 65536, 131072):
            took = recorded[12, "float16", batch, tokens]
            assert f"| {batch} x {tokens:,} | " + " | ".join(f"{took[arm]['microseconds']:,.1f}" for arm in arms) + " |" in README
    settings = records.load("dense", "h200")["settings"]
    assert settings["date"] in README and settings["machine"]["name"] in README and settings["machine"]["torch"] in README
    assert settings["peers"]["FlashInfer"] in README


def test_what_the_readme_says_of_the_record_is_so(recorded):
    ratios = []
    for arms in recorded.values():
        peers = [row["microseconds"] for arm, row in arms.items() if arm not in ("pageskip dense", "streaming read")]
        ratios.append(arms["pageskip dense"]["microseconds"] / min(peers))
        ours = arms["pageskip dense"]
        if ours["head_dim"] == 128 and ours["kv_bytes"] > 5e8:
            assert 1 / ours["share_of_read"] <= (1.03 if ours["kv_bytes"] >= 1e9 else 1.06), ours
    assert f"{len(ratios)} points" in README and f"At {sum(ratio < 1 for ratio in ratios)} of them" in README
    assert f"at worst {max(ratios) - 1:.1%} behind (cuDNN" in README


def test_the_readme_figure_is_the_records():
    spec = importlib.util.spec_from_file_location("readme_figure", records.RECORDED.parent.parent / "tools" / "readme_figure.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, draw in tool.FIGURES.items():
        assert f"![{title_of(draw())}](docs/{path.name})" in README
        with PIL.Image.open(path) as stored, PIL.Image.open(io.BytesIO(png(draw()))) as fresh:
            assert stored.format == "PNG" and stored.size == fresh.size


def test_the_readme_shows_the_recorded_step():
    """Its table, the rows that lose, the kernel beside FlashInfer's, and what the text says of short contexts."""
    rows = {}
    for row in records.load("step", "h200")["rows"]:
        rows.setdefault((row["heads"], row["batch"], row["tokens"]), {})[row["arm"]] = row
    slower, beyond, behind = [], [], []
    for (heads, batch, tokens), arms in rows.items():
        us = {arm: row["microseconds"] for arm, row in arms.items()}
        over = us["pageskip step"] / us["pageskip dense"], us["pageskip step"] - us["pageskip dense"]
        if not arms["pageskip step"]["selects"]:
            slower.append(over)
            if us["pageskip step"] > 1.05 * us["dense by lengths"]:
                beyond.append((heads, batch, tokens, f"{us['pageskip step'] / us['dense by lengths'] - 1:.0%}"))
        else:
            assert over[0] < 1
        if us["pageskip step"] > min(us["SDPA flash"], us["SDPA cuDNN"]):
            behind.append((heads, batch, tokens, f"{us['pageskip step'] / min(us['SDPA flash'], us['SDPA cuDNN']) - 1:.0%}"))
        if heads == 12 and tokens != 8192:
            shown = " | ".join(f"{us[arm]:,.1f}" for arm in ("pageskip step", "pageskip dense", "SDPA flash", "SDPA cuDNN", "streaming read"))
            over = [arms["pageskip step"]["speed_up"], min(us["SDPA flash"], us["SDPA cuDNN"]) / us["pageskip step"]]
            assert f"| {batch} x {tokens:,} | {shown} | {over[0]:.2f}x | {over[1]:.2f}x |" in README
    ratios, more = zip(*slower)
    assert f"by up to {max(ratios) - 1:.0%}, {max(more):.2f} µs at most" in README
    assert beyond == [(32, 1, 1024, "9%")] and f"At {len(slower) - 1} of {len(slower)} such" in README
    assert behind == [(9, 32, 1024, "6%")] and f"{len(rows)} points" in README and "9/3 heads, 32 x 1,024, by 6%" in README
    alone = {}
    for row in records.load("sparse", "h200")["rows"]:
        alone.setdefault((row["heads"], row["batch"], row["tokens"]), {})[row["arm"]] = row["microseconds"]
    pairs = [f"{alone[12, batch, 65536]['pageskip sparse']:.1f} against {alone[12, batch, 65536]['FlashInfer paged']:.1f}" for batch in (1, 8, 32)]
    assert ", ".join(pairs) in README
    lost = {at: us["pageskip sparse"] / us["FlashInfer paged"] - 1 for at, us in alone.items() if us["pageskip sparse"] > us["FlashInfer paged"]}
    assert set(lost) == {(32, 32, tokens) for tokens in (4096, 8192, 16384, 65536, 131072)}
    assert f"by {min(lost.values()):.0%} to {max(lost.values()):.0%} from 4,096 tokens on" in README
