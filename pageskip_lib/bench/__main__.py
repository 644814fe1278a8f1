"""Command line: ``python -m pageskip_lib.bench dense``, ``splits``, ``sparse``, ``step``, ``changes``, ``generate``, ``live``, ``serve``,
``launches``, ``ceilings`` or ``pitfalls``."""

import argparse
import sys

from tqdm import tqdm

from .. import runtime
from ..models import ModelUnavailable
from . import ceilings, dense, generate, launches, live, pitfalls, records, serve, step

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


def main(arguments=None):
    top = argparse.ArgumentParser(prog="python -m pageskip_lib.bench", description="How fast, on this machine?")
    commands = top.add_subparsers(dest="command", required=True)
    for name, (text, *_) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--record", metavar="NAME", help=f"write data/recorded/{name}_NAME.json")
    options = top.parse_args(arguments)

    _, run, table, total = COMMANDS[options.command]
    try:
        with tqdm(total=total() if total else None) as bar:
            rows, settings = run(progress=bar.update)
    except ModelUnavailable as error:
        sys.exit(f"pageskip: {error}")
    print(table(rows))
    print(f"{runtime.machine()}; {settings['method']}")
    if options.record:
        path = records.save(records.stamped(rows, settings), options.command, options.record)
        print(f"written to data/recorded/{path.name}")


if __name__ == "__main__":
    main()
