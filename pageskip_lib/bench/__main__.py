"""Command line: ``python -m pageskip_lib.bench dense``."""

import argparse
import json
from datetime import date
from pathlib import Path

from tqdm import tqdm

from .. import runtime
from .dense import SHAPES, arms_for, run_dense, table

RECORDED = Path(__file__).resolve().parent.parent.parent / "data" / "recorded"


def main(arguments=None):
    top = argparse.ArgumentParser(prog="python -m pageskip_lib.bench", description="How fast, on this machine?")
    commands = top.add_subparsers(dest="command", required=True)
    dense = commands.add_parser("dense", help="exact decode against its peers and the machine's read rate, in microseconds")
    dense.add_argument("--record", metavar="NAME", help="write data/recorded/dense_NAME.json")
    options = top.parse_args(arguments)

    device = runtime.default_device()
    with tqdm(total=len(SHAPES[device]) * (len(arms_for(device)) + 1) * 12, unit="measurement") as bar:
        rows, settings = run_dense(progress=bar.update)
    settings |= dict(machine=runtime.machine().as_dict(), date=date.today().isoformat())
    print(table(rows))
    print(f"{runtime.machine()}; {settings['dtype']}, Hq={settings['heads']}, Hkv={settings['kv_heads']}, D={settings['head_dim']}; {settings['method']}")
    if options.record:
        RECORDED.mkdir(parents=True, exist_ok=True)
        (RECORDED / f"dense_{options.record}.json").write_text(json.dumps(dict(settings=settings, rows=rows), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
