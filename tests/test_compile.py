"""Every launch must fit the readers' cards: compiled for Ampere to Blackwell and for two AMD targets, without a GPU.

``python tests/compile_for_cards.py`` prints the table that these tests judge.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pageskip_lib import runtime, summaries

pytestmark = pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed")

# Which launches may keep some registers in memory, and why; each must be needed by at least one.
EXCUSES = {
    "full fp32 has no tensor cores: the operands of both products sit in registers": lambda row: row["dtype"] == "fp32",
    "accumulators of 64 and 128 rows: more than 32 query heads to a KV head": lambda row: row["BLOCK_G"] > 32,
    "minmax holds both signs of the queries in registers: too many for more than 16 heads of more than 128 dims": (
        lambda row: row["kernel"] == "score" and row["BLOCK_G"] * row["BLOCK_D"] > 4096
    ),
    "every token of a small page has an address of its own: too many beside more than 16 heads of more than 128 dims": (
        lambda row: row["kernel"] in ("paged dense", "paged sparse") and row["PAGE"] == 16 and row["BLOCK_G"] * row["BLOCK_D"] > 4096
    ),
    "no RDNA card was measured, and none of the tile sizes is chosen for its 256 registers": lambda row: row["target"] == "gfx1100",
}

# (target, dtype, BLOCK_D, BLOCK_G) of launches that do not fit: 128 query heads of 256 fp32 numbers are 128 KB by themselves.
TOO_LARGE = {(target, "fp32", 256, 128) for target in ("sm_86", "sm_89", "sm_120", "gfx942", "gfx1100")}


def key(target, kernel, dtype, shape):
    return target, kernel, dtype, tuple(sorted(shape.items()))


@pytest.fixture(scope="module")
def rows():
    """One row for each launch, compiled in a process where kernels are not interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_for_cards.py"
    ended = subprocess.run([sys.executable, str(script), "--json"], env=env, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def attention(rows):
    return [row for row in rows if row["kernel"] in ("dense", "sparse")]


def test_every_launch_of_the_enumeration_was_compiled(rows):
    """Once each, without an error; and the enumeration holds every padded shape of every target."""
    import compile_for_cards as cards

    assert [row for row in rows if "error" in row] == []
    measured = ("target", "kernel", "dtype", "registers", "local", "shared", "room")
    compiled = [key(row["target"], row["kernel"], row["dtype"], {n: v for n, v in row.items() if n not in measured}) for row in rows]
    wanted = [key(target, kernel, cards.DTYPES[dtype], shape) for one in cards.TARGETS for target, kernel, dtype, shape in cards.launches(one)]
    assert sorted(compiled, key=str) == sorted(wanted, key=str) and len(set(compiled)) == len(compiled)
    assert set(cards.TARGETS) == {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100"}
    for target in cards.TARGETS:
        here = [row for row in rows if row["target"] == target]
        assert {row["kernel"] for row in here} == set(cards.KERNELS)
        for kernel in ("dense", "sparse"):
            shapes = {(row["dtype"], row["BLOCK_D"], row["BLOCK_G"]) for row in here if row["kernel"] == kernel}
            halves = {("fp16", dim, group) for dim in (64, 128, 256) for group in (16, 32, 64, 128)}
            groups = (16, 32, 64, 128) if kernel == "dense" else (16, 32)
            assert shapes == halves | {("fp32", dim, group) for dim in (64, 128, 256) for group in groups}
        assert all({row["PAGE"] for row in here if row["kernel"] == kernel} == {16, 64} for kernel in ("sparse", "paged sparse"))
        assert {row["BLOCK_N"] for row in here if row["kernel"] == "select"} == {64, 1024, 4096, 16384}
        scored = [row for row in here if row["kernel"] == "score"]
        assert {row["KIND"] for row in scored} == set(summaries.KINDS) - {"minmax8"} and {row["GROUP"] for row in scored} == {"max", "sum", "none"}
        assert {row["BLOCK_N"] for row in here if row["kernel"] == "both"} == {64, 32}  # minmax8 with the append, and by itself as score8
        widest = set() if target == "gfx1100" else {16}
        assert {row["BLOCK_N"] * row["PER_PAGE"] for row in scored} == {64, 32} | widest  # entries of a program, down to the fewest
        assert {row["PER_PAGE"] for row in scored} == {1, 8} | widest
        assert {row["SIZE"] for row in here if row["kernel"] == "summary"} == {8, 64, 128}
        kept = {("minmax8", 8), ("minmax8", 32), ("minmax", 8), ("minmax", 32)}
        for kernel in ("append", "append+merge", "paged append"):
            assert {(row["KIND"], row["BLOCK_H"]) for row in here if row["kernel"] == kernel} == kept
        assert {(row["BLOCK_D"], row["BLOCK_G"]) for row in here if row["kernel"] == "newest"} == {shape[1:] for shape in halves}


def test_launches_fit_the_shared_memory_of_their_card(rows):
    """Also of consumer cards, where one program can have 99 KB. What does not is listed, and must go from the list once it does."""
    too_large = {(row["target"], row["dtype"], row.get("BLOCK_D"), row.get("BLOCK_G")) for row in rows if row["shared"] > row["room"]}
    assert too_large == TOO_LARGE


def test_registers_are_not_spilled(rows):
    """Except where EXCUSES says why; what is excused but does not spill is an excuse too many."""
    spilled = [row for row in rows if row["local"]]
    assert [row for row in spilled if not any(excuse({"BLOCK_G": 0} | row) for excuse in EXCUSES.values())] == []
    for reason, excuse in EXCUSES.items():
        others = [other for name, other in EXCUSES.items() if name != reason]
        alone = [row for row in spilled if not any(other({"BLOCK_G": 0} | row) for other in others)]
        assert any(excuse({"BLOCK_G": 0} | row) for row in alone), f"nothing needs this any more: {reason}"


def test_loads_stay_in_flight(attention):
    """On NVIDIA and for up to 32 heads a KV head: two stages at least, three for halves with D up to 128."""
    usual = [row for row in attention if row["BLOCK_G"] <= 32 and row["target"].startswith("sm_")]
    assert usual and all(row["num_stages"] >= 2 for row in usual)
    assert all(row["num_stages"] >= 3 for row in usual if row["dtype"] == "fp16" and row["BLOCK_D"] <= 128)


def test_every_attention_kernel_loads_as_far_ahead_as_the_dense_one(rows):
    """Tiles on their way in lie in shared memory, so the twin of a dense launch must take no less of it."""
    shape = ("target", "dtype", "D", "G", "TILE", "num_warps", "num_stages")
    dense = {tuple(row[name] for name in shape): row["shared"] for row in rows if row["kernel"] == "dense"}
    twins = [row for row in rows if row["kernel"] in ("sparse", "newest", "paged dense", "paged sparse")]
    assert [row for row in twins if row["shared"] < dense[tuple(row[name] for name in shape)]] == []
