"""Where the time of a step goes that is called from Python.

Rows of what="time": microseconds per step of a loop of calls, by the wall clock. what="timeline": one step in the profiler, event by
event. what="length": from frozen.py.
"""

import re
import time
from contextlib import nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..decode import DecodeStep
from ..dense import decode_workspace, dense_decode
from ..runtime import default_device
from ..scores import page_scores
from ..selection import select_pages
from ..sparse import sparse_decode
from ..summaries import summarize_pages
from . import room
from .dense import DTYPES, HEADS, REPEATS, kv_bytes, make_sets, point_name, views
from .frozen import length_errors, replayed
from .step import BUDGET, PAGE
from .timing import summary

SPARE = 2048  # tokens of room behind the context: every call appends one
PARTS = ("append", "score", "select", "attend")
SETUPS = {
    "cuda": dict(heads=HEADS[0], shapes=[(batch, tokens) for batch in (1, 8, 32) for tokens in (8192, 65536)], timeline=(8, 65536), calls=100),
    "cpu": dict(heads=(4, 2, 64), shapes=[(1, 4096), (1, 16384)], timeline=(1, 4096), calls=20),
}
LAUNCH = re.compile(r"cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")  # the calls by which a CPU hands work to a GPU


class EagerStep:
    """The step as one would write it first: the library's calls, one after another, with nothing kept but cache, summaries and lengths."""

    def __init__(self, k, v, lengths):
        self.k, self.v, self.lengths = k, v, lengths
        self.summary = summarize_pages(k, PAGE, lengths=lengths)

    def append(self, k_new, v_new):
        row, at = torch.arange(len(self.lengths), device=self.k.device), self.lengths.long()
        self.k[row, :, at], self.v[row, :, at] = k_new, v_new
        page, fresh = at // PAGE, (at % PAGE == 0)[:, None, None]
        for bound, fold in ((self.summary.kmin, torch.minimum), (self.summary.kmax, torch.maximum)):
            bound[row, :, page] = torch.where(fresh, k_new, fold(bound[row, :, page], k_new))
        self.lengths += 1

    def __call__(self, q, k_new, v_new, part=nullcontext):
        """One step; part(name) is entered around each of the four parts."""
        with part("append"):
            self.append(k_new, v_new)
        with part("score"):
            scores = page_scores(q, self.summary)
        with part("select"):
            pages = select_pages(scores, BUDGET, self.lengths, PAGE)
        with part("attend"):
            return sparse_decode(q, self.k, self.v, pages, page_size=PAGE, lengths=self.lengths)


def make_steps(heads, batch, tokens, dtype, device):
    """Ways to take one step from ``tokens`` tokens: {arm: (a call, what puts the lengths back)}. "graph" is there on a GPU only."""
    (one,) = make_sets(1, heads, batch, tokens + SPARE, dtype, device)
    q, (k, v) = one[0], views(one[1], tokens_first=False)
    given = (q, k[:, :, 0].clone(), v[:, :, 0].clone())
    full = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    eager, workspace = EagerStep(k, v, full.clone()), decode_workspace(q, k)
    steps = {
        "eager": (lambda **part: eager(*given, **part), lambda: eager.lengths.copy_(full)),
        "dense": (lambda: dense_decode(q, k, v, lengths=full, workspace=workspace), lambda: None),
    }
    if device == "cuda":
        graph = DecodeStep(k, v, full.clone(), BUDGET, heads=heads[0], page_size=PAGE).capture()
        steps["graph"] = (lambda: graph(*given), lambda: graph.set_lengths(full))
    return steps


def wait():
    """Until the GPU, if there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_calls(call, rewind, calls):
    """Microseconds per call of a loop that hands over ``calls`` of them and then waits once: a ``Timing``."""
    samples = []
    for _ in range(REPEATS + 1):
        rewind()
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    return summary(samples[1:])  # the first one compiles


def timeline(call):
    """What one call does, [{name, where ("cpu" or "gpu"), start_us, duration_us}] in order of start, counted from the call's begin.

    On the CPU the parts that the call names, and the calls that launch something; on the GPU whatever ran there.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        for _ in range(3):  # the profiler is slow to start; the last call counts
            wait()
            with record_function("whole call"):
                call()
        wait()
    events, cpu = profiler.events(), torch.autograd.DeviceType.CPU
    begin = max(event.time_range.start for event in events if event.name == "whole call" and event.device_type == cpu)
    kept = []
    for event in events:
        start, on_cpu = event.time_range.start - begin, event.device_type == cpu
        # The profiler repeats the names of parts among the GPU's events; those are not work.
        wanted = event.name in PARTS or LAUNCH.match(event.name) if on_cpu else event.name not in (*PARTS, "whole call")
        if wanted and start >= 0:
            name = event.name.split("<")[0].removeprefix("void ")
            spent = event.time_range.end - event.time_range.start
            kept.append(dict(name=name, where="cpu" if on_cpu else "gpu", start_us=round(start, 2), duration_us=round(spent, 2)))
    return sorted(kept, key=lambda event: event["start_us"])


def run_launches(*, progress=lambda: None):
    """Measure at the sizes of this device, and on a GPU what a graph froze. Returns (rows, settings)."""
    device, rows = default_device(), []
    setup, dtype = SETUPS[device], DTYPES[device][0]
    needs = lambda shape: 1.1 * kv_bytes(setup["heads"], shape[0], shape[1] + SPARE, dtype)  # with two sets of summaries  # noqa: E731
    todo, left_out = room.split(setup["shapes"], needs, lambda shape: point_name(dtype, setup["heads"], *shape))
    for batch, tokens in todo:
        steps = make_steps(setup["heads"], batch, tokens, dtype, device)
        for arm, (call, rewind) in steps.items():
            took = time_calls(call, rewind, setup["calls"])
            fact = dict(what="time", arm=arm, batch=batch, tokens=tokens)
            rows.append(fact | dict(microseconds=round(took.median, 2), low=round(took.low, 2), high=round(took.high, 2)))
            if (batch, tokens) == setup["timeline"]:
                rewind()
                seen = timeline((lambda call=call: call(part=record_function)) if arm == "eager" else call)
                rows.append(fact | dict(what="timeline", events=seen))
            progress()
        del steps
    if device == "cuda":
        rows += length_errors(replayed, setup["heads"], dtype, device)
    heads, kv_heads, dim = setup["heads"]
    settings = dict(
        heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=str(dtype).removeprefix("torch."), page_size=PAGE, budget_pages=BUDGET.pages,
        left_out=left_out,
        method=f"wall clock around {setup['calls']} calls from Python and one wait, median of {REPEATS}; the same inputs again and again (warm), "
        "random keys; timelines under the profiler, which slows the CPU down",
    )  # fmt: skip
    return rows, settings


def table(rows):
    """One line a time, one a timeline (what it holds), one a replayed length."""
    lines = []
    for row in rows:
        start = f"{row['arm']:16}{row['batch']} x {row['tokens']:<8,}"
        if row["what"] == "time":
            lines.append(f"{start}{row['microseconds']:>10.1f} us per step, called from Python")
        elif row["what"] == "timeline":
            lanes = [[event for event in row["events"] if event["where"] == where] for where in ("cpu", "gpu")]
            if not lanes[1]:
                continue  # a CPU hands nothing over
            launches, busy = sum(event["name"] not in PARTS for event in lanes[0]), sum(event["duration_us"] for event in lanes[1])
            lines.append(f"{start}{launches:>10} launches, {len(lanes[1])} pieces of work for the GPU, busy for {busy:.1f} us")
        else:
            lines.append(f"{start}{row['error']:>10.1e} off, captured at {row['captured_at']:,} tokens")
    return "\n".join(lines)
