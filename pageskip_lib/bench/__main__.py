"""Command line: ``python -m pageskip_lib.bench dense``, ``splits``, ``sparse``, ``step``, ``ceilings`` or ``pitfalls``."""

import argparse

from tqdm import tqdm

from .. import runtime
from . import ceilings, dense, pitfalls, records, step


def main(arguments=None):
    top = argparse.ArgumentParser(prog="python -m pageskip_lib.bench", description="How fast, on this machine?")
    commands = top.add_subparsers(dest="command", required=True)
    for name, text in (
        ("dense", "exact decode against its peers and the machine's read rate, in microseconds"),
        ("splits", "dense decode with 1, 2, 4, ... splits and with the library's choice"),
        ("sparse", "the kernel that walks a page list, alone"),
        ("step", "the whole step, selection included, against dense attention"),
        ("ceilings", "what the memory can do: a streaming read and a copy"),
        ("pitfalls", "five ways to time a number that physics forbids, and their honest versions"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--record", metavar="NAME", help=f"write data/recorded/{name}_NAME.json")
    options = top.parse_args(arguments)

    if options.command == "pitfalls":
        with tqdm(total=len(pitfalls.TRAPS), unit="trap") as bar:
            return pitfalls.report(options.record, progress=bar.update)
    if options.command == "dense":
        with tqdm(total=dense.measurements(), unit="measurement") as bar:
            rows, settings = dense.run_dense(progress=bar.update)
        print(dense.table(rows))
    elif options.command in ("sparse", "step"):
        with tqdm(unit="measurement") as bar:
            rows, settings = (step.run_step if options.command == "step" else step.run_sparse)(progress=bar.update)
        print(step.table(rows))
    elif options.command == "splits":
        with tqdm(unit="measurement") as bar:
            rows, settings = dense.run_splits(progress=bar.update)
        for row in rows:
            print(f"{row['batch']:>3} x {row['tokens']:>6,} {row['splits']:>4} splits {row['microseconds']:>9.1f} us{'  chosen' if row['chosen'] else ''}")
    else:
        with tqdm(total=len(ceilings.SIZES[runtime.default_device()]) * 2 * 12, unit="measurement") as bar:
            rows, settings = ceilings.run_ceilings(progress=bar.update)
        print(ceilings.table(rows))
    print(f"{runtime.machine()}; {settings['method']}")
    if options.record:
        path = records.save(records.stamped(rows, settings), options.command, options.record)
        print(f"written to data/recorded/{path.name}")


if __name__ == "__main__":
    main()
