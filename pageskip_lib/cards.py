"""A table of cards: what their makers' documents say, for arithmetic and for compile checks on cards that are not here.

``runtime.Card`` is the other one: what the driver reports of the card that is here. Bandwidth and FLOPs below are peaks on paper,
which no kernel reaches; a time computed from them is a floor.
"""

from dataclasses import dataclass

KB = 1024  # caches and shared memory are counted in binary kilobytes, bandwidth and memory on the box in powers of ten


@dataclass(frozen=True)
class CardFacts:
    """One card on paper.

    target: compute capability as Triton wants it (89 is 8.9). sms: streaming multiprocessors. l2_bytes: L2 cache.
    bandwidth: memory, bytes/s. fp16_flops: dense tensor-core FLOP/s, fp16 in and fp32 accumulated (bf16 is the same).
    memory_bytes: the number on the box in units of 10^9, somewhat less than the driver reports. shared_bytes: the most shared
    memory one program can have. dependent_launch: Hopper and newer. source: where the numbers come from, and where sources disagree.
    """

    name: str
    target: int
    sms: int
    l2_bytes: int
    bandwidth: float
    fp16_flops: float
    memory_bytes: float
    shared_bytes: int
    dependent_launch: bool
    source: str

    @property
    def ridge(self):
        """FLOP per byte at which the card's arithmetic and its memory take equally long."""
        return self.fp16_flops / self.bandwidth


SHARED = "shared memory: table of compute capabilities, CUDA C++ Programming Guide"

_ALL = [
    CardFacts(
        "RTX 3090", 86, 82, 6144 * KB, 936e9, 71.2e12, 24e9, 99 * KB, False,
        "NVIDIA GA102 and RTX Blackwell whitepapers; FLOPs are 82 SMs x 512 x 1.695 GHz, half the rate with fp16 accumulation; " + SHARED,
    ),
    CardFacts(
        "RTX 4090", 89, 128, 73728 * KB, 1008e9, 165.2e12, 24e9, 99 * KB, False,
        "NVIDIA Ada and RTX Blackwell whitepapers; FLOPs are 128 SMs x 512 x 2.52 GHz, half the rate with fp16 accumulation; " + SHARED,
    ),
    CardFacts(
        "RTX 5090", 120, 170, 98304 * KB, 1792e9, 209.5e12, 32e9, 99 * KB, True,
        "NVIDIA RTX Blackwell whitepaper; FLOPs are 170 SMs x 512 x 2.407 GHz, a quarter of the 838 that reviews quote (those are "
        "sparse, with fp16 accumulation); L2 is 96 MB on this card, 128 MB on the full chip, and the press mixes them up; " + SHARED,
    ),
    CardFacts(
        "A100", 80, 108, 40960 * KB, 2039e9, 312e12, 80e9, 163 * KB, False,
        "NVIDIA A100 datasheet, 80 GB SXM; the 40 GB card reads 1,555 GB/s; SMs and L2 as deviceQuery prints them; " + SHARED,
    ),
    CardFacts(
        "H100", 90, 132, 51200 * KB, 3.35e12, 989.4e12, 80e9, 227 * KB, True,
        "NVIDIA H100 datasheet, SXM, and Hopper whitepaper; the datasheet's 1,979 TFLOPS are with sparsity, twice the dense rate; " + SHARED,
    ),
    CardFacts(
        "H200", 90, 132, 61440 * KB, 4.8e12, 989.4e12, 141e9, 227 * KB, True,
        "NVIDIA H200 datasheet, SXM; the datasheet names no L2: 60 MB is what the driver reports (data/recorded/dense_h200.json), "
        "though many pages copy the H100's 50; " + SHARED,
    ),
    CardFacts(
        "B200", 100, 148, 129536 * KB, 8e12, 2250e12, 180e9, 227 * KB, True,
        "NVIDIA DGX B200 datasheet divided by 8 (64 TB/s, 1,440 GB; other documents say 7.7 TB/s and 192 GB); dense, half of 4.5 PFLOPS. "
        "No datasheet names SMs or L2: 148 and 126.5 MB are device reports (Chips and Cheese, 2025, agrees), and other pages say anything "
        "from 48 to 128 MB; " + SHARED,
    ),
]  # fmt: skip

CARDS = {card.name: card for card in _ALL}
