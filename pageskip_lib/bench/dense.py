"""Exact decode against its peers and against the machine's own read rate."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import reference
from ..dense import dense_decode
from ..runtime import card, default_device, kernel_problem, tl, triton
from .timing import copies_to_outgrow, time_arms

HEADS = (12, 2, 128)  # Hq, Hkv, D of DeepSeek-R1-Distill-Qwen-1.5B
SHAPES = {
    "cuda": [(1, 1024), (1, 8192), (1, 65536), (8, 4096), (8, 65536), (32, 4096), (32, 65536)],
    "cpu": [(1, 1024), (1, 8192), (4, 8192)],
}


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


def sdpa(q, k, v, backend):
    """PyTorch's scaled_dot_product_attention with the group packed, pinned to one backend."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def arms_for(device):
    """{name: function of (q, k, v)} of everything that computes exact decode attention here."""
    arms = {"pageskip dense": dense_decode}
    if device == "cuda":
        arms["SDPA flash"] = lambda q, k, v: sdpa(q, k, v, SDPBackend.FLASH_ATTENTION)
        arms["SDPA cuDNN"] = lambda q, k, v: sdpa(q, k, v, SDPBackend.CUDNN_ATTENTION)
    else:
        arms["SDPA"] = lambda q, k, v: sdpa(q, k, v, SDPBackend.FLASH_ATTENTION)
    return arms


def check_arms(arms, device, dtype):
    """Every arm's output against fp64 on a small awkward shape, before anything is timed; raises on a wrong one."""
    torch.manual_seed(0)
    heads, kv_heads, dim = HEADS
    q = torch.randn(2, heads, dim, dtype=dtype, device=device)
    k, v = (torch.randn(2, kv_heads, 1003, dim, dtype=dtype, device=device) for _ in range(2))
    truth, _ = reference.attention(q, k, v)
    for name, arm in arms.items():
        error = (arm(q, k, v).double().cpu() - truth).abs().max().item()
        # Outputs are averages of about a thousand values of size 1, rounded to dtype once or twice.
        if not error < 4 * torch.finfo(dtype).eps:
            raise RuntimeError(f"{name} is off by {error:.1e} on a small shape, so its time means nothing.")


def run_dense(*, dtype=None, progress=lambda: None):
    """Measure every arm and the streaming read at every shape. Returns (rows, settings).

    A row: batch, tokens, arm, microseconds (median, low and high quartile), kv_bytes (read by the call), share_of_read (the
    streaming read's time over the arm's). Inputs rotate over more than three times the L2 cache, each call in one CUDA graph.
    """
    device = default_device()
    dtype = dtype or (torch.float16 if device == "cuda" else torch.float32)
    problem = kernel_problem(device) if device == "cuda" else None
    if problem:
        raise RuntimeError(problem)
    arms = arms_for(device)
    check_arms(arms, device, dtype)
    heads, kv_heads, dim = HEADS
    rows = []
    for batch, tokens in SHAPES[device]:
        kv_bytes = 2 * batch * kv_heads * tokens * dim * dtype.itemsize
        sets = [
            (
                torch.randn(batch, heads, dim, dtype=dtype, device=device),
                torch.randn(2, batch, kv_heads, tokens, dim, dtype=dtype, device=device),
            )
            for _ in range(copies_to_outgrow(card(device).l2_bytes, kv_bytes))
        ]
        out = torch.zeros((), device=device)
        calls = {"streaming read": [lambda kv=kv: read_once(kv, out) for _, kv in sets]}
        for name, arm in arms.items():
            calls[name] = [lambda q=q, kv=kv, arm=arm: arm(q, kv[0], kv[1]) for q, kv in sets]
        times = time_arms(calls, progress=progress)
        ceiling = times["streaming read"].median
        rows += [
            dict(
                batch=batch, tokens=tokens, arm=name, microseconds=time.median, low=time.low, high=time.high,
                kv_bytes=kv_bytes, share_of_read=ceiling / time.median,
            )
            for name, time in times.items()
        ]  # fmt: skip
    settings = dict(
        heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=str(dtype).removeprefix("torch."),
        method="median of 12 measurements, arms interleaved, inputs rotated over 3x L2 (at least 3 sets)"
        + (", all calls of an arm in one CUDA graph" if device == "cuda" else ", eager, wall clock"),
    )  # fmt: skip
    return rows, settings


def table(rows):
    """One line a shape, one column an arm, microseconds; in brackets the best peer's time over ours."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    shapes = list(dict.fromkeys((row["batch"], row["tokens"]) for row in rows))
    took = {(row["batch"], row["tokens"], row["arm"]): row["microseconds"] for row in rows}
    lines = [f"{'B x T':>12}{'KV MB':>9}" + "".join(f"{arm:>16}" for arm in arms) + f"{'best peer/ours':>16}{'read/ours':>11}"]
    for batch, tokens in shapes:
        kv_bytes = next(row["kv_bytes"] for row in rows if (row["batch"], row["tokens"]) == (batch, tokens))
        ours = took[batch, tokens, "pageskip dense"]
        peers = [took[batch, tokens, arm] for arm in arms if arm not in ("pageskip dense", "streaming read")]
        lines.append(
            f"{f'{batch} x {tokens}':>12}{kv_bytes / 1e6:>9.1f}" + "".join(f"{took[batch, tokens, arm]:>16.1f}" for arm in arms)
            + f"{min(peers) / ours:>16.2f}{took[batch, tokens, 'streaming read'] / ours:>11.2f}"
        )  # fmt: skip
    return "\n".join(lines)
