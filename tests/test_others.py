"""A reader's own records: the notebooks show them beside the H200's, and a set with few points, or of another kind of machine, breaks nothing.

The cells are the notebooks' own. Of the cells before them, imports and functions are run, and those that read records.
"""

import ast
import json
from types import SimpleNamespace

import matplotlib.figure
import pytest
import torch
from test_notebook_contract import PATHS, read, tags
from test_widgets import STAND_INS, widgets

from pageskip_lib import Budget, controls, figures, runtime, token_time
from pageskip_lib.bench import records
from pageskip_lib.bench.__main__ import COMMANDS

CARD = dict(device="cuda", name="NVIDIA GeForce RTX 3060", torch="2.13.0+cu130", triton="3.7.1")
SMALL = {  # what a small card would have of each record
    "dense": lambda row: row["batch"] <= 8 and row["tokens"] <= 16384 and row["dtype"] == "float16",
    "splits": lambda row: row["batch"] == 1,
    "pitfalls": lambda row: row["tokens"] <= 1024 or (row["trap"] == "baseline" and row["batch"] == 1),
    "step": lambda row: row["batch"] <= 8 and row["heads"] == 12 and row["tokens"] in (1024, 4096, 65536, 131072),
    "launches": lambda row: row["what"] != "time" or row["batch"] == 1,
    "generate": lambda row: row["batch"] == 1 and row["tokens"] <= 65536,
    "grid": lambda row: row["context"] == 2048 and row["hay"] == "jargon" and row["depth"] > 0,
}
BEFORE = {"01_memory_wall": ("c12", "c32", "c34")}  # cells that the notebook's own figure takes names from


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The folder of records, in which tests may write: the H200's alone."""
    for path in records.RECORDED.glob("*_h200.json"):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    return tmp_path


def save_small(keep=lambda kind, row: SMALL[kind](row), name="mine", **facts):
    """Records of a card that is not here, by leaving out rows of the H200's."""
    for kind in SMALL:
        run = records.load(kind, "h200")
        run["settings"] |= dict(machine=CARD, date="2027-01-02", datasheet_gb_per_s=None, left_out=["32 x 131,072: too large"]) | facts
        records.save(dict(settings=run["settings"], rows=[row for row in run["rows"] if keep(kind, row)]), kind, name)


def own_cells():
    """(notebook's name, its cell that shows other machines)."""
    found = [(path.stem, cell) for path in PATHS for cell in read(path).cells if cell.cell_type == "code" and "\nshow_others(" in cell.source]
    return [pytest.param(name, cell, id=name) for name, cell in found]


def names_before(stem):
    """What the notebook's imports and functions (those without defaults, which may be measured) define, and the cells of BEFORE."""
    namespace = {}
    cells = [cell for cell in read(next(path for path in PATHS if path.stem == stem)).cells if cell.cell_type == "code" and "raises-exception" not in tags(cell)]
    for cell in cells:
        for node in ast.parse(cell.source).body:
            if isinstance(node, ast.Import | ast.ImportFrom) or isinstance(node, ast.FunctionDef) and not (node.args.defaults or node.decorator_list):
                exec(compile(ast.Module([node], []), stem, "exec"), namespace)
    for cell in cells:
        if cell.id in BEFORE.get(stem, ()):
            exec(compile(cell.source, stem, "exec"), namespace)
    return namespace


@pytest.fixture
def shown(monkeypatch):
    """The figures that a cell displays."""
    figures_shown = []
    monkeypatch.setattr(controls, "display", lambda picture: None)
    real = controls.show
    monkeypatch.setattr(controls, "show", lambda figure: figures_shown.append(figure) or real(figure))
    return figures_shown


def test_all_the_notebooks_that_draw_the_records_have_such_a_cell():
    assert [param.id[:2] for param in own_cells()] == ["01", "02", "03", "05", "06", "09"]
    assert all("nbval-ignore-output" in tags(param.values[1]) for param in own_cells())


@pytest.mark.parametrize("stem, cell", own_cells())
def test_a_small_cards_records_are_shown_with_its_name(stem, cell, recorded, shown, capsys):
    namespace = names_before(stem)
    save_small()
    shown.clear(), capsys.readouterr()
    exec(compile(cell.source, stem, "exec"), namespace)
    printed = capsys.readouterr().out
    assert len(shown) == 1 and isinstance(shown[0], matplotlib.figure.Figure)
    assert printed == f"mine (its memory had no room for 1 point): {controls.title_of(shown[0])}\n"
    assert shown[0].get_supxlabel().startswith("Recorded on NVIDIA GeForce RTX 3060 (torch 2.13.0+cu130, Triton 3.7.1), 2027-01-02: ")


@pytest.mark.parametrize("stem, cell", own_cells())
def test_without_another_record_the_cell_says_how_to_make_one(stem, cell, recorded, shown, capsys):
    namespace = names_before(stem)
    shown.clear(), capsys.readouterr()
    exec(compile(cell.source, stem, "exec"), namespace)
    assert not shown and "`python -m pageskip_lib.bench all --record NAME` records yours." in capsys.readouterr().out


@pytest.mark.parametrize("stem, cell", own_cells())
def test_a_record_of_one_row_is_drawn_or_said_to_lack_something(stem, cell, recorded, shown, capsys):
    namespace, seen = names_before(stem), set()
    save_small(lambda kind, row: not (kind in seen or seen.add(kind)))
    shown.clear(), capsys.readouterr()
    exec(compile(cell.source, stem, "exec"), namespace)
    printed = capsys.readouterr().out
    assert len(shown) == 1 or "mine: not drawn, its record has less than this figure needs (" in printed


def test_a_cpus_records_are_shipped_but_for_what_a_cpu_has_not():
    assert [kind for kind in COMMANDS if "cpu" not in records.names(kind)] == ["splits", "changes"]


def small_widget(stem, part):
    """The box of the widget of notebook ``stem`` whose draw function says ``part``, with the records that are there now."""
    draw_cell, cell = next((param.values[1], param.values[2]) for param in widgets() if param.values[0] == stem and part in param.values[1].source)
    namespace = dict(torch=torch, figures=figures, runtime=runtime, explore=controls.explore, show=controls.show) | STAND_INS[stem]()
    if stem.startswith("03"):
        namespace["MACHINES"] = records.machines("pitfalls", "read warm", "read cold")
    exec(compile(draw_cell.source, stem, "exec"), namespace)
    *before, last = cell.source.split("\n\n")
    exec("\n\n".join(before), namespace)
    return eval(last, namespace), namespace


@pytest.mark.parametrize(
    "stem, part, control", [("03_bandwidth_pitfalls", "MACHINES", "machine"), ("06_cuda_graphs", "MACHINES", "machine"),
    ("08_needle", "MACHINES", "machine"), ("09_living_cache", "OWN", "card")],
)  # fmt: skip
def test_widgets_offer_a_second_set_and_draw_it_at_every_value(stem, part, control, recorded):
    save_small()
    box, namespace = small_widget(stem, part)
    chosen, first = box.controls[control], box.picture.value
    offered = [value for _, value in chosen._options_full]
    assert chosen.value == ("H200" if control == "card" else "h200") and offered[-1] == "mine"
    chosen.value = "mine"
    assert "<b>" not in box.finding.value and box.picture.value != first
    figure = namespace["draw"](**{control: "mine"})
    assert ("mine's own records" if control == "card" else "Recorded on NVIDIA GeForce RTX 3060") in figure.get_supxlabel()
    for other in box.controls.values():
        if other is not chosen:
            start = other.value
            for _, value in other._options_full:
                other.value = value
                assert "<b>" not in box.finding.value, f"{other.description} {value}: {box.finding.value}"
            other.value = start


def test_a_cpus_record_has_its_own_contexts_and_no_datasheet(recorded):
    """In notebook 03: the nearest context that was measured, the read that alone was, the best cold read as the limit."""
    save_small(lambda kind, row: kind != "pitfalls" or row["arm"].startswith("read"), name="cpu", machine=CARD | dict(device="cpu", name="a CPU"))
    _, namespace = small_widget("03_bandwidth_pitfalls", "MACHINES")
    figure = namespace["draw"](tokens=10**6, kernel="dense", machine="cpu")
    largest = max(row["tokens"] for row in records.load("pitfalls", "cpu")["rows"] if row["trap"] == "cache")
    assert f"read, 32 x {largest:,}" in figure.get_supxlabel() and "the best cold read" in str([text.get_text() for text in figure.axes[0].get_legend().get_texts()])


def test_prices_come_from_a_record_in_fp16_with_two_models(recorded):
    save_small()
    budget = Budget(pages=32)
    prices, card = token_time.fitted_machines(budget, 64)["mine"]
    assert prices.exact.rate > 0 and card.bandwidth == 1e6 * prices.exact.rate and list(token_time.fitted_machines(budget, 64)) == ["mine"]
    for keep in (
        lambda kind, row: SMALL[kind](row) and not (kind == "generate" and row["weights"] == "trained"),
        lambda kind, row: SMALL[kind](row) and not (kind == "step" and row["batch"] == 8),
    ):
        save_small(keep)
        assert not token_time.fitted_machines(budget, 64)
    for kind in ("generate", "step"):
        save_small()
        run = records.load(kind, "mine")
        records.save(run | dict(rows=[row | dict(dtype="float32") for row in run["rows"]]), kind, "mine")
        assert not token_time.fitted_machines(budget, 64), f"bytes are counted for fp16, {kind} is not"
    save_small()
    (recorded / "step_mine.json").unlink()
    assert not token_time.fitted_machines(budget, 64)


def test_machines_are_those_that_have_the_arms(recorded):
    save_small()
    assert list(records.machines("step")) == ["h200", "mine"] and list(records.others("step")) == ["mine"]
    assert list(records.machines("step", "pageskip step", "score")) == ["h200", "mine"] and not records.machines("step", "FA4")
    save_small(lambda kind, row: row.get("arm") != "score")
    assert list(records.machines("step", "score")) == ["h200"]
    save_small(lambda kind, row: False)
    assert list(records.machines("step")) == ["h200"]


def test_the_name_that_is_shown_is_the_files(recorded):
    save_small(name="a-card_2")
    assert json.loads((recorded / "dense_a-card_2.json").read_text())["settings"]["machine"]["name"] == CARD["name"]
    assert list(records.others("dense")) == ["a-card_2"]
