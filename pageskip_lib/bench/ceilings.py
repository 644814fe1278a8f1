"""What the memory of this machine can do at best: a streaming read and a copy, at sizes from a few MB to 2 GB."""

import torch

from ..runtime import card, default_device, tl, triton
from . import room
from .timing import copies_to_outgrow, rotation_said, time_arms

SIZES = {"cuda": [2, 4, 8, 17, 34, 67, 134, 268, 537, 1074, 2147], "cpu": [17, 67, 268]}  # MB
READ, COPY = "streaming read", "copy"


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32), axis=0)
    if total == 12345.678:  # never, but the compiler cannot know, so the read stays
        tl.store(out_ptr, total)


def read_once(tensor, out, block=4096):
    """Stream a contiguous tensor through the chip and keep nothing: the ceiling for anything that must read it."""
    if tensor.is_cuda:
        _read_kernel[(triton.cdiv(tensor.numel(), block),)](tensor, out, tensor.numel(), BLOCK=block)
    else:
        tensor.sum()


def fitting(device, sizes=None):
    """(the sizes in MB that memory has room for, a sentence for each other): tensors to rotate, and one more to copy to."""
    needs = lambda size: size * 10**6 * (copies_to_outgrow(card(device).l2_bytes, size * 10**6) + 1)  # noqa: E731
    return room.split(sizes or SIZES[device], needs, lambda size: f"{size:,} MB")


def run_ceilings(*, sizes=None, progress=lambda: None):
    """Measure reads and copies of ``sizes`` MB. Returns (rows, settings).

    A row: arm, bytes (moved by a call: a copy reads and writes each byte), microseconds, low, high, gb_per_s. Cold, in CUDA graphs.
    """
    device = default_device()
    dtype = torch.float16 if device == "cuda" else torch.float32
    rows, (todo, left_out) = [], fitting(device, sizes)
    for size in todo:
        elements = size * 10**6 // dtype.itemsize // 4096 * 4096
        moved = elements * dtype.itemsize
        count = copies_to_outgrow(card(device).l2_bytes, moved)
        tensors = [torch.randn(elements, dtype=dtype, device=device) for _ in range(count)]
        target, out = torch.empty_like(tensors[0]), torch.zeros((), device=device)
        calls = {
            READ: [lambda x=x: read_once(x, out) for x in tensors],
            # From one rotated tensor to the next: neither side is in the cache.
            COPY: [lambda x=x, y=y: y.copy_(x) for x, y in zip(tensors, [*tensors[1:], target])],
        }
        for arm, time in time_arms(calls, progress=progress).items():
            total = moved * (2 if arm == COPY else 1)
            rows.append(
                dict(arm=arm, bytes=total, microseconds=time.median, low=time.low, high=time.high, gb_per_s=total / time.median / 1e3)
            )
        del tensors, target, calls
    method = f"median of 12, arms interleaved, {rotation_said(device)}"
    return rows, dict(dtype=str(dtype).removeprefix("torch."), left_out=left_out, method=method)


def table(rows):
    """One line a size: microseconds and GB/s of each arm."""
    lines = [f"{'MB moved':>10}{'arm':>18}{'us':>10}{'GB/s':>10}"]
    lines += [f"{row['bytes'] / 1e6:>10.1f}{row['arm']:>18}{row['microseconds']:>10.1f}{row['gb_per_s']:>10.0f}" for row in rows]
    return "\n".join(lines)
