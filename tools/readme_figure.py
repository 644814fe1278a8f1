"""Draws the README's figure from the recorded run: python tools/readme_figure.py"""

from pathlib import Path

from pageskip_lib import figures
from pageskip_lib.bench import records
from pageskip_lib.controls import png

PATH = Path(__file__).resolve().parent.parent / "docs" / "dense_h200.png"


def draw():
    run = records.load("dense", "h200")
    rows = [row for row in run["rows"] if (row["heads"], row["dtype"]) == (12, "float16")]
    what = "fp16, Hq=12, Hkv=2, D=128, cold L2, in CUDA graphs"
    return figures.dense_shares(rows, figures.recorded_on(run["settings"]["machine"], run["settings"]["date"], what))


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_bytes(png(draw()))
