"""The table of cards is sane, agrees with itself, and with the one card that was measured."""

import dataclasses

import pytest

from pageskip_lib.bench import records
from pageskip_lib.cards import CARDS

# FLOP per SM and clock of the dense fp16 tensor cores with fp32 sums, and the boost clock the documents compute with, in GHz.
RATES = {
    "RTX 3090": (512, 1.695), "RTX 4090": (512, 2.52), "RTX 5090": (512, 2.407),
    "A100": (2048, 1.41), "H100": (4096, 1.83), "H200": (4096, 1.83), "B200": (8192, 1.85),
}  # fmt: skip
# Shared memory per program and per SM in KB: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_KB = {80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_units_are_sane(card):
    assert 80 <= card.target <= 120 and 80 <= card.sms <= 170
    assert 6e6 < card.l2_bytes < 140e6 and card.l2_bytes % 1024 == 0
    assert 0.9e12 <= card.bandwidth <= 8e12
    assert 24e9 <= card.memory_bytes <= 180e9
    assert 10 < card.memory_bytes / card.bandwidth * 1e3 < 50  # ms to read the whole memory once, on any card of today
    assert "whitepaper" in card.source or "datasheet" in card.source


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_flops_are_dense_with_fp32_sums(card):
    per_sm_and_clock, gigahertz = RATES[card.name]
    assert card.fp16_flops == pytest.approx(card.sms * per_sm_and_clock * gigahertz * 1e9, rel=0.01)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_program_gets_the_shared_memory_of_an_sm_less_one_kilobyte(card):
    per_program, per_sm = SHARED_KB[card.target]
    assert card.shared_bytes == per_program * 1024 == (per_sm - 1) * 1024
    assert card.dependent_launch == (card.target >= 90)


def test_the_h200_is_the_one_that_was_measured():
    machine, card = records.load("dense", "h200")["settings"]["machine"], CARDS["H200"]
    assert (machine["name"], machine["sms"], machine["l2_bytes"]) == ("NVIDIA H200", card.sms, card.l2_bytes)
    reads = [row for row in records.load("dense", "h200")["rows"] if row["arm"] == "streaming read"]
    fastest = max(row["kv_bytes"] / row["microseconds"] * 1e6 for row in reads)
    assert 0.8 * card.bandwidth < fastest <= card.bandwidth  # a read from memory, and none faster than the datasheet


def test_facts_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CARDS["H200"].sms = 1
