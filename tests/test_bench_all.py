"""``bench all``: every measurement in turn, none lost to another's failure, and points that memory has no room for left out by arithmetic."""

import gc
import os
import stat
import sys

import pytest
import torch

from pageskip_lib import runtime
from pageskip_lib.bench import __main__ as command
from pageskip_lib.bench import ceilings, dense, generate, launches, peers, pitfalls, records, room, serve, step, timing
from pageskip_lib.runtime import Card

GPU = Card(name="a card of 8 GB", sms=24, l2_bytes=24 << 20, shared_bytes=99 * 1024, dependent_launch=False, bandwidth=272e9)
FREE = 7.4e9


def test_all_runs_everything_in_order_and_keeps_what_did_not_fail(monkeypatch, capsys):
    ran = []

    def run_alone(kind, name):
        ran.append((kind, name))
        return {"sparse": "no room", "live": "no model"}.get(kind)

    monkeypatch.setattr(command, "run_alone", run_alone)
    assert command.main(["all", "--record", "mine"]) == 1
    assert ran == [(kind, "mine") for kind in command.COMMANDS]
    said = capsys.readouterr().out
    assert "not measured: sparse; no room\nnot measured: live; no model\n" in said and "9 of 11 measured" in said
    monkeypatch.setattr(command, "run_alone", lambda *_: None)
    assert command.main(["all"]) == 0 and "not measured" not in capsys.readouterr().out


def test_a_process_of_its_own_hands_back_its_last_sentence(capsys):
    assert "invalid choice: 'nothing'" in command.run_alone("nothing", None)
    assert "usage:" in capsys.readouterr().err  # what it said on the way is shown as it comes


def fake_python(tmp_path, monkeypatch, script):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.skipif(os.name != "posix", reason="signals and shell scripts")
def test_a_process_that_dies_is_told_from_one_that_explains(tmp_path, monkeypatch):
    for script, expected in (
        ('echo "$@" > arguments; exit 0', None),
        ("echo 'bar 1' >&2; echo 'pageskip: no model here' >&2; exit 1", "no model here"),
        ("kill -9 $$", "it was ended by SIGKILL, as a system does that runs out of memory"),
        ("exit 3", "it did not say why"),
    ):
        monkeypatch.chdir(tmp_path)
        fake_python(tmp_path, monkeypatch, script)
        assert command.run_alone("dense", "mine") == expected
    assert (tmp_path / "arguments").read_text().split() == ["-m", "pageskip_lib.bench", "dense", "--record", "mine"]


@pytest.mark.parametrize("name", ["", "a b", "../h200", "a/b", "a.json", "größe"])
def test_a_name_is_letters_digits_and_two_signs(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    monkeypatch.setattr(command, "run_one", lambda *_: pytest.fail("measured before the name was looked at"))
    with pytest.raises(SystemExit):
        command.main(["dense", "--record", name])
    assert "letters, digits, '-' and '_'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="letters, digits"):
        records.save(dict(settings={}, rows=[]), "dense", name)
    assert not list(tmp_path.iterdir())
    assert records.checked("my-RTX_3060") == "my-RTX_3060"


@pytest.mark.parametrize("kind", ["splits", "changes"])
def test_what_a_cpu_has_not_is_said_in_one_sentence(kind, monkeypatch):
    for module in (dense, step):
        monkeypatch.setattr(module, "default_device", lambda: "cpu")
    with pytest.raises(SystemExit, match=rf"pageskip: {kind} need a CUDA GPU: .*\.$"):
        command.main([kind])


def test_what_was_left_out_is_printed_and_recorded(monkeypatch, tmp_path, capsys):
    rows = [dict(arm="copy", bytes=1e6, microseconds=1.0, low=1.0, high=1.0, gb_per_s=1.0)]
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    monkeypatch.setitem(command.COMMANDS, "ceilings", ("", lambda progress: (rows, dict(method="m", left_out=["2,147 MB: too large"])), ceilings.table, None))
    assert command.main(["ceilings", "--record", "small"]) is None
    assert "left out: 2,147 MB: too large\n" in capsys.readouterr().out
    assert records.load("ceilings", "small")["settings"]["left_out"] == ["2,147 MB: too large"]
    monkeypatch.setitem(command.COMMANDS, "ceilings", ("", lambda progress: ([], dict(method="m", left_out=["2,147 MB: too large"])), ceilings.table, None))
    with pytest.raises(SystemExit, match="pageskip: memory has no room for any point; 2,147 MB: too large."):
        command.main(["ceilings"])


@pytest.fixture
def small_card(monkeypatch):
    """A CUDA card of 8 GB that is not there: sizes and arithmetic are its own, nothing is measured. Returns what would have been."""
    measured = []
    monkeypatch.setattr(room, "free_memory", lambda device: FREE)
    monkeypatch.setattr(runtime, "default_device", lambda: "cuda")
    for module in (ceilings, dense, generate, launches, room, step):
        monkeypatch.setattr(module, "default_device", lambda: "cuda")
    for module in (ceilings, dense, step, runtime):
        monkeypatch.setattr(module, "card", lambda device: GPU)
    pitfalls.cache_sizes.cache_clear()
    monkeypatch.setattr(dense, "kernel_problem", lambda device: None)
    monkeypatch.setattr(dense, "arms", lambda device, dtype: [peers.Arm("pageskip dense", list)])
    monkeypatch.setattr(dense, "check_arm", lambda *_: None)
    monkeypatch.setattr(dense, "measure_shape", lambda found, *point: measured.append(point[:3]) or [])
    monkeypatch.setattr(dense, "run_ceilings", lambda sizes: measured.append(sizes) or ([], {}))
    for name in ("measure_step", "measure_sparse", "measure_changes"):
        monkeypatch.setattr(step, name, lambda *point: measured.append(point[:3]) or [])
    monkeypatch.setattr(generate, "model_of", lambda *_: (None, "random"))
    monkeypatch.setattr(generate, "join_projections", lambda model: None)
    monkeypatch.setattr(generate, "measure_generate", lambda model, name, weights, *point: measured.append((name, *point[:2])) or [])
    monkeypatch.setattr(generate, "_release", lambda device: None)
    monkeypatch.setattr(pitfalls, "measure", lambda trap, shapes: measured.extend((trap, *shape) for shape in shapes) or [])
    yield measured
    pitfalls.cache_sizes.cache_clear()


def test_a_small_card_leaves_out_what_cannot_fit_and_nothing_else(small_card):
    """By hand, in GB: a 12/2-head layer of 32 x 131,072 tokens is 4.3 in fp16, and a rotation three of them; one 8 x 65,536 layer is 0.5."""
    _, settings = dense.run_dense()
    *points, largest = small_card
    assert ((12, 2, 128), 32, 65536) in points and ((12, 2, 128), 32, 131072) not in points and ((32, 8, 128), 8, 131072) not in points
    assert len(points) + len(settings["left_out"]) == 2 * 3 * 15
    assert "32 x 131,072, 12/2 heads of 128, float16: takes 14.1 GB of memory, 7.4 are free" in settings["left_out"]
    assert largest == [1074], "3 sets of 2.1 GB and one to copy to are 8.6"

    for run, there, gone in (
        (step.run_sparse, ((12, 2, 128), 8, 131072), ((12, 2, 128), 32, 131072)),
        (step.run_step, ((12, 2, 128), 8, 131072), ((32, 8, 128), 32, 65536)),
        (step.run_changes, ((12, 2, 128), 8, 65536), None),
        (generate.run_generate, ("DeepSeek-R1-Distill-Qwen-1.5B", 1, 65536), ("DeepSeek-R1-Distill-Qwen-1.5B", 32, 65536)),
    ):
        small_card.clear()
        _, settings = run()
        assert there in small_card and gone not in small_card, run
        assert bool(settings["left_out"]) == (gone is not None) or run is step.run_changes, settings["left_out"]

    small_card.clear()
    _, settings = pitfalls.run_pitfalls()
    assert ("cache", 32, 32768) in small_card and ("baseline", 8, 65536) not in small_card and ("sync", 32, 65536) in small_card
    assert any(sentence.startswith("baseline, 8 x 65,536: takes") for sentence in settings["left_out"])


def test_with_much_memory_nothing_is_left_out(small_card, monkeypatch):
    monkeypatch.setattr(room, "free_memory", lambda device: 140e9)
    for run in (dense.run_dense, step.run_step, step.run_sparse, step.run_changes, generate.run_generate, pitfalls.run_pitfalls):
        assert not run()[1]["left_out"], run


def test_a_model_that_fits_at_no_size_is_not_made(small_card, monkeypatch):
    made = []
    monkeypatch.setattr(room, "free_memory", lambda device: 3e9)
    monkeypatch.setattr(generate, "model_of", lambda name, *_: made.append(name) or (None, "random"))
    _, settings = generate.run_generate()
    assert made == ["SmolLM2-135M-Instruct"] and len(settings["left_out"]) == 5


def alive():
    """Bytes of all tensors on the CPU, each memory once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type == "cpu"]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("tokens", [1024, 16384])
def test_the_arithmetic_is_what_the_benchmarks_hold(tokens, monkeypatch):
    """When a benchmark begins to time, its tensors take what was reckoned, to a few percent."""
    held, heads, before = [], (4, 2, 64), alive()
    fake = lambda calls, **options: held.append(alive() - before) or {name: timing.Timing(1.0, 1.0, 1.0) for name in calls}  # noqa: E731
    for module in (dense, step, generate):
        monkeypatch.setattr(module, "time_arms", fake)
    size = dense.kv_bytes(heads, 2, tokens, torch.float32)
    dense.measure_shape([], heads, 2, tokens, torch.float32, "cpu", lambda: None)
    assert held.pop() == pytest.approx(3 * size, rel=0.02)
    for measure, memory in ((step.measure_step, step.step_memory), (step.measure_sparse, step.sparse_memory)):
        measure(heads, 2, tokens, torch.float32, "cpu")
        assert 0.9 < held.pop() / memory(heads, 2, tokens, torch.float32, "cpu") < 1.05, measure
    if tokens > 2048:
        model, _ = generate.model_of("tiny", "cpu", torch.float32)
        generate.join_projections(model)
        generate.measure_generate(model, "tiny", "random", 2, tokens, "cpu")
        assert 0.95 < held.pop() / generate.memory("tiny", 2, tokens, torch.float32) < 1.05


def test_the_arithmetic_covers_every_trap(monkeypatch):
    held, before = [], alive()
    monkeypatch.setattr(pitfalls, "_rows", lambda *_, **__: held.append(alive() - before) or [])
    monkeypatch.setattr(pitfalls, "sets_to_outgrow", lambda device, size: 3)
    for trap in ("cache", "launch", "bytes", "baseline"):
        pitfalls.TRAPS[trap](1, 4096, "cpu", torch.float32)
        reckoned = pitfalls.memory(trap, 1, 4096, "cpu", torch.float32)
        left_to_the_calls = 12 * pitfalls.kv_bytes(1, 4096, torch.float32) if trap == "baseline" else 0
        assert held.pop() == pytest.approx(reckoned - left_to_the_calls, rel=0.05), trap


def test_a_peer_that_cannot_run_at_all_has_its_sentence_in_every_row(monkeypatch, device):
    def refuse(q, k, v):
        raise RuntimeError("no kernel on this card\nadvice")

    found = [*peers.arms(device, dense.DTYPES[device][0])[:1], peers.Arm("picky", peers.each(refuse))]
    monkeypatch.setattr(dense, "arms", lambda device, dtype: found)
    monkeypatch.setattr(dense, "run_ceilings", lambda sizes: ([], {}))
    rows, _ = dense.run_dense(heads=[(4, 2, 64)], dtypes=dense.DTYPES[device][:1], shapes=[(1, 128), (1, 256)])
    assert [row["error"] for row in rows if row["arm"] == "picky"] == ["no kernel on this card"] * 2
    assert sum("microseconds" in row for row in rows) == 4 and "nan" in dense.table(rows)
    found[0] = peers.Arm("pageskip dense", peers.each(refuse))
    with pytest.raises(RuntimeError, match="no kernel on this card"):
        dense.run_dense(heads=[(4, 2, 64)], dtypes=dense.DTYPES[device][:1], shapes=[(1, 128)])


def test_cudnn_is_left_out_where_pytorch_refuses_it(monkeypatch):
    backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION

    def sdpa(q, k, v, backend):
        raise RuntimeError("No available kernel. Aborting execution.")

    assert peers._refused(torch.nn.attention.SDPBackend.FLASH_ATTENTION, "cpu", torch.float32) is False
    monkeypatch.setattr(peers, "sdpa", sdpa)
    assert peers._refused(backend, "cpu", torch.float32) is True
    monkeypatch.setattr(peers, "_refused", lambda *_: True)
    assert "SDPA cuDNN" not in [arm.name for arm in peers.arms("cuda", torch.bfloat16)]
    monkeypatch.setattr(peers, "_refused", lambda *_: False)
    assert "SDPA cuDNN" in [arm.name for arm in peers.arms("cuda", torch.bfloat16)]


def test_the_engine_prefills_less_at_a_time_where_memory_is_short(smollm, monkeypatch):
    """In fp32 its cache of 135,168 tokens takes 6.2 GB, and a mask of 2,048 times as many 1.1, of which there are two and copies."""
    for free, expected in ((140e9, 8192), (12e9, 2048), (8e9, 512), (1e9, 512)):
        monkeypatch.setattr(runtime, "free_memory", lambda device, free=free: free)
        assert serve.prefill_room(smollm[0], requests=8, context=8000, tokens=96) == expected, free


def test_free_memory_is_some_number_of_bytes(device):
    assert 1e8 < runtime.free_memory(device) < 1e13
