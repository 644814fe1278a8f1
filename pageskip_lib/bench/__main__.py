"""Command line: ``python -m pageskip_lib.bench dense``."""

import argparse

from tqdm import tqdm

from .. import runtime
from . import records
from .dense import SHAPES, arms_for, run_dense, table


def main(arguments=None):
    top = argparse.ArgumentParser(prog="python -m pageskip_lib.bench", description="How fast, on this machine?")
    commands = top.add_subparsers(dest="command", required=True)
    dense = commands.add_parser("dense", help="exact decode against its peers and the machine's read rate, in microseconds")
    dense.add_argument("--record", metavar="NAME", help="write data/recorded/dense_NAME.json")
    options = top.parse_args(arguments)

    device = runtime.default_device()
    with tqdm(total=len(SHAPES[device]) * (len(arms_for(device)) + 1) * 12, unit="measurement") as bar:
        rows, settings = run_dense(progress=bar.update)
    print(table(rows))
    print(f"{runtime.machine()}; {settings['dtype']}, Hq={settings['heads']}, Hkv={settings['kv_heads']}, D={settings['head_dim']}; {settings['method']}")
    if options.record:
        records.save(records.stamped(rows, settings), "dense", options.record)


if __name__ == "__main__":
    main()
