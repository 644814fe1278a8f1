"""The tools that guard the notebooks can fail: each rule, each sanitizer, refresh, and pytest itself on a notebook."""
import copy
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import notebooks as tool
import pytest
import test_notebook_contract as contract
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns
from test_exercises import faults

ROOT = Path(__file__).resolve().parent.parent
FOLDED = "<details><summary>Answer</summary>\n\n```python\n%s\n```\n\n</details>"
WIDGET = {tool.WIDGET_VIEW: {"model_id": "ab12"}, "text/plain": "IntSlider(value=1)"}


def code(source, *tags, prints=None):
    outputs = [] if prints is None else [new_output("stream", name="stdout", text=prints)]
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {}, outputs=outputs)


def good():
    """A notebook in which the contract finds nothing."""
    cells = [
        new_markdown_cell("# Pages\n\n**The question.** How many?\n\nAfter this notebook you can count them."),
        code("import math", "imports", "no-output"),
        new_markdown_cell("Predict, then run."),
        code("print('pages:', math.ceil(130 / 64))", prints="pages: 3\n"),
        new_markdown_cell("The same for any length."),
        code("print(2)", "draw", prints="2\n"),
        code("slider", "widget", "nbval-ignore-output"),
        new_markdown_cell("## Summary\n\n## Exercises\n\n### Exercise 1\n\n### Exercise 2"),
        new_markdown_cell("## What you can now explain"),
    ]
    notebook = new_notebook(cells=cells, metadata={"kernelspec": dict(contract.KERNELSPEC)})
    for count, (_, cell) in enumerate(contract.code_cells(notebook), start=1):
        cell.execution_count = count
    return notebook


def put(path, value):
    """A change to the good notebook: put("cells.3.outputs", []) and so on."""
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]

    def change(notebook):
        for key in parents:
            notebook = notebook[key]
        notebook[last] = nbformat.from_dict(value)

    return change


def output(kind, **fields):
    return put("cells.3.outputs", [new_output(kind, **fields)])


def source(text):
    return put("cells.3.source", text)


BREACHES = [
    ("not a valid notebook", put("cells.3.cell_type", "prose")),
    ("kernelspec", put("metadata.kernelspec.name", "conda-env")),
    ("ids are missing or repeated", put("cells.3.id", "same"), put("cells.4.id", "same")),
    ("unknown tags", put("cells.3.metadata", {"tags": ["nbval-ignore-outputs"]})),
    ("execution counts", put("cells.3.execution_count", 7)),
    ("execution counts", put("cells.3.execution_count", None)),
    ("no stored output", put("cells.3.outputs", [])),
    ("tagged no-output", put("cells.3.metadata", {"tags": ["no-output"]})),
    ("stores an error", output("error", ename="ValueError", evalue="no", traceback=[])),
    ("stores no error", put("cells.3.metadata", {"tags": ["raises-exception"]})),
    ("stores stderr", output("stream", name="stderr", text="a warning")),
    ("notebook metadata holds ['widgets']", put("metadata.widgets", {"state": {}})),
    ("metadata holds ['execution']", put("cells.3.metadata", {"execution": {}})),
    ("stores a widget", output("display_data", data=WIDGET)),
    ("absolute path", source("open('/home/me/x')")),
    ("absolute path", output("stream", name="stdout", text="saved to /tmp/x")),
    ("absolute path", output("display_data", data={"text/plain": "C:\\Users"})),
    ("lines of code", source("\n".join(["x = 1"] * 21))),
    ("shell command", source("!ls")),
    ("shell command", source("%pip list")),
    ("hides an output", source("plot();")),
    ("clear_output", source("clear_output()")),
    ("NBVAL_", source("# NBVAL_IGNORE_OUTPUT\nprint(1)")),
    ("progress bar", source("for i in tqdm(range(3)): print(i)")),
    ("progress bar", output("stream", name="stdout", text=" 50%|#####     | 1/2")),
    ("no prose", put("cells.2", code("x = 1", "no-output"))),
    ("must print its numbers", put("cells.5.outputs", [])),
    ("must print its numbers", put("cells.5.metadata", {"tags": ["draw", "nbval-ignore-output"]})),
    ("needs the tag nbval-ignore-output", put("cells.6.metadata", {"tags": ["widget"]})),
    ("without a default view", put("cells.5.metadata", {})),
    ("begins with '# '", put("cells.0.source", "Pages: the question. After this notebook")),
    ("'question'", put("cells.0.source", "# Pages\n\nAfter this notebook")),
    ("'after this notebook'", put("cells.0.source", "# Pages\n\nThe question")),
    ("no heading 'Summary'", put("cells.7.source", "## Exercises\n\n### Exercise 1\n\n### Exercise 2")),
    ("no heading 'Exercises'", put("cells.7.source", "## Summary\n\n### Exercise 1\n\n### Exercise 2")),
    ("fewer than two", put("cells.7.source", "## Summary\n\n## Exercises\n\n```\n### Exercise 1\n```\n")),
    ("no heading 'What you", put("cells.8.source", "The end.")),
]


def test_the_contract_accepts_a_good_notebook():
    assert contract.breaches(good()) == []


@pytest.mark.parametrize("sentence, changes", [(first, rest) for first, *rest in BREACHES])
def test_the_contract_names_each_breach(sentence, changes):
    notebook = good()
    for change in changes:
        change(notebook)
    assert sentence in "\n".join(contract.breaches(notebook))


def test_references_need_neighbours_and_files(tmp_path):
    paths = [tmp_path / "notebooks" / name for name in ("00_a.ipynb", "01_b.ipynb", "02_c.ipynb")]
    paths[0].parent.mkdir()
    paths[0].touch()
    notebook = good()
    source("open('../data/gone.json')")(notebook)
    notebook.cells[2].source = "[back](00_a.ipynb), [a file](gone.md), [far](https://example.org)"
    found = contract.references(notebook, paths[1], paths)
    assert found == [
        "no link to its neighbour 02_c.ipynb",
        "links to gone.md, which does not exist",
        "cell 3: reads data/gone.json, which does not exist",
    ]


@pytest.mark.parametrize(
    "stored, new, same",
    [
        ("took ~12.3 s", "took ~9 s", True),
        ("dense  ~9.8 ms   x", "dense ~1,012.5 ms   x", True),  # a padded column
        ("off by ~3.1e-07", "off by ~0", True),
        ("took ~9 s", "took ~9 ms", False),  # the unit is compared
        ("pages 12", "pages 13", False),  # and so is every other number
    ],
)
def test_sanitizer_of_measured_numbers(stored, new, same):
    ((regex, replacement),) = get_sanitize_patterns((ROOT / "tests/nbval_sanitize.cfg").read_text())
    assert (re.sub(regex, replacement, stored) == re.sub(regex, replacement, new)) is same


# ---- the commands, on a small notebook in its own kernel -----------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of notebooks for tools/notebooks.py: 00_small.ipynb, executed by refresh."""
    monkeypatch.setattr(tool, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(tool, "SITE", tmp_path / "site")
    monkeypatch.setattr(tool, "RUNS", tmp_path / "runs")
    notebook = good()
    notebook.cells[2].source = f"[on](01_next.ipynb#part)\n\n{FOLDED % 'def pages(): return 3'}"
    notebook.cells[5].source = "print('took ~1.5 s')"
    notebook.cells[6].source = "import ipywidgets\nipywidgets.interactive(lambda n: print(n), n=(1, 3))"
    notebook.metadata["widgets"] = {"state": {}}
    nbformat.write(notebook, tmp_path / "00_small.ipynb")
    assert tool.main(["refresh"]) == 0
    return tmp_path


def test_refresh_gives_one_normal_form(folder):
    path = folder / "00_small.ipynb"
    first = path.read_text()
    notebook = contract.read(path)
    assert contract.breaches(notebook) == []
    assert notebook.cells[6].outputs == []  # the slider
    assert notebook.metadata.language_info == {"name": "python"}
    assert first.endswith("}\n")
    assert tool.main(["refresh", "00"]) == 0
    assert path.read_text() == first


def test_refresh_keeps_what_a_gpu_measured(folder):
    if tool.has_cuda():
        pytest.skip("a CUDA machine replaces what gpu cells store")
    path = folder / "00_small.ipynb"
    notebook = contract.read(path)
    put("cells.3.metadata", {"tags": ["gpu"]})(notebook)
    put("cells.3.outputs.0.text", "~3 us\n")(notebook)
    nbformat.write(notebook, path)
    tool.refresh(path)
    assert contract.read(path).cells[3].outputs[0].text == "~3 us\n"


def test_refresh_refuses_an_error_in_one_sentence(folder, capsys):
    path = folder / "00_small.ipynb"
    notebook = contract.read(path)
    source("1 / 0")(notebook)
    nbformat.write(notebook, path)
    before = path.read_text()
    assert tool.main(["refresh"]) == 1
    message = "00_small.ipynb: cell 3 raised ZeroDivisionError: division by zero; nothing was written.\n"
    assert capsys.readouterr().err == message
    assert path.read_text() == before
    assert tool.main(["refresh", "07"]) == 1


def test_a_cell_that_never_ends_is_tried_twice_and_named(folder, monkeypatch, capsys):
    path = folder / "00_small.ipynb"
    notebook = contract.read(path)
    source("open('runs.txt', 'a').write('x')\nimport time\ntime.sleep(60)")(notebook)
    nbformat.write(notebook, path)
    monkeypatch.setattr(tool, "CELL_SECONDS", 2)
    assert tool.main(["refresh"]) == 1
    assert capsys.readouterr().err == "00_small.ipynb: a cell ran longer than 2 seconds, twice; nothing was written.\n"
    assert (folder / "runs.txt").read_text() == "xx"


def test_an_expected_error_is_stored_without_this_machines_files(folder):
    path = folder / "00_small.ipynb"
    notebook = contract.read(path)
    source("import json\njson.loads('{')")(notebook)
    put("cells.3.metadata", {"tags": ["raises-exception"]})(notebook)
    nbformat.write(notebook, path)
    tool.refresh(path)
    (error,) = contract.read(path).cells[3].outputs
    assert error.traceback == [f"JSONDecodeError: {error.evalue}"]


def test_pytest_compares_what_it_should(folder):
    """Of altered copies, a lost output and a changed number fail; measured, GPU and stderr text may differ."""
    stored = contract.read(folder / "00_small.ipynb")
    warning = new_output("stream", name="stderr", text="a warning that only one machine gave")
    copies = {
        "same": [],
        "lost": [put("cells.3.outputs", [])],
        "changed": [put("cells.3.outputs.0.text", "pages: 4\n")],
        "measured": [put("cells.5.outputs.0.text", "took ~99 s\n")],
        "warned": [lambda notebook: notebook.cells[5].outputs.append(warning)],
    }
    if not tool.has_cuda():
        gpu = put("cells.3.metadata", {"tags": ["gpu"]})
        copies["gpu"] = [gpu, put("cells.3.outputs.0.text", "pages: 4\n")]
    for name, changes in copies.items():
        notebook = copy.deepcopy(stored)
        for change in changes:
            change(notebook)
        nbformat.write(notebook, folder / f"{name}.ipynb")

    files = [f"{folder}/{name}.ipynb" for name in copies]
    pytest_here = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "conftest", "--color=no"]
    pytest_here += [f"--rootdir={folder}"]
    done = subprocess.run([*pytest_here, *files], cwd=ROOT, capture_output=True, text=True)
    failed = re.findall(r"^FAILED \S*?(\w+)\.ipynb::", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and sorted(failed) == ["changed", "lost"], done.stdout + done.stderr


def test_site_links_pages_and_replaces_widgets(folder, capsys):
    needle = folder / "needle.json"
    needle.write_text(
        '{"settings": {"model": "tiny", "dtype": "float32", "machine": {"name": "a CPU"}, "date": "2026-01-02", "code": "42", "depth": 0.25,'
        ' "context": 7000, "budget_pages": 30, "page_size": 16, "budget": 0.12}, "rows": [{"policy": "full", "answer": "4-2", "right": true,'
        ' "bytes_per_token": 161e6, "needle_page_share": 0.16, "seconds_per_token": 0.05}]}'
    )
    assert tool.main(["site", "--needle", str(needle), "--started", "0"]) == 0
    shown = capsys.readouterr().out
    for text in ("planted 25% into 7,000 tokens", "161.0 MB", "1 notebooks ran in", "Open site/index.html"):
        assert text in shown
    page = (folder / "site/00_small.html").read_text()
    assert 'href="01_next.html#part"' in page and "pages: 3" in page
    assert "Interactive in JupyterLab" in page and "model_id" not in page
    assert re.search(r"<summary>Answer</summary>\s*<div class=.highlight", page)  # still folded
    index = (folder / "site/index.html").read_text()
    for text in ('href="00_small.html">Pages</a>', "The question. How many?", "<td>161.0 MB</td>", "<td>16%</td>"):
        assert text in index


def test_a_run_is_kept_dated_and_becomes_pages(folder):
    assert tool.main(["keep", "card"]) == 0
    kept = nbformat.read(folder / "runs/card/00_small.ipynb", as_version=4)
    assert re.search(r"A kept run.*CPU.*20\d\d-\d\d-\d\d, \d+ s .* no error.*\(\.\./\.\./\.\./notebooks/00_small.ipynb\)", kept.cells[0].source)
    assert tool.code_of(kept) == tool.code_of(contract.read(folder / "00_small.ipynb")) and "pages: 3" in kept.cells[4].outputs[0].text
    assert tool.main(["site"]) == 0
    page, index = (folder / "site/card/00_small.html").read_text(), (folder / "site/index.html").read_text()
    assert 'href="../00_small.html"' in page and "A kept run." in page and "Interactive in JupyterLab" in page
    assert 'href="card/00_small.html">Pages</a>' in index and "no error." in index and "has changed since" not in index

    notebook = contract.read(folder / "00_small.ipynb")
    source("print('other')")(notebook)
    nbformat.write(notebook, folder / "00_small.ipynb")
    assert tool.main(["site"]) == 0 and "has changed since" in (folder / "site/index.html").read_text()
    source("1 / 0")(notebook)
    nbformat.write(notebook, folder / "00_small.ipynb")
    assert tool.main(["keep", "card"]) == 1 and nbformat.read(folder / "runs/card/00_small.ipynb", as_version=4) == kept


def test_the_kept_run_is_whole():
    """Every notebook, executed on a GPU from start to end without an error, small enough, and of no machine's paths."""
    for path in contract.PATHS:
        kept = contract.read(ROOT / "docs" / "runs" / "h200" / path.name)
        assert "NVIDIA H200" in kept.cells[0].source and "kernels: compiled" in kept.cells[0].source
        assert (ROOT / "docs" / "runs" / "h200" / path.name).stat().st_size < 300_000
        kept.cells.pop(0)
        assert contract.executed(kept) == contract.widget_state(kept) == contract.machine_paths(kept) == []
        assert not any("stores an error without" in sentence for sentence in contract.stored_outputs(kept))


def test_a_page_gives_each_figure_its_own_text():
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
    notebook = good()
    for place, alt in ((3, "1 < 2"), (5, None), (6, "third")):
        metadata = {"image/png": {"alt": alt}} if alt else {}
        notebook.cells[place].outputs = [new_output("display_data", {"image/png": pixel}, metadata=metadata)]
    html = tool.page(HTMLExporter(template_name="lab"), notebook, "Pages")
    assert re.findall(r'<img[^>]*?alt="([^"]*)"', html) == ["1 &lt; 2", tool.NO_ALT, "third"]


# ---- exercises -----------------------------------------------------------------------------------

CHECKER = """def check_pages(fn):
    got = fn(130, 64)
    return "Right." if got == 3 else "not done yet" if got is None else f"130 tokens need 3 pages, not {got}"
print(check_pages(pages))"""


@pytest.mark.parametrize(
    "stub, answer, wrong, sentences",
    [
        ("return None", "return math.ceil(t / p)", "# expect: need 3 pages\ndef pages(t, p): return t // p", []),
        ("return -(-t // p)", "return -(-t // p)", "# expect: 3\ndef pages(t, p): return 2", ["the stub is accepted"]),
        ("return None", "return t // p", "# expect: 3\ndef pages(t, p): return 2", ["folded answer is refused"]),
        ("return None", "return 3", "# expect: 3\ndef pages(t, p): return 3", ["wrong answer 00_ex1.py is accepted"]),
        ("return None", "return 3", "# expect: odd\ndef pages(t, p): return 2", ["does not say 'odd'"]),
        ("return None", "return 3", None, ["has no wrong answer"]),
    ],
)
def test_exercises_are_judged(tmp_path, stub, answer, wrong, sentences):
    cells = [
        code("import math", "imports"),
        new_markdown_cell("### Exercise 1"),
        code(f"def pages(t, p):\n    {stub}", "exercise"),
        code(CHECKER, "exercise-check"),
        new_markdown_cell(FOLDED % f"def pages(t, p):\n    {answer}"),
    ]
    path = tmp_path / "00_small.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    if wrong:
        (tmp_path / "00_ex1.py").write_text(wrong)
    found = faults(path, 1, wrong_answers=tmp_path)
    assert len(found) == len(sentences) and all(s in f for s, f in zip(sentences, found)), found
