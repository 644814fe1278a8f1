"""The notebook contract: rules that read a stored notebook and answer with sentences, one a breach.

Tags a cell may carry:
  no-output            the cell prints nothing (a promise; without it a checked cell must store an output)
  nbval-ignore-output  run, not compared        raises-exception  must raise what is stored
  gpu                  stored on a CUDA machine, compared only there
  draw                 default view of a widget, its numbers printed      widget  the control around it
  imports, exercise-setup, exercise, exercise-check                       see test_exercises.py
  long                 up to 30 lines instead of 20
"""
import copy
import re
import statistics
import warnings
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
REQUIRED = {
    "00_start_here", "01_memory_wall", "02_dense_two_stage_kernel", "03_bandwidth_pitfalls", "04_page_bound_and_gemm_identity", "05_sparse_kernel",
    "06_cuda_graphs", "07_recall", "08_needle", "09_living_cache",
}  # fmt: skip
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
TAGS = set(
    "no-output nbval-ignore-output raises-exception gpu draw widget "
    "imports exercise-setup exercise exercise-check long".split()
)
UNCHECKED = {"nbval-ignore-output", "raises-exception"}
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work|tmp)\b|\bC:\\(?!n)")


def read(path):
    """The notebook as stored: nbformat.read would repair ids on the way."""
    return nbformat.v4.reads(path.read_text(encoding="utf-8"))


def tags(cell):
    return set(cell.metadata.get("tags", []))


def code_cells(notebook):
    """(label, cell) for each code cell; the label counts all cells, as JupyterLab's search does."""
    return [(f"cell {i}", cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


def prose(notebook):
    """All markdown, without fenced code, whose comments look like headings."""
    return "\n\n".join(FENCE.sub("", cell.source) for cell in notebook.cells if cell.cell_type == "markdown")


def texts(output):
    """Whatever an output shows as text: pictures are left out."""
    shown = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
    shown += [data for kind, data in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(shown)


def form(notebook):
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing and repeated ids are reported below
        try:
            nbformat.validate(copy.deepcopy(notebook))
        except nbformat.ValidationError as error:
            found.append(f"not a valid notebook: {error.message}")
    if notebook.metadata.get("kernelspec") != KERNELSPEC:
        found.append("the kernelspec is not the plain python3 one")
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) < len(ids):
        found.append("cell ids are missing or repeated")
    for i, cell in enumerate(notebook.cells):
        if tags(cell) - TAGS:
            found.append(f"cell {i}: unknown tags {sorted(tags(cell) - TAGS)}")
    return found


def executed(notebook):
    counts = [cell.execution_count for _, cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        return [f"execution counts are {counts}, not 1 to {len(counts)} in order"]
    return []


def stored_outputs(notebook):
    found = []
    for label, cell in code_cells(notebook):
        visible = any(texts(o).strip() or "image/png" in o.get("data", {}) for o in cell.outputs)
        raised = any(output.output_type == "error" for output in cell.outputs)
        if "no-output" in tags(cell):
            if cell.outputs:
                found.append(f"{label}: tagged no-output, but has an output")
        elif not tags(cell) & UNCHECKED and not visible:
            found.append(f"{label}: no stored output, so nothing is checked (or tag it no-output)")
        if raised and "raises-exception" not in tags(cell):
            found.append(f"{label}: stores an error without the tag raises-exception")
        if not raised and "raises-exception" in tags(cell):
            found.append(f"{label}: tagged raises-exception, but stores no error")
        if any(output.get("name") == "stderr" for output in cell.outputs):
            found.append(f"{label}: stores stderr, which nothing checks")
    return found


def widget_state(notebook):
    found = []
    if set(notebook.metadata) - {"kernelspec", "language_info"}:
        found.append(f"notebook metadata holds {sorted(set(notebook.metadata) - {'kernelspec', 'language_info'})}")
    for i, cell in enumerate(notebook.cells):
        if set(cell.metadata) - {"tags"}:
            found.append(f"cell {i}: metadata holds {sorted(set(cell.metadata) - {'tags'})}")
        if any("jupyter.widget" in kind for output in cell.get("outputs", []) for kind in output.get("data", {})):
            found.append(f"cell {i}: stores a widget")
    return found


def machine_paths(notebook):
    found = []
    for i, cell in enumerate(notebook.cells):
        text = "\n".join([cell.source, *map(texts, cell.get("outputs", []))])
        if match := MACHINE_PATH.search(text):
            found.append(f"cell {i}: holds an absolute path ({text[match.start() : match.start() + 20]!r})")
    return found


def source_rules(notebook):
    found = []
    for label, cell in code_cells(notebook):
        lines = [line.strip() for line in cell.source.splitlines()]
        limit = 30 if "long" in tags(cell) else 20
        if len(lines) > limit:
            found.append(f"{label}: {len(lines)} lines of code, more than {limit}")
        if any(line.startswith(("!", "%pip", "%%bash", "%%sh")) or "pip install" in line for line in lines):
            found.append(f"{label}: runs a shell command or installs something")
        if any(line.endswith(";") and not line.startswith("#") for line in lines):
            found.append(f"{label}: ends a line in ';', which hides an output")
        if "clear_output" in cell.source or "NBVAL_" in cell.source:
            found.append(f"{label}: uses clear_output or an NBVAL_ comment (use a tag)")
        bars = "tqdm" in cell.source or any(re.search(r"\d%\|", texts(output)) for output in cell.outputs)
        if bars and not tags(cell) & UNCHECKED:
            found.append(f"{label}: a progress bar in a checked cell")
    return found


def rhythm(notebook):
    found, view = [], None
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        after_prose = i > 0 and notebook.cells[i - 1].cell_type == "markdown"
        if not after_prose and not tags(cell) & {"draw", "widget", "exercise-check"}:
            found.append(f"cell {i}: no prose right before this code")
        if "draw" in tags(cell):
            view = cell
            printed = any(output.get("name") == "stdout" and output.text.strip() for output in cell.outputs)
            if not printed or tags(cell) & UNCHECKED:
                found.append(f"cell {i}: a default view must print its numbers and be checked")
        if "widget" in tags(cell):
            if "nbval-ignore-output" not in tags(cell):
                found.append(f"cell {i}: a widget needs the tag nbval-ignore-output")
            if view is None:
                found.append(f"cell {i}: a widget without a default view (tag draw) of its own before it")
            view = None
    return found


def parts(notebook):
    found, first, text = [], notebook.cells[0], prose(notebook)
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        found.append("the first cell is not markdown that begins with '# '")
    for words in ("question", "after this notebook"):
        if words not in first.source.lower():
            found.append(f"the first cell does not say {words!r}")
    for heading in ("Summary", "Exercises", "What you can now explain"):
        if not re.search(rf"^#+ {heading}", text, re.MULTILINE):
            found.append(f"no heading {heading!r}")
    if len(re.findall(r"^### Exercise \d", text, re.MULTILINE)) < 2:
        found.append("fewer than two exercises ('### Exercise N')")
    return found


def references(notebook, path, paths):
    """Links to the notebooks before and after, and every local file that the notebook names."""
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)", prose(notebook))]
    local = {target for target in links if target and not re.match(r"\w+:", target)}
    i = paths.index(path)
    found = [
        f"no link to its neighbour {near.name}"
        for near in paths[max(i - 1, 0) : i] + paths[i + 1 : i + 2]
        if near.name not in local
    ]
    found += [f"links to {t}, which does not exist" for t in sorted(local) if not (path.parent / t).exists()]
    for label, cell in code_cells(notebook):
        for name in re.findall(r"[\"'](?:\.\./)?(data/(?!models)[^\"'{}]+)[\"']", cell.source):
            if not (path.parent.parent / name).exists():
                found.append(f"{label}: reads {name}, which does not exist")
    return found


RULES = [form, executed, stored_outputs, widget_state, machine_paths, source_rules, rhythm, parts]


def breaches(notebook):
    return [sentence for rule in RULES for sentence in rule(notebook)]


def test_the_notebooks_are_there():
    missing = REQUIRED - {path.stem for path in PATHS}
    assert not missing, f"notebooks/ lacks {', '.join(sorted(missing))}"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_contract(path):
    notebook = read(path)
    found = breaches(notebook) + references(notebook, path, PATHS)
    if path.stat().st_size > 300_000:
        found.append(f"is {path.stat().st_size // 1000} KB, more than 300")
    if found:
        pytest.fail(f"{path.name}:\n  " + "\n  ".join(found), pytrace=False)


def test_the_median_notebook_is_small():
    median = statistics.median(path.stat().st_size for path in PATHS) if PATHS else 0
    assert median < 60_000, f"the median notebook is {median / 1000:.0f} KB, not under 60"
