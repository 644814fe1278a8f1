"""Draws the README's figures from the recorded runs: python tools/readme_figure.py"""

from pathlib import Path

from pageskip_lib import figures
from pageskip_lib.bench import records
from pageskip_lib.controls import png

DOCS = Path(__file__).resolve().parent.parent / "docs"


def _rows(name, what):
    run = records.load(name, "h200")
    rows = [row for row in run["rows"] if (row["heads"], row["dtype"]) == (12, "float16")]
    return rows, figures.recorded_on(run["settings"]["machine"], run["settings"]["date"], f"fp16, Hq=12, Hkv=2, D=128, {what}")


def dense():
    return figures.dense_shares(*_rows("dense", "cold L2, in CUDA graphs"))


def step():
    return figures.speed_ups(*_rows("step", "32 pages of 64"), tokens=65536)


FIGURES = {DOCS / "dense_h200.png": dense, DOCS / "step_h200.png": step}

if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    for path, draw in FIGURES.items():
        path.write_bytes(png(draw()))
