"""Command line: ``python -m pageskip_lib.bench dense``, ``splits``, ``sparse``, ``step``, ``changes``, ``generate``, ``live``, ``serve``,
``launches``, ``ceilings`` or ``pitfalls``; ``all`` is all of them."""

import argparse
import signal
import subprocess
import sys
import time

from tqdm import tqdm

from .. import runtime
from ..models import ModelUnavailable
from . import ceilings, dense, generate, launches, live, pitfalls, records, serve, step
from .room import NotHere

# name: what it measures, the function that does, its table, and how many measurements that takes (None: not known before)
COMMANDS = {
    "dense": ("exact decode against its peers and the machine's read rate", dense.run_dense, dense.table, dense.measurements),
    "splits": ("dense decode with 1, 2, 4, ... splits and with the library's choice", dense.run_splits, dense.splits_table, None),
    "sparse": ("the kernel that walks a page list, alone", step.run_sparse, step.table, None),
    "step": ("the whole step, selection included, against dense attention", step.run_step, step.table, None),
    "changes": ("the step after each of the changes that made it fast", step.run_changes, step.changes_table, None),
    "generate": ("a whole model's token step, split into products, attention and the rest", generate.run_generate, generate.table, None),
    "live": ("tokens per second of generate(), plain and inside use_pageskip", live.run_live, live.table, live.measurements),
    "serve": ("tokens per second of continuous batching, plain and inside use_pageskip_serving", serve.run_serve, serve.table, serve.measurements),
    "launches": ("a step called from Python and replayed from a CUDA graph, and what the graph froze", launches.run_launches, launches.table, None),
    "ceilings": ("what the memory can do: a streaming read and a copy", ceilings.run_ceilings, ceilings.table, None),
    "pitfalls": (
        "five ways to time a number that physics forbids, and their honest versions",
        pitfalls.run_pitfalls, pitfalls.table, lambda: len(pitfalls.TRAPS),
    ),
}  # fmt: skip


def run_one(command, name):
    """Measure, print the table, and write the record if it has a name. Ends with a sentence where this machine cannot measure that."""
    _, run, table, total = COMMANDS[command]
    try:
        with tqdm(total=total() if total else None) as bar:
            rows, settings = run(progress=bar.update)
    except (ModelUnavailable, NotHere) as error:
        sys.exit(f"pageskip: {error}")
    left_out = settings.get("left_out", [])
    if not rows:
        sys.exit(f"pageskip: memory has no room for any point; {left_out[0]}.")
    print(table(rows))
    print(f"{runtime.machine()}; {settings['method']}")
    for sentence in left_out:
        print(f"left out: {sentence}")
    if name:
        path = records.save(records.stamped(rows, settings), command, name)
        print(f"written to data/recorded/{path.name}")


def run_alone(command, name):
    """``run_one`` in a process of its own, so that a failure, or a full GPU, costs the others nothing. Returns what went wrong, or None."""
    line = [sys.executable, "-m", "pageskip_lib.bench", command, *(["--record", name] if name else [])]
    said = ""
    with subprocess.Popen(line, stderr=subprocess.PIPE) as child:
        while part := child.stderr.read1():
            sys.stderr.write(part.decode(errors="replace"))
            sys.stderr.flush()
            said = (said + part.decode(errors="replace"))[-4000:]
    if child.returncode < 0:
        return f"it was ended by {signal.Signals(-child.returncode).name}, as a system does that runs out of memory"
    last = said.strip().splitlines()[-1] if said.strip() else "it did not say why"
    return last.removeprefix("pageskip: ") if child.returncode else None


def run_all(name):
    """Every command, one after another; what could not be measured is said at the end. Returns the exit status."""
    problems, begun = {}, time.perf_counter()
    for command, (text, *_) in COMMANDS.items():
        print(f"\n== {command}: {text}", flush=True)
        problem = run_alone(command, name)
        if problem:
            problems[command] = problem
    print(f"\n{len(COMMANDS) - len(problems)} of {len(COMMANDS)} measured in {(time.perf_counter() - begun) / 60:.0f} minutes.")
    for command, problem in problems.items():
        print(f"not measured: {command}; {problem}")
    return 1 if problems else 0


def main(arguments=None):
    top = argparse.ArgumentParser(prog="python -m pageskip_lib.bench", description="How fast, on this machine?")
    commands = top.add_subparsers(dest="command", required=True)
    everything = "all of these, one after another; with --record, your machine then stands beside the H200 in the notebooks"
    for name, text in {**{name: text for name, (text, *_) in COMMANDS.items()}, "all": everything}.items():
        command = commands.add_parser(name, help=text)
        kind = "KIND" if name == "all" else name
        command.add_argument("--record", metavar="NAME", type=records.argument, help=f"write data/recorded/{kind}_NAME.json, in place of one of that name")
    options = top.parse_args(arguments)
    if options.command == "all":
        return run_all(options.record)
    return run_one(options.command, options.record)


if __name__ == "__main__":
    sys.exit(main())
