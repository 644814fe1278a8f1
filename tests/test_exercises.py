"""Every exercise in the notebooks: the stub is not accepted, the folded answer is, a wrong answer is told why.

The contract, for each markdown heading "### Exercise N" in notebook NN_name.ipynb, up to the next heading:
  stub     one code cell tagged `exercise` that defines exactly one top-level function, NAME
  checker  one code cell tagged `exercise-check`, such as print(check_NAME(NAME)). `check_NAME(fn)` is defined in
           that cell, or earlier as below; it returns a message that begins with "Right" only when fn is right,
           and never raises, whatever fn returns
  answer   markdown: <details><summary>Answer</summary>, a ```python block that defines NAME, </details>
  wrong    tests/wrong_answers/NN_exN.py defines NAME plausibly wrong; its first line, "# expect: some words",
           holds words that the checker's message must contain
Cells tagged `imports` or `exercise-setup`, anywhere in the notebook, run once before them, in order, as plain Python
(no magics) inside notebooks/. Nothing else of the notebook is run, so they must be enough.
"""
import ast
import linecache
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from test_notebook_contract import FENCE, NOTEBOOKS, PATHS, read, tags

from pageskip_lib.exercises import shown

WRONG_ANSWERS = Path(__file__).parent / "wrong_answers"
HEADING = re.compile(r"^### Exercise (\d+)", re.MULTILINE)
ANSWER = re.compile(r"<summary>Answer</summary>.*?^```python\n(.*?)^```.*?</details>", re.DOTALL | re.MULTILINE)


def sections(notebook):
    """{exercise number: its cells}."""
    found, current = {}, None
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = FENCE.sub("", cell.source)
            if match := HEADING.search(text):
                current = found.setdefault(int(match[1]), [])
            elif re.search(r"^#{1,3} ", text, re.MULTILINE):
                current = None
        if current is not None:
            current.append(cell)
    return found


def run(code, namespace, name):
    # In linecache, so that triton.jit can read the source of a kernel defined here.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    exec(compile(code, name, "exec"), namespace)


@lru_cache
def setup(path):
    namespace = {"__name__": path.stem}
    for i, cell in enumerate(read(path).cells):
        if tags(cell) & {"imports", "exercise-setup"}:
            run(cell.source, namespace, f"{path.stem}, cell {i}")
    return namespace


def faults(path, number, wrong_answers=WRONG_ANSWERS):
    """Sentences about what breaks the contract in one exercise."""
    cells = sections(read(path))[number]
    stubs = [cell.source for cell in cells if "exercise" in tags(cell)]
    checkers = [cell.source for cell in cells if "exercise-check" in tags(cell)]
    answers = [answer for cell in cells if cell.cell_type == "markdown" for answer in ANSWER.findall(cell.source)]
    for what, some in (("stub", stubs), ("checker", checkers), ("folded answer", answers)):
        if len(some) != 1:
            return [f"has {len(some)} {what} cells instead of one"]

    defined = [node.name for node in ast.parse(stubs[0]).body if isinstance(node, ast.FunctionDef)]
    if len(defined) != 1:
        return [f"the stub defines {len(defined)} functions instead of one"]
    (name,) = defined
    wrong = wrong_answers / f"{path.stem[:2]}_ex{number}.py"
    if not wrong.exists():
        return [f"has no wrong answer in tests/wrong_answers/{wrong.name}"]

    namespace = dict(setup(path))
    where = f"{path.stem}, exercise {number}"
    run(stubs[0], namespace, f"{where}, stub")
    run(checkers[0], namespace, f"{where}, checker")
    check = namespace.get(f"check_{name}")
    if check is None:
        return [f"there is no check_{name}"]

    def message(code, kind):
        own = dict(namespace)
        run(code, own, f"{where}, {kind}")
        return check(own[name])

    found = []
    if check(namespace[name]).startswith("Right"):
        found.append("the stub is accepted")
    if not (said := message(answers[0], "answer")).startswith("Right"):
        found.append(f"the folded answer is refused: {said}")
    code = wrong.read_text(encoding="utf-8")
    expected = re.match(r"# expect: (.+)", code)
    said = message(code, "wrong answer")
    if said.startswith("Right"):
        found.append(f"the wrong answer {wrong.name} is accepted")
    elif not expected:
        found.append(f"{wrong.name} does not begin with '# expect: some words'")
    elif expected[1].strip().lower() not in said.lower():
        found.append(f"the message about {wrong.name} does not say {expected[1]!r}: {said}")
    return found


EXERCISES = [(path, number) for path in PATHS for number in sections(read(path))]


def test_messages_show_tensors_by_their_shape():
    ten = torch.zeros(10)
    assert shown(ten) == "a tensor of shape (10,)" and shown((ten, None)) == "a tuple of a tensor of shape (10,), None" and shown([1, 2]) == "[1, 2]"
    assert shown(torch.tensor(2)) == "tensor(2)" and len(shown(list(range(1000)))) < 210


def test_there_are_exercises():
    assert EXERCISES, "no notebook in notebooks/ holds an exercise ('### Exercise N')"


@pytest.mark.parametrize("path, number", EXERCISES, ids=[f"{path.stem}-{number}" for path, number in EXERCISES])
def test_exercise(path, number, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS)
    found = faults(path, number)
    if found:
        pytest.fail(f"{path.stem}, exercise {number}: " + "; ".join(found), pytrace=False)


def test_each_wrong_answer_belongs_to_an_exercise():
    known = {f"{path.stem[:2]}_ex{number}" for path, number in EXERCISES}
    strays = sorted(file.name for file in WRONG_ANSWERS.glob("*.py") if file.stem not in known)
    assert not strays, f"tests/wrong_answers holds files of no exercise: {strays}"
