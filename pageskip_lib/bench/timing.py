"""One timing harness: CUDA graphs over rotated inputs, interleaved arms, medians.

A short kernel timed in a Python loop measures Python, and one timed on the same inputs again and again measures the L2
cache. So the calls of an arm, each on inputs of its own, are captured in one CUDA graph, and all inputs together are
larger than L2 several times over: every call finds a cold cache. Arms take turns, so that a change of clocks meets all of them.
"""

import itertools
import statistics
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over repeats, and the quartiles around it."""

    median: float
    low: float
    high: float


def copies_to_outgrow(l2_bytes, bytes_per_call, *, times=3, least=3, most=256):
    """How many sets of inputs make the rotation larger than ``times`` the L2 cache."""
    return max(least, min(most, -(-times * l2_bytes // max(bytes_per_call, 1))))


def rotation_said(device):
    """How inputs take turns, for a record's method: the card of a CPU tells no cache size, so there the rotation is of the least length."""
    return "rotated past 3x L2" if device == "cuda" else "3 sets in turn, which the CPU's cache may hold"


def captured(calls):
    """All calls, one after another, in one CUDA graph; each is run once before, which compiles what there is to compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _gpu_seconds(graph, replays):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def time_arms(arms, *, repeats=12, seconds_each=0.004, before=None, progress=None):
    """Time several ways to do the same thing. arms: {name: list of zero-argument calls on rotated inputs}; returns {name: Timing}.

    With a CUDA GPU every arm becomes one graph, replayed so often that a measurement lasts ``seconds_each`` (launch gaps between
    graphs vanish in it). Without one, the calls run eagerly on the CPU and the wall clock counts; as many of them as last ``seconds_each``,
    each measurement going on where the one before it stopped, so that no input comes round again before all the others have had their turn.
    before: called ahead of each measurement, untimed, to put back what the calls change. progress: called after each measurement.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        runs = {name: captured(calls) for name, calls in arms.items()}
        measure = _gpu_seconds
    else:
        runs = {name: itertools.cycle(calls) for name, calls in arms.items()}
        measure = _cpu_seconds
    at_once = {name: len(calls) if cuda else 1 for name, calls in arms.items()}
    once = {name: min(measure(run, 1) for _ in range(3)) for name, run in runs.items()}
    replays = {name: max(1, round(seconds_each / max(seconds, 1e-7))) for name, seconds in once.items()}
    samples = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in runs.items():
            if before:
                before()
            per_call = measure(run, replays[name]) / replays[name] / at_once[name]
            samples[name].append(per_call * 1e6)
            if progress:
                progress()
    return {name: summary(values) for name, values in samples.items()}


def _cpu_seconds(calls, count):
    start = time.perf_counter()
    for call in itertools.islice(calls, count):
        call()
    return time.perf_counter() - start


def summary(values):
    """Median and quartiles of a list of measurements."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median=median, low=low, high=high)


def sm_clock():
    """The GPU's SM clock now, in MHz; None without a GPU, or without the package (nvidia-ml-py) that can read it."""
    if not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.clock_rate()
    except (ModuleNotFoundError, RuntimeError):
        return None


def kernel_names(call):
    """What a call really runs: the names of its GPU kernels without template arguments, or its most expensive operator on a CPU."""
    activity = torch.profiler.ProfilerActivity
    cuda = torch.cuda.is_available()
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profile:
        call()
        if cuda:
            torch.cuda.synchronize()
    if not cuda:
        return [max(profile.key_averages(), key=lambda event: event.self_cpu_time_total).key]
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return list(dict.fromkeys(name.split("<")[0].removeprefix("void ") for name in names))
