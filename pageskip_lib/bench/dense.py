"""Exact decode against its peers and against the machine's own read rate."""

import torch

from .. import reference
from ..dense import decode_workspace, dense_decode
from ..merge import Workspace
from ..runtime import card, default_device, kernel_problem
from . import room
from .ceilings import READ, fitting, read_once, run_ceilings
from .peers import OURS, arms, versions
from .timing import copies_to_outgrow, kernel_names, rotation_said, sm_clock, time_arms

HEADS = [(12, 2, 128), (32, 8, 128), (9, 3, 64)]  # Hq, Hkv, D: DeepSeek-R1-Distill-Qwen-1.5B, Llama-3-8B, SmolLM2-135M
DTYPES = {"cuda": [torch.float16, torch.bfloat16], "cpu": [torch.float32]}
SHAPES = {
    "cuda": [(batch, tokens) for batch in (1, 8, 32) for tokens in (1024, 4096, 16384, 65536, 131072)],
    "cpu": [(1, 1024), (1, 8192), (4, 8192)],
}
REPEATS = 12


def views(kv, tokens_first):
    """k and v [B, Hkv, T, D] out of one buffer kv [2, B, Hkv, T, D]; with ``tokens_first`` its memory is taken as [2, B, T, Hkv, D]."""
    if tokens_first:
        two, batch, kv_heads, tokens, dim = kv.shape
        kv = kv.view(two, batch, tokens, kv_heads, dim).transpose(2, 3)
    return kv[0], kv[1]


def make_sets(count, heads, batch, tokens, dtype, device):
    """``count`` random inputs of one shape: [(q [B, Hq, D], kv [2, B, Hkv, T, D]), ...]."""
    query_heads, kv_heads, dim = heads
    return [
        (
            torch.randn(batch, query_heads, dim, dtype=dtype, device=device),
            torch.randn(2, batch, kv_heads, tokens, dim, dtype=dtype, device=device),
        )
        for _ in range(count)
    ]


def kv_bytes(heads, batch, tokens, dtype):
    """Keys and values of one layer, in bytes."""
    return 2 * batch * heads[1] * tokens * heads[2] * dtype.itemsize


def calls_of(arm, sets):
    """The arm's calls on ``make_sets`` inputs, in the layout it wants."""
    return arm.calls([(q, *views(kv, arm.tokens_first)) for q, kv in sets])


def check_arm(arm, heads, dtype, device):
    """Compare an arm with fp64 on a small awkward shape, before anything is timed; raises RuntimeError when it is wrong."""
    torch.manual_seed(0)
    sets = make_sets(2, heads, 2, 1003, dtype, device)
    for call, (q, kv) in zip(calls_of(arm, sets), sets):
        truth, _ = reference.attention(q, *views(kv, arm.tokens_first))
        error = (call().double().cpu() - truth).abs().max().item()
        # Outputs are averages of about a thousand values of size 1, rounded to dtype once or twice.
        if not error < 4 * torch.finfo(dtype).eps:
            raise RuntimeError(f"{arm.name} is off by {error:.1e} on a small shape, so its time means nothing.")


def shape_row(heads, batch, tokens, dtype):
    """What the rows of one shape have in common."""
    return dict(
        heads=heads[0], kv_heads=heads[1], head_dim=heads[2], dtype=str(dtype).removeprefix("torch."),
        batch=batch, tokens=tokens, kv_bytes=kv_bytes(heads, batch, tokens, dtype),
    )  # fmt: skip


def measure_shape(found, heads, batch, tokens, dtype, device, progress):
    """Rows of one shape: every ``Arm`` of ``found`` and the streaming read, on the same inputs, taking turns."""
    row = shape_row(heads, batch, tokens, dtype)
    sets = make_sets(copies_to_outgrow(card(device).l2_bytes, row["kv_bytes"]), heads, batch, tokens, dtype, device)
    out = torch.zeros((), device=device)
    calls = {READ: [lambda kv=kv: read_once(kv, out) for _, kv in sets]}
    refused = []
    for arm in found:
        try:
            calls[arm.name] = calls_of(arm, sets)
            calls[arm.name][0]()
        except (RuntimeError, ValueError) as error:  # a peer that cannot take this shape; the row says what it said
            calls.pop(arm.name, None)
            refused.append(row | dict(arm=arm.name, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"))
    times = time_arms(calls, repeats=REPEATS, progress=progress)
    clock = sm_clock()
    measured = [
        row | dict(
            arm=name, microseconds=round(time.median, 3), low=round(time.low, 3), high=round(time.high, 3),
            share_of_read=round(times[READ].median / time.median, 4), sm_mhz=clock, kernels=kernel_names(calls[name][0]),
        )
        for name, time in times.items()
    ]  # fmt: skip
    return measured + refused


def points(device, heads=None, dtypes=None, shapes=None):
    """(the points (dtype, heads, batch, tokens) that memory has room for, a sentence for each other)."""
    every = [(dtype, shape, *size) for dtype in dtypes or DTYPES[device] for shape in heads or HEADS for size in shapes or SHAPES[device]]

    def needs(point):
        dtype, shape, batch, tokens = point
        size = kv_bytes(shape, batch, tokens, dtype)
        return copies_to_outgrow(card(device).l2_bytes, size) * size

    return room.split(every, needs, lambda point: point_name(*point))


def point_name(dtype, heads, batch, tokens):
    """A point in words, such as "32 x 131,072, 12/2 heads of 128, float16"."""
    return f"{batch} x {tokens:,}, {heads[0]}/{heads[1]} heads of {heads[2]}, {str(dtype).removeprefix('torch.')}"


def checked_arms(found, heads, dtype, device):
    """(the arms that may be timed, {name of another: why not}): a peer that is wrong or cannot run is not timed; of our own, that is an error."""
    problems = {}
    for arm in found:
        try:
            check_arm(arm, heads, dtype, device)
        except RuntimeError as error:
            if arm.name == OURS:
                raise
            problems[arm.name] = str(error).splitlines()[0][:200]
    return [arm for arm in found if arm.name not in problems], problems


def run_dense(*, heads=None, dtypes=None, shapes=None, progress=lambda: None):
    """Measure every arm and the streaming read at every shape. Returns (rows, settings).

    A row: heads, kv_heads, head_dim, dtype, batch, tokens, kv_bytes (read by a call), arm, microseconds (median) with low and high
    quartile, share_of_read (the streaming read's time over the arm's), sm_mhz (clock just after), kernels (what ran); or error instead
    of a time. Inputs rotate over more than three times the L2 cache, and all calls of an arm are one CUDA graph.
    """
    device = default_device()
    problem = kernel_problem(device) if device == "cuda" else None
    if problem:
        raise RuntimeError(problem)
    rows, (todo, left_out) = [], points(device, heads, dtypes, shapes)
    for dtype, shape in dict.fromkeys(point[:2] for point in todo):
        found, problems = checked_arms(arms(device, dtype), shape, dtype, device)
        for batch, tokens in (point[2:] for point in todo if point[:2] == (dtype, shape)):
            rows += measure_shape(found, shape, batch, tokens, dtype, device, progress)
            rows += [shape_row(shape, batch, tokens, dtype) | dict(arm=name, error=problem) for name, problem in problems.items()]
            if device == "cuda":
                torch.cuda.empty_cache()
    ceilings, _ = run_ceilings(sizes=fitting(device)[0][-1:])  # the largest that there is room for
    return rows, dict(
        peers=versions(), left_out=left_out,
        ceilings_gb_per_s={row["arm"]: round(row["gb_per_s"], 1) for row in ceilings},
        method=f"median of {REPEATS} measurements, arms interleaved, inputs {rotation_said(device)}, outputs checked against fp64"
        + (", all calls of an arm in one CUDA graph" if device == "cuda" else ", eager, wall clock"),
    )  # fmt: skip


SPLIT_SHAPES = [(1, 65536), (8, 16384), (32, 4096), (1, 4096)]


def run_splits(*, shapes=None, progress=lambda: None):
    """Time dense_decode with 1, 2, 4, ... splits and with the library's own choice. Returns (rows, settings).

    A row: batch, tokens, splits, chosen (is it the library's choice?), microseconds, low, high. Cold, as ``run_dense`` measures.
    Raises ``NotHere`` without a CUDA GPU.
    """
    device = default_device()
    if device == "cpu":
        raise room.NotHere("splits need a CUDA GPU: on a CPU PyTorch computes exact attention in one piece, whatever the number of splits.")
    heads, dtype, rows = HEADS[0], DTYPES[device][0], []
    for batch, tokens in shapes or SPLIT_SHAPES:
        count = copies_to_outgrow(card(device).l2_bytes, kv_bytes(heads, batch, tokens, dtype))
        sets = make_sets(count, heads, batch, tokens, dtype, device)
        inputs = [(q, *views(kv, tokens_first=False)) for q, kv in sets]
        chosen = decode_workspace(*inputs[0][:2]).splits
        calls = {}
        for splits in sorted({chosen} | {2**power for power in range(9) if 2**power * 128 <= tokens}):
            workspace = Workspace(inputs[0][0], splits)
            calls[splits] = [
                lambda q=q, k=k, v=v, workspace=workspace, splits=splits: dense_decode(q, k, v, splits=splits, workspace=workspace)
                for q, k, v in inputs
            ]
        for splits, time in time_arms(calls, progress=progress).items():
            rows.append(dict(batch=batch, tokens=tokens, splits=splits, chosen=splits == chosen, microseconds=time.median, low=time.low, high=time.high))
    settings = dict(heads=heads[0], kv_heads=heads[1], head_dim=heads[2], dtype=str(dtype).removeprefix("torch."))
    return rows, settings | dict(method="median of 12, arms interleaved, rotated past 3x L2, in CUDA graphs")


def splits_table(rows):
    """One line a number of splits."""
    lines = [f"{'B x T':>12}{'splits':>8}{'us':>10}"]
    for row in rows:
        shape, chosen = f"{row['batch']} x {row['tokens']}", "  the library's choice" if row["chosen"] else ""
        lines.append(f"{shape:>12}{row['splits']:>8}{row['microseconds']:>10.1f}{chosen}")
    return "\n".join(lines)


def measurements(heads=None, dtypes=None, shapes=None):
    """How many times ``run_dense`` calls its progress function."""
    device = default_device()
    return REPEATS * sum(len(arms(device, point[0])) + 1 for point in points(device, heads, dtypes, shapes)[0])


def table(rows):
    """One block for each head shape and dtype: a line a shape, microseconds of each arm, best peer over ours, read over ours."""
    lines = []
    for heads, dtype in dict.fromkeys(((row["heads"], row["kv_heads"], row["head_dim"]), row["dtype"]) for row in rows):
        block = [row for row in rows if (row["heads"], row["dtype"]) == (heads[0], dtype)]
        names = list(dict.fromkeys(row["arm"] for row in block))
        lines.append(f"Hq={heads[0]} Hkv={heads[1]} D={heads[2]} {dtype}")
        lines.append(f"{'B x T':>12}{'KV MB':>9}" + "".join(f"{name:>16}" for name in names) + f"{'best peer/ours':>16}{'read/ours':>11}")
        for batch, tokens in dict.fromkeys((row["batch"], row["tokens"]) for row in block):
            took = {row["arm"]: row.get("microseconds") for row in block if (row["batch"], row["tokens"]) == (batch, tokens)}
            kv_bytes = next(row["kv_bytes"] for row in block if (row["batch"], row["tokens"]) == (batch, tokens))
            best = min((took[name] for name in names if name not in (OURS, READ) and took[name]), default=float("nan"))
            lines.append(
                f"{f'{batch} x {tokens}':>12}{kv_bytes / 1e6:>9.1f}" + "".join(f"{took[name]:>16.1f}" if took[name] else f"{'-':>16}" for name in names)
                + f"{best / took[OURS]:>16.3f}{took[READ] / took[OURS]:>11.3f}"
            )  # fmt: skip
    return "\n".join(lines)
