"""Every number in the notebooks' prose is in a checked output or the code around it, or follows from what stands in ``FOLLOWS``.

A net, not a proof: it finds numbers that nothing shows any more, and cannot tell whether the right thing is said of a number that is shown.
Left out: whole numbers below 10, exercises and hints, questions (their numbers are guesses to choose from), sources, and durations of a notebook.
"""

import re
from math import exp

import nbformat
import pytest
import torch
from test_notebook_contract import FENCE, PATHS, read, tags, texts

from pageskip_lib import Budget, models
from pageskip_lib.bench import generate, records
from pageskip_lib.cards import CARDS
from pageskip_lib.costs import MODELS
from pageskip_lib.decode import break_even
from pageskip_lib.quality.coarse import coarse_bytes
from pageskip_lib.summaries import entry_bytes

WRITTEN = re.compile(r"\d[\d,]*(?:\.\d+)?%?")
NUMBER = re.compile(r"(?<![\w.$^\\{#])" + WRITTEN.pattern + r"(?![\w}])")
LEFT_OUT = re.compile(r"\]\([^)]*\)|`[^`]*`|\$[^$]*\$|arXiv \S+|\([^()]*\b20\d\d\)|^\d+\. |\d+ seconds on two CPU cores", re.MULTILINE)
SMALL, QWEN, LARGE = (MODELS[name] for name in ("SmolLM2-135M", generate.RANDOM, "Llama-3-8B"))


def read_whole(batch):
    """Tokens up to which a step of the 1.5B shape reads everything on the H200."""
    return break_even(torch.empty(batch, QWEN.kv_heads, 1, QWEN.head_dim, dtype=torch.float16), Budget(pages=32), 64, CARDS["H200"])


# Notebook: {as it is written: the value that it is rounded from}. A list: what it is rounded to, and then the value.
FOLLOWS = {
    "00": {"1.8": QWEN.parameters / 1e9, "12": QWEN.heads, "38%": 6 / 16, "131": 130 + 1, "62%": 10 / 16, "93": models.WHEEL_BYTES / 1e6, "2,000": [100, 2048]},
    "01": {"3,400": [100, 3365], "3,600": [100, 3579], "4.8": CARDS["H200"].bandwidth / 1e12},
    "02": {"60%": 1 / 1.6534, "67": 2 * 2 * 65536 * 128 * 2 / 1e6, "130": CARDS["H200"].sms - 2},
    "03": {"24%": 3278 / 2641 - 1, "2%": 0.02},
    "04": {"270": 34830 - 34560, "22,000": [1000, exp(10)], "127": 2**7 - 1, "29": SMALL.layers - 1, "129": -(-2049 // 16)},
    "05": {"127": 2 * 64 - 1, "126": 64 * 2 * 128 * 2 / entry_bytes("minmax8", 128, 2)},
    "06": {"26,000": [1000, read_whole(1)], "3,000": [1000, read_whole(32)]},
    "07": {"71": len({row["label"] for row in records.load("recall", "cpu_transcripts")["rows"]})},
    "08": {"8%": coarse_bytes(4096, 64) / (2 * 4096 * 64 * 2), "18": 2 + 16},
    "09": {
        "2,048": 32 * 64, "121": 4 * SMALL.layers + 1, "4.6": LARGE.kv_bytes() / QWEN.kv_bytes(),
        "26,000": [1000, read_whole(1)], "3,000": [1000, read_whole(32)],
    },
}  # fmt: skip


def value(text):
    number = float(text.rstrip("%").replace(",", ""))
    return number / 100 if text.endswith("%") else number


def rounds_to(shown, text):
    """Is text what shown becomes when it is written with as many decimals?"""
    digits = len(text.rstrip("%").partition(".")[2]) + (2 if text.endswith("%") else 0)
    return abs(shown - value(text)) <= 0.5000001 * 10**-digits


def shown_by(notebook):
    """Numbers of all code and of all outputs that nbval compares; a share that is shown may be written without its %."""
    text = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text += [cell.source] + ([] if "nbval-ignore-output" in tags(cell) else [texts(output) for output in cell.outputs])
    found = WRITTEN.findall("\n".join(text))
    return {value(number) for number in found} | {value(number.rstrip("%")) for number in found}


def written_in(notebook):
    """(cell, number as written) for each number of the prose that is looked at."""
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown" and not re.match(r"### Exercise|<details>", cell.source):
            for sentence in re.split(r"(?<=[.!?:])\s+|\n\n", LEFT_OUT.sub("", FENCE.sub("", cell.source))):
                for number in [] if sentence.endswith("?") else NUMBER.findall(sentence):
                    number = number.rstrip(",")
                    if value(number) >= 10 or not re.fullmatch(r"\d", number):
                        yield i, number


def follows(number, source):
    step, exact = source if isinstance(source, list) else (None, source)
    return round(exact / step) * step == value(number) if step else rounds_to(exact, number)


def unsourced(notebook, table):
    """A sentence for each number that nothing shows or that does not follow, and for each entry of the table that is not written."""
    shown, written = shown_by(notebook), list(written_in(notebook))
    missing = {number for _, number in written if number not in table and not any(rounds_to(known, number) for known in shown)}
    found = [f"cell {i}: nothing shows the {number}" for i, number in written if number in missing]
    for number, source in table.items():
        if number not in {number for _, number in written}:
            found.append(f"the {number} of FOLLOWS is nowhere")
        elif not follows(number, source):
            found.append(f"the {number} does not follow from {source}")
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_numbers_in_prose_are_shown(path):
    found = unsourced(read(path), FOLLOWS.get(path.stem[:2], {}))
    if found:
        pytest.fail(f"{path.stem}: " + "; ".join(found), pytrace=False)


def test_what_is_found_and_what_is_not():
    cell = nbformat.v4.new_code_cell("n = 1182.4")
    cell.outputs = [nbformat.v4.new_output("stream", text="0.853 and 96.2%\n")]
    live = nbformat.v4.new_code_cell("run()", metadata={"tags": ["nbval-ignore-output"]})
    live.outputs = [nbformat.v4.new_output("stream", text="777\n")]
    prose = "It took 1,182 us, 1,183 elsewhere, kept 85% or 84% or 96.2, and 777. Is it 500? In 2 steps (Tang et al., 2024), `99`, $64$."
    notebook = nbformat.v4.new_notebook(cells=[cell, live, nbformat.v4.new_markdown_cell(prose)])
    assert unsourced(notebook, {"84%": 0.836, "1,183": 1184, "55": 55}) == [
        "cell 2: nothing shows the 777", "the 1,183 does not follow from 1184", "the 55 of FOLLOWS is nowhere",
    ]  # fmt: skip
    assert follows("3,400", [100, 3365]) and not follows("3,400", [100, 3349]) and not follows("24%", 0.246)
