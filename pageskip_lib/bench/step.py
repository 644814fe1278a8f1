"""The skipping path: the sparse kernel alone, and the whole step with selection inside, against dense attention."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch

from .. import bounds8, decode, merge, scores, selection, sparse
from ..decode import DecodeStep, break_even
from ..dense import decode_workspace, dense_decode
from ..merge import Workspace
from ..runtime import card, default_device
from ..scores import page_scores
from ..selection import Budget, PageList, select_pages
from ..sparse import sparse_decode
from ..summaries import entry_bytes
from . import room
from .ceilings import READ, read_once
from .dense import DTYPES, HEADS, REPEATS, kv_bytes, make_sets, point_name, views
from .peers import OURS, arms, flashinfer_over, versions
from .timing import copies_to_outgrow, kernel_names, rotation_said, sm_clock, time_arms

PAGE, BUDGET = 64, Budget(pages=32)
SHAPES = {
    "cuda": [(batch, tokens) for batch in (1, 8, 32) for tokens in (1024, 4096, 8192, 16384, 65536, 131072)],
    "cpu": [(1, 4096), (1, 16384), (1, 65536)],
}
FLASHINFER_SCRATCH = 64 << 20  # bytes, for each set of inputs
SPARE = 128  # of the context's tokens a measurement starts with so many fewer: every replay of the step appends one
STEP, PLAIN, SPARSE = "pageskip step", "plain step", "pageskip sparse"
KNOWN = "dense by lengths"  # exact attention that learns the lengths where the step does, on the device


def step_bytes(batch, tokens, heads, itemsize, kind="minmax8", budget=BUDGET, page_size=PAGE):
    """What a step that selects must read: the summaries of every page, and the listed pages of keys and values."""
    _, kv_heads, dim = heads
    pages = -(-tokens // page_size)
    listed = min(budget.pages, pages) * page_size
    channels = 4 * dim if kind == "minmax8" else 0
    return batch * kv_heads * (pages * entry_bytes(kind, dim, itemsize) + channels + 2 * dim * itemsize * min(listed, tokens))


def make_step(q, kv, lengths, kind):
    """A ``DecodeStep`` over one set of inputs, with a query and a token to append already in place."""
    k, v = views(kv, tokens_first=False)
    step = DecodeStep(k, v, lengths.clone(), BUDGET, heads=q.shape[1], page_size=PAGE, kind=kind)
    step.q.copy_(q)
    step.k_new.copy_(k[:, :, 0])
    step.v_new.copy_(v[:, :, 0])
    return step


def random_pages(batch, kv_heads, tokens, device, seed):
    """The budget's number of pages for each KV head, drawn at random without repeats: a ``PageList`` to time, not to answer with."""
    noise = torch.rand(batch, kv_heads, tokens // PAGE, generator=torch.Generator().manual_seed(seed))
    pages = noise.topk(min(BUDGET.pages, tokens // PAGE)).indices.sort().values.to(torch.int32)
    counts = torch.full(pages.shape[:2], pages.shape[2], dtype=torch.int32)
    return PageList(pages=pages.to(device), counts=counts.to(device))


def step_memory(heads, batch, tokens, dtype, device):
    """Bytes that ``measure_step`` takes at most: the rotation's whole caches with both kinds of summaries, and what the plain read reads.

    FlashInfer wants the cache in another order, and gets copies.
    """
    size, touched, dim = kv_bytes(heads, batch, tokens, dtype), step_bytes(batch, tokens, heads, dtype.itemsize), heads[2]
    sets = copies_to_outgrow(card(device).l2_bytes, touched)
    summaries = size * sum(entry_bytes(kind, dim, dtype.itemsize) for kind in ("minmax8", "minmax")) / (2 * PAGE * dim * dtype.itemsize)
    cache = torch.empty(batch, heads[1], tokens, dim, dtype=dtype, device="meta")
    read = touched if tokens > break_even(cache, BUDGET, PAGE, card(device)) + SPARE else size
    copied = size if "FlashInfer" in versions() and device == "cuda" else 0
    return sets * (size + summaries + read + copied)


def sparse_memory(heads, batch, tokens, dtype, device):
    """Bytes that ``measure_sparse`` takes: the rotation's whole caches, what the plain read reads, and FlashInfer's scratch."""
    _, kv_heads, dim = heads
    touched = 2 * batch * kv_heads * min(BUDGET.pages * PAGE, tokens) * dim * dtype.itemsize
    scratch = FLASHINFER_SCRATCH if "FlashInfer" in versions() and device == "cuda" else 0
    return copies_to_outgrow(card(device).l2_bytes, touched) * (kv_bytes(heads, batch, tokens, dtype) + touched + scratch)


def _row(heads, dtype, batch, tokens):
    return dict(
        heads=heads[0], kv_heads=heads[1], head_dim=heads[2], dtype=str(dtype).removeprefix("torch."), batch=batch, tokens=tokens,
        page_size=PAGE, budget_pages=BUDGET.pages,
    )  # fmt: skip


def _ran(call, device):
    return kernel_names(call) if device == "cuda" else []


def measure_step(heads, batch, tokens, dtype, device, progress=lambda: None):
    """Rows of one shape: the whole step, its parts alone, dense decode, SDPA, and a streaming read of the bytes that the step touches."""
    _, kv_heads, dim = heads
    start = torch.full((batch,), max(1, tokens - SPARE), dtype=torch.int32, device=device)
    touched = step_bytes(batch, tokens, heads, dtype.itemsize)
    sets = make_sets(copies_to_outgrow(card(device).l2_bytes, touched), heads, batch, tokens, dtype, device)
    steps = [make_step(q, kv, start, "minmax8") for q, kv in sets]
    plain = [make_step(q, kv, start, "minmax") for q, kv in sets]
    dense = [(q, *views(kv, tokens_first=False)) for q, kv in sets]
    if not steps[0].selects:
        touched = 2 * batch * kv_heads * tokens * dim * dtype.itemsize
    whole = [torch.empty(touched // dtype.itemsize, dtype=dtype, device=device).normal_() for _ in sets]
    out, found, lists = torch.zeros((), device=device), [], []
    for step in steps:
        found.append(page_scores(step.q, step.summary))
        lists.append(select_pages(found[-1], BUDGET, step.lengths, PAGE))
    calls = {READ: [lambda x=x: read_once(x, out) for x in whole], STEP: [step._run for step in steps], PLAIN: [step._run for step in plain]}
    if steps[0].selects:
        calls["score"] = [lambda s=s: page_scores(s.q, s.summary) for s in steps]
        calls["select"] = [lambda s=s, x=x: select_pages(x, BUDGET, s.lengths, PAGE) for s, x in zip(steps, found)]
        calls["attend"] = [
            lambda s=s, p=p: sparse_decode(s.q, s.k, s.v, p, page_size=PAGE, lengths=s.lengths, workspace=s.workspace)
            for s, p in zip(steps, lists)
        ]
        calls["torch.topk"] = [lambda x=x: x.topk(BUDGET.pages) for x in found]  # for comparison: no forced pages, no order, no rule for ties
    for arm in arms(device, dtype):
        if arm.name == OURS:
            spaces = [Workspace(step.q, step.workspace.splits) for step in steps]
            calls[OURS] = [lambda i=i, w=w: dense_decode(*i, workspace=w) for i, w in zip(dense, spaces)]
            first = start + 1  # as many as the step's first replay attends to
            calls[KNOWN] = [lambda i=i, w=w: dense_decode(*i, lengths=first, workspace=w) for i, w in zip(dense, spaces)]
        elif arm.name != "FlexAttention":  # `bench dense` has it; it compiles for a minute at every shape
            calls[arm.name] = arm.calls(dense)

    def rewind():
        for step in (*steps, *plain):
            step.lengths.copy_(start)

    times = time_arms(calls, repeats=REPEATS, before=rewind, progress=progress)
    rewind()
    clock = sm_clock()
    baseline = times.get("SDPA flash") or times["SDPA"]
    return [
        _row(heads, dtype, batch, tokens) | dict(
            arm=name, microseconds=round(time.median, 3), low=round(time.low, 3), high=round(time.high, 3), bytes_touched=touched,
            selects=steps[0].selects, speed_up=round(baseline.median / time.median, 3), sm_mhz=clock, kernels=_ran(calls[name][0], device),
        )
        for name, time in times.items()
    ]  # fmt: skip


@contextmanager
def _launched_late():
    """Every kernel waits for the end of the one before, on every card."""
    late = lambda device: replace(card(device), dependent_launch=False)  # noqa: E731
    with ExitStack() as stack:
        for module in (bounds8, decode, merge, scores, selection, sparse):
            stack.enter_context(mock.patch.object(module, "card", late))
        yield


@contextmanager
def _selected_by_sort():
    """Pages are selected by PyTorch's sort."""
    with mock.patch.object(decode, "select_pages", lambda *given, **options: select_pages(*given, **options | dict(backend="torch"))):
        yield


def measure_changes(heads, batch, tokens, dtype, device, progress=lambda: None):
    """Rows of one shape for the step as it grew: from the plain parts to what ``DecodeStep`` does, one change at a time."""
    start = torch.full((batch,), max(1, tokens - SPARE), dtype=torch.int32, device=device)
    touched = step_bytes(batch, tokens, heads, dtype.itemsize)
    sets = make_sets(copies_to_outgrow(card(device).l2_bytes, touched), heads, batch, tokens, dtype, device)
    plain, coded = ([make_step(q, kv, start, kind) for q, kv in sets] for kind in ("minmax", "minmax8"))

    def under(step, *conditions):
        with ExitStack() as stack:
            for condition in conditions:
                stack.enter_context(condition())
            step._run()

    calls = {
        "plain parts, a sort": [lambda s=s: under(s, _launched_late, _selected_by_sort) for s in plain],
        "+ selection in one launch": [lambda s=s: under(s, _launched_late) for s in plain],
        "+ bounds in 8 bits": [lambda s=s: under(s, _launched_late) for s in coded],
        "+ early launches": [step._run for step in coded],
    }

    def rewind():
        for step in (*plain, *coded):
            step.lengths.copy_(start)

    times = time_arms(calls, repeats=REPEATS, before=rewind, progress=progress)
    return [
        _row(heads, dtype, batch, tokens) | dict(arm=name, microseconds=round(time.median, 3), low=round(time.low, 3), high=round(time.high, 3))
        for name, time in times.items()
    ]


def measure_sparse(heads, batch, tokens, dtype, device, progress=lambda: None):
    """Rows of one shape for the kernel alone: random pages (the same for every KV head), FlashInfer on them, a plain read of their bytes."""
    _, kv_heads, dim = heads
    listed = min(BUDGET.pages * PAGE, tokens)
    touched = 2 * batch * kv_heads * listed * dim * dtype.itemsize
    sets = make_sets(copies_to_outgrow(card(device).l2_bytes, touched), heads, batch, tokens, dtype, device)
    lists = []
    for seed in range(len(sets)):
        one = random_pages(batch, 1, tokens, device, seed)
        lists.append(PageList(one.pages.repeat(1, kv_heads, 1), one.counts.repeat(1, kv_heads)))
    whole, out = [torch.randn(touched // dtype.itemsize, dtype=dtype, device=device) for _ in sets], torch.zeros((), device=device)
    spaces = [decode_workspace(q, kv[0]) for q, kv in sets]
    calls = {
        READ: [lambda x=x: read_once(x, out) for x in whole],
        SPARSE: [
            lambda q=q, kv=kv, p=p, w=w: sparse_decode(q, *views(kv, tokens_first=True), p, page_size=PAGE, workspace=w)
            for (q, kv), p, w in zip(sets, lists, spaces)
        ],
    }
    if device == "cuda" and "FlashInfer" in versions():
        paged = [(q, *views(kv, tokens_first=True)) for q, kv in sets]
        calls["FlashInfer paged"] = [flashinfer_over(p.pages[:, 0], [one], scratch=FLASHINFER_SCRATCH)[0] for p, one in zip(lists, paged)]
    times = time_arms(calls, repeats=REPEATS, progress=progress)
    clock = sm_clock()
    return [
        _row(heads, dtype, batch, tokens) | dict(
            arm=name, microseconds=round(time.median, 3), low=round(time.low, 3), high=round(time.high, 3), bytes_touched=touched,
            share_of_read=round(times[READ].median / time.median, 4), sm_mhz=clock, kernels=_ran(calls[name][0], device),
        )
        for name, time in times.items()
    ]  # fmt: skip


def _run(measure, memory, heads, shapes, progress, timed):
    device = default_device()
    dtype, rows = DTYPES[device][0], []
    every = [(shape, *size, dtype, device) for shape in heads or HEADS for size in shapes or SHAPES[device]]
    todo, left_out = room.split(every, lambda point: memory(*point), lambda point: point_name(dtype, *point[:3]))
    for point in todo:
        rows += measure(*point, progress)
        if device == "cuda":
            torch.cuda.empty_cache()
    graph = ", in one CUDA graph" if device == "cuda" else ", eager, wall clock"
    method = f"{timed}; median of {REPEATS}, arms interleaved, {rotation_said(device)}, random keys{graph}"
    return rows, dict(method=method, left_out=left_out)


def run_sparse(*, heads=None, shapes=None, progress=lambda: None):
    """Measure the sparse kernel alone at every shape. Returns (rows, settings); a row as ``measure_sparse`` makes it."""
    return _run(measure_sparse, sparse_memory, heads, shapes, progress, "the attention over a given page list")


def run_step(*, heads=None, shapes=None, progress=lambda: None):
    """Measure the whole step at every shape. Returns (rows, settings).

    A row: heads, kv_heads, head_dim, dtype, batch, tokens, page_size, budget_pages, arm, microseconds with low and high quartile,
    bytes_touched (by the step), speed_up (over SDPA's flash backend in the same run), sm_mhz, kernels (what ran on a GPU). Each step appends
    a token, so the lengths grow during a measurement and are put back before the next. The rotation outgrows L2 by what a whole step
    touches; "score", "select" and "torch.topk" alone touch little of it, and may find that in L2 from one replay to the next.
    """
    timed = "append, score, select and attend (score, select and torch.topk by themselves may find their inputs in L2)"
    return _run(measure_step, step_memory, heads, shapes, progress, timed)


def run_changes(*, heads=None, shapes=None, progress=lambda: None):
    """Measure the step after each of the changes that made it fast. Returns (rows, settings); a row as ``measure_changes`` makes it.

    Raises ``NotHere`` without a CUDA GPU.
    """
    if default_device() == "cpu":
        raise room.NotHere("changes need a CUDA GPU: they are in the kernels and in how those are launched, and a CPU runs none of that.")
    longest = [shape for shape in SHAPES[default_device()] if shape[1] == 65536]
    return _run(measure_changes, step_memory, heads or HEADS[:1], shapes or longest, progress, "append, score, select and attend")


def changes_table(rows):
    """One line a shape and version."""
    return "\n".join(f"{row['batch']:>4} x {row['tokens']:<8,}{row['arm']:<28}{row['microseconds']:>8.1f} us" for row in rows)


def table(rows):
    """One line a shape, a column an arm; then the MB that are touched, a plain read's time over ours, and of a step its speed-up over each
    exact attention."""
    ours = STEP if any(row["arm"] == STEP for row in rows) else SPARSE
    names, lines = list(dict.fromkeys(row["arm"] for row in rows)), []
    exact = [name for name in names if name == OURS or "SDPA" in name or name in ("FlashInfer", "FA3")] if ours == STEP else []
    for heads in dict.fromkeys((row["heads"], row["kv_heads"], row["head_dim"], row["dtype"]) for row in rows):
        block = [row for row in rows if (row["heads"], row["kv_heads"], row["head_dim"], row["dtype"]) == heads]
        lines.append(f"Hq={heads[0]} Hkv={heads[1]} D={heads[2]} {heads[3]}, page {PAGE}, {BUDGET.pages} pages, microseconds; speed-up over exact attention")
        head = "".join(f"{name:>17}" for name in names) + f"{'MB':>9}{'read/ours':>11}" + "".join(f"{'over ' + name.split()[-1]:>13}" for name in exact)
        lines.append(f"{'B x T':>12}{head}")
        for batch, tokens in dict.fromkeys((row["batch"], row["tokens"]) for row in block):
            took = {row["arm"]: row for row in block if (row["batch"], row["tokens"]) == (batch, tokens)}
            us = {name: row["microseconds"] for name, row in took.items()}
            cells = "".join(f"{us[name]:>17.1f}" if name in us else f"{'-':>17}" for name in names)
            cells += f"{took[ours]['bytes_touched'] / 1e6:>9.1f}{us[READ] / us[ours]:>11.2f}"
            cells += "".join(f"{us[name] / us[ours]:>12.2f}x" if name in us else f"{'-':>13}" for name in exact)
            lines.append(f"{f'{batch} x {tokens}':>12}{cells}")
    return "\n".join(lines)
