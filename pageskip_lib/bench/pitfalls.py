"""Five ways to measure a number that physics forbids, each beside its honest version.

Every trap is a function that returns rows: dict(trap, arm, batch, tokens, kv_bytes, ...) with microseconds per call (median of
repeats, low and high its quartiles). kv_bytes is the whole cache handed over; bytes_touched, where known, what the call must read
and write; gb_per_s = bytes_touched over the time. An arm that cannot run, or computes something else, has ``error`` instead of times.
"""

import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from unittest import mock

import torch
from torch.nn.attention import SDPBackend

from .. import runtime
from ..cards import CARDS
from ..dense import dense_decode
from ..scores import page_scores
from ..selection import select_pages
from ..sparse import sparse_decode
from ..summaries import summarize_pages
from . import dense, room
from .ceilings import read_once
from .peers import Arm, each, sdpa
from .step import BUDGET, PAGE, random_pages
from .timing import copies_to_outgrow, summary, time_arms

HEADS = dense.HEADS[0]  # Hq, Hkv, D of DeepSeek-R1-Distill-Qwen-1.5B
UNKNOWN_CACHE = 64 << 20  # what a rotation must outgrow where the system does not say how large the cache is
SHAPES = {
    "cuda": dict(
        cache=[(32, n) for n in (128, 256, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 32768, 65536)],
        launch=[(1, 1024), (1, 8192), (1, 65536), (32, 65536)], sync=[(32, 65536)], bytes=[(8, 65536), (32, 65536)],
        baseline=[(1, 8192), (8, 16384), (8, 65536)],
    ),
    "cpu": dict(
        cache=[(1, n) for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)],
        launch=[(1, 16), (1, 1024), (1, 16384)], sync=[(1, 16384)], bytes=[(1, 65536)], baseline=[(1, 4096)],
    ),
}  # fmt: skip


@lru_cache
def cache_sizes(device):
    """{"L2": bytes} of a GPU, {"L1": ..., "L2": ..., "L3": ...} of a CPU's first core (empty where the system does not say)."""
    if torch.device(device).type == "cuda":
        return {"L2": runtime.card(device).l2_bytes}
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and re.fullmatch(r"\d+K", size):
            found[f"L{level}"] = int(size[:-1]) << 10
    return found


def sets_to_outgrow(device, bytes_per_call):
    """How many sets of inputs a rotation needs to be three times as large as the largest cache."""
    largest = max(cache_sizes(device).values(), default=UNKNOWN_CACHE)
    return copies_to_outgrow(largest, bytes_per_call, most=4096)


def datasheet(name):
    """GB/s of memory that a card's maker states for the device of this name ("NVIDIA H200"), or None for one that cards.py does not list."""
    return next((facts.bandwidth / 1e9 for facts in CARDS.values() if name.endswith(facts.name)), None)


def default_dtype(device):
    return dense.DTYPES[device][0]


def kv_bytes(batch, tokens, dtype):
    """Keys and values of one layer at the benchmark's heads, in bytes."""
    return dense.kv_bytes(HEADS, batch, tokens, dtype)


def sparse_bytes(q, pages, page_size):
    """What a step over a page list touches, in bytes: its full pages of K and V, the list, q in and out out.

    q: [B, Hq, D]. pages: a ``PageList`` whose pages are all full. Partial results between the kernels are left out.
    """
    listed = int(pages.counts.sum()) * page_size * 2 * q.shape[-1] * q.element_size()
    return listed + pages.pages.nbytes + pages.counts.nbytes + 2 * q.nbytes


def length_bytes(q, k, lengths):
    """What dense decode touches when ``lengths`` [B] of the T cached tokens of k [B, Hkv, T, D] are valid, in bytes."""
    token = 2 * k.shape[1] * k.shape[3] * k.element_size()
    return int(lengths.sum()) * token + lengths.nbytes + 2 * q.nbytes


def _sets(batch, tokens, count, device, dtype):
    """count inputs (q [B, Hq, D], kv [2, B, Hkv, T, D]), the same in every run."""
    torch.manual_seed(0)
    return dense.make_sets(count, HEADS, batch, tokens, dtype, device)


def _row(arm, batch, tokens, dtype, timing, touched=None, **more):
    row = dict(arm=arm, batch=batch, tokens=tokens, kv_bytes=kv_bytes(batch, tokens, dtype)) | more
    row |= dict(microseconds=timing.median, low=timing.low, high=timing.high)
    if touched:
        row |= dict(bytes_touched=touched, gb_per_s=touched / timing.median / 1e3)
    return row


def _problem(function):
    """What goes wrong in a call, as one line, or None."""
    try:
        function()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _rows(arms, batch, tokens, dtype, *, timer=time_arms, touched=None, **more):
    """A row for each arm {name: list of calls}; touched: {name: bytes}. An arm that raises gets a row that says so instead."""
    problems = {name: _problem(calls[0]) for name, calls in arms.items()}
    try:
        times = timer({name: calls for name, calls in arms.items() if not problems[name]})
    except RuntimeError:  # it runs, but not inside a graph: find out which
        times = {}
        for name, calls in arms.items():
            problems[name] = problems[name] or _problem(lambda: times.update(timer({name: calls})))  # noqa: B023
    failed = [dict(arm=name, batch=batch, tokens=tokens, error=problem, **more) for name, problem in problems.items() if problem]
    return [_row(name, batch, tokens, dtype, timing, (touched or {}).get(name), **more) for name, timing in times.items()] + failed


def rotation(trap, batch, tokens, device, dtype):
    """How many sets of inputs a trap makes."""
    size = kv_bytes(batch, tokens, dtype)
    if trap == "sync":
        return 1
    if trap == "bytes":  # as many as a rotation over the touched bytes needs, but no more than 8 GB of them on a GPU, 1 GB elsewhere
        most = max(3, (8 << 30 if device == "cuda" else 1 << 30) // size)
        return min(sets_to_outgrow(device, kv_bytes(batch, BUDGET.pages * PAGE, dtype)), most)
    return min(200 if trap == "launch" else 4096, sets_to_outgrow(device, size))


def memory(trap, batch, tokens, device, dtype):
    """Bytes that a trap takes at most."""
    size, group = kv_bytes(batch, tokens, dtype), HEADS[0] // HEADS[1]
    taken = rotation(trap, batch, tokens, device, dtype) * size
    if trap == "sync":
        return 2 * taken  # on a CPU the cache is copied
    if trap == "launch":
        return taken * (1 + 1 / PAGE)  # the summaries of its pages
    if trap == "baseline":
        # Copies for each query head: made before, as many as outgrow the cache; in the call; and in fp32, as the math backend makes them.
        before = sets_to_outgrow(device, group * size) * group * size
        return taken + before + group * size * (1 + 4 // dtype.itemsize)
    return taken


def cache_trap(batch, tokens, device, dtype):
    """Inputs that stay in the cache ("warm": the same again and again) against inputs rotated past it ("cold")."""
    size = kv_bytes(batch, tokens, dtype)
    sets, out = _sets(batch, tokens, rotation("cache", batch, tokens, device, dtype), device, dtype), torch.zeros((), device=device)
    calls = {"read": [lambda kv=kv: read_once(kv, out) for _, kv in sets]}
    if device == "cuda":  # on a CPU exact decode computes longer than it reads, and would show no cliff
        calls["dense"] = [lambda q=q, kv=kv: dense_decode(q, *kv) for q, kv in sets]
    arms = {f"{name} cold": rotated for name, rotated in calls.items()}
    arms |= {f"{name} warm": rotated[:1] * len(rotated) for name, rotated in calls.items()}
    return _rows(arms, batch, tokens, dtype, touched=dict.fromkeys(arms, size), sets=len(sets))


def _time_eager(arms, repeats=12):
    """As ``time_arms``, but every call goes through Python each time: the wall clock around a loop that ends in a synchronisation."""
    if not torch.cuda.is_available():
        return time_arms(arms, repeats=repeats)
    samples = {name: [] for name in arms}
    for _ in range(repeats + 1):
        for name, calls in arms.items():
            passes = -(-100 // len(calls))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(passes):
                for call in calls:
                    call()
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - start) * 1e6 / passes / len(calls))
    return {name: summary(values[1:]) for name, values in samples.items()}  # the first one compiles


def sparse_step(q, k, v, summaries):
    """Score, select, attend: one page-sparse step, as a handful of small kernels."""
    pages = select_pages(page_scores(q, summaries), BUDGET, summaries.lengths, PAGE)
    return sparse_decode(q, k, v, pages, page_size=PAGE)


def launch_trap(batch, tokens, device, dtype):
    """The same small calls from a Python loop ("eager") and, on a GPU, inside one CUDA graph ("graph")."""
    sets = _sets(batch, tokens, rotation("launch", batch, tokens, device, dtype), device, dtype)
    one = torch.zeros(1, device=device)
    summaries = [summarize_pages(kv[0], PAGE) for _, kv in sets]
    arms = {
        "one-element add": [lambda: one.add_(1)] * 100,
        "dense": [lambda q=q, kv=kv: dense_decode(q, *kv) for q, kv in sets],
        "score, select, attend": [lambda q=q, kv=kv, s=s: sparse_step(q, *kv, s) for (q, kv), s in zip(sets, summaries)],
    }
    rows = _rows(arms, batch, tokens, dtype, timer=_time_eager, how="eager", sets=len(sets))
    return rows + (_rows(arms, batch, tokens, dtype, how="graph", sets=len(sets)) if device == "cuda" else [])


def sync_trap(batch, tokens, device, dtype, repeats=12):
    """One asynchronous call and two clocks: stopped when it was handed over ("submitted"), and when it was done ("awaited").

    A CUDA call is asynchronous by itself; on a CPU an executor of one thread makes it so. Then the call that nothing has prepared
    ("first") and the same call afterwards ("later"): the first one compiles on a GPU; on a CPU it copies a cache to new memory.
    """
    ((q, kv),) = _sets(batch, tokens, 1, device, dtype)
    samples = {"submitted": [], "awaited": []}
    with ThreadPoolExecutor(1) as executor:
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            handle = dense_decode(q, *kv) if device == "cuda" else executor.submit(dense_decode, q, *kv)
            samples["submitted"].append((time.perf_counter() - begin) * 1e6)
            torch.cuda.synchronize() if device == "cuda" else handle.result()
            samples["awaited"].append((time.perf_counter() - begin) * 1e6)
    rows = [_row(arm, batch, tokens, dtype, summary(values[1:]), kv.nbytes) for arm, values in samples.items()]
    first, *later = _from_the_first_call(q, kv, repeats)
    touched = kv.nbytes if device == "cuda" else 2 * kv.nbytes
    return rows + [_row(arm, batch, tokens, dtype, summary(values), touched) for arm, values in (("first", [first] * 2), ("later", later))]


def _from_the_first_call(q, kv, repeats):
    """Microseconds of a call that nothing has prepared, and of the same call afterwards."""
    if q.is_cuda:
        alone = q[:, : kv.shape[2]].contiguous()  # one query head for each KV head: a kernel that nothing else here compiles
        call, wait = (lambda: dense_decode(alone, *kv)), torch.cuda.synchronize
    else:
        new = torch.empty_like(kv)  # the system finds its memory page by page, when it is first written
        call, wait = (lambda: new.copy_(kv)), (lambda: None)
    samples = []
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, TRITON_CACHE_DIR=empty):
        for _ in range(repeats + 1):
            wait()
            begin = time.perf_counter()
            call()
            wait()
            samples.append((time.perf_counter() - begin) * 1e6)
    return samples


def bytes_trap(batch, tokens, device, dtype):
    """Few pages, or few valid tokens, of a large cache: kv_bytes is what was allocated, bytes_touched what the call needed."""
    sets = _sets(batch, tokens, rotation("bytes", batch, tokens, device, dtype), device, dtype)
    lists = [random_pages(batch, HEADS[1], tokens, device, seed) for seed in range(len(sets))]
    lengths = torch.full((batch,), BUDGET.pages * PAGE, dtype=torch.int32, device=device)
    arms = {
        "page list": [lambda q=q, kv=kv, pages=pages: sparse_decode(q, *kv, pages, page_size=PAGE) for (q, kv), pages in zip(sets, lists)],
        "short lengths": [lambda q=q, kv=kv: dense_decode(q, *kv, lengths=lengths) for q, kv in sets],
    }
    q, kv = sets[0]
    touched = {"page list": sparse_bytes(q, lists[0], PAGE), "short lengths": length_bytes(q, kv[0], lengths)}
    return _rows(arms, batch, tokens, dtype, touched=touched, sets=len(sets))


def _as_it_is(x):
    return x


def expanded(x):
    """KV heads [B, Hkv, T, D] repeated until each query head has its own, as code without grouped-query attention does it."""
    return x.repeat_interleave(HEADS[0] // HEADS[1], dim=1)


def causal(q, k, v):
    """The flag that looks right: is_causal=True with the one query of a decode step."""
    return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, is_causal=True, enable_gqa=True)[:, :, 0]


def baselines(device):
    """{name: (what happens to k and v before the clock starts, what is timed)}: dense decode, and what it may be compared with."""
    flash, math, cudnn = (
        lambda q, k, v, backend=backend: sdpa(q, k, v, backend)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)
    )
    return {
        "pageskip dense": (_as_it_is, dense_decode),
        "SDPA flash": (_as_it_is, flash),
        **({"SDPA cuDNN": (_as_it_is, cudnn)} if device == "cuda" else {}),
        "SDPA math": (_as_it_is, math),
        "SDPA flash, KV expanded before": (expanded, flash),
        "SDPA flash, KV expanded inside": (_as_it_is, lambda q, k, v: flash(q, expanded(k), expanded(v))),
        "SDPA, is_causal": (_as_it_is, causal),
    }


def baseline_trap(batch, tokens, device, dtype):
    """Dense decode beside baselines, fair and unfair. Each is checked against fp64 first; a wrong one gets its error, and no time."""
    size, rows, arms = kv_bytes(batch, tokens, dtype), [], {}
    sets = _sets(batch, tokens, rotation("baseline", batch, tokens, device, dtype), device, dtype)
    for name, (before, call) in baselines(device).items():
        arm = lambda q, k, v: call(q, before(k), before(v))  # noqa: B023, E731  (used within this turn of the loop)
        if problem := _problem(lambda: dense.check_arm(Arm(name, each(arm)), HEADS, dtype, device)):  # noqa: B023
            rows.append(dict(arm=name, batch=batch, tokens=tokens, error=problem))
            continue
        few = sets_to_outgrow(device, size * (HEADS[0] // HEADS[1] if before is expanded else 1))
        arms[name] = [lambda q=q, k=before(kv[0]), v=before(kv[1]), call=call: call(q, k, v) for q, kv in sets[:few]]
    return _rows(arms, batch, tokens, dtype) + rows


TRAPS = dict(sync=sync_trap, cache=cache_trap, launch=launch_trap, bytes=bytes_trap, baseline=baseline_trap)


def measure(trap, shapes=None):
    """The rows of one trap on this machine. shapes: a list of (batch, tokens); left out, the sizes that are recorded."""
    if trap not in TRAPS:
        raise ValueError(f"trap must be one of {', '.join(TRAPS)}, got {trap!r}.")
    device = runtime.default_device()
    problem = runtime.kernel_problem(device) if device == "cuda" else None
    if problem:
        raise RuntimeError(problem)
    rows = []
    for batch, tokens in shapes or SHAPES[device][trap]:
        rows += [dict(trap=trap) | row for row in TRAPS[trap](batch, tokens, device, default_dtype(device))]
    return rows


def run_pitfalls(*, progress=lambda: None):
    """Every trap on this machine, at the sizes that are recorded. Returns (rows, settings); progress is called after each trap."""
    device, rows, left_out = runtime.default_device(), [], []
    for trap in TRAPS:
        needs = lambda shape, trap=trap: memory(trap, *shape, device, default_dtype(device))  # noqa: E731
        todo, large = room.split(SHAPES[device][trap], needs, lambda shape, trap=trap: f"{trap}, {shape[0]} x {shape[1]:,}")
        rows += measure(trap, todo) if todo else []
        left_out += large
        progress()
    heads, kv_heads, dim = HEADS
    settings = dict(
        heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=str(default_dtype(device)).removeprefix("torch."),
        page_size=PAGE, budget_pages=BUDGET.pages, caches=cache_sizes(device), datasheet_gb_per_s=datasheet(runtime.card(device).name),
        threads=torch.get_num_threads(), left_out=left_out,
        method="medians of 12, arms interleaved; inputs rotated over 3x the largest cache where memory allows (sets: how many), but for the arms called warm"
        + ("; one CUDA graph per arm but for the sync trap and the launch trap's eager arms" if device == "cuda" else ""),
    )  # fmt: skip
    return rows, settings


def pick(rows, **facts):
    """The one row of which all facts hold, such as trap="sync", arm="awaited". Raises ValueError unless there is exactly one."""
    found = [row for row in rows if facts.items() <= row.items()]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows, not one, have {facts}.")
    return found[0]


def table(rows):
    """One line a row: what was timed, the time, the bytes and the rate that they give."""
    lines = [f"{'trap':10}{'arm':34}{'B x T':>12}{'us':>12}{'KV MB':>10}{'touched MB':>12}{'GB/s':>9}"]
    for row in rows:
        name, shape = f"{row['arm']} {row.get('how', '')}", f"{row['batch']} x {row['tokens']}"
        start = f"{row['trap']:10}{name:34}{shape:>12}"
        if "error" in row:
            lines.append(f"{start}  {row['error']}")
        else:
            rate = f"{row['bytes_touched'] / 1e6:>12.1f}{row['gb_per_s']:>9.1f}" if "gb_per_s" in row else ""
            lines.append(f"{start}{row['microseconds']:>12.1f}{row['kv_bytes'] / 1e6:>10.1f}{rate}")
    return "\n".join(lines)
