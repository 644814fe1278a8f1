"""Recorded runs: ``data/recorded/KIND_NAME.json``, written by ``--record NAME`` and read by the notebooks.

A record is dict(settings=..., rows=[...]); settings hold machine (``Machine.as_dict()``), date (ISO) and method, and left_out where a
benchmark had points too large for the machine's memory: a sentence for each. NAME stands for a machine; "h200" is what the notebooks speak of.
``data/reported/NAME.json`` is something else: figures that others published, with their source; nobody here measured them.
"""

import argparse
import json
import re
from datetime import date
from pathlib import Path

from .. import runtime

RECORDED = Path(__file__).resolve().parent.parent.parent / "data" / "recorded"
REPORTED = RECORDED.parent / "reported"


def stamped(rows, settings):
    """A record of what was measured here and now."""
    return dict(settings=settings | dict(machine=runtime.machine().as_dict(), date=date.today().isoformat()), rows=rows)


def checked(name):
    """``name`` if it can name a record; raises ValueError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"a record's name takes letters, digits, '-' and '_', got {name!r}")
    return name


def argument(text):
    """``checked`` as a type for argparse, which shows its sentence."""
    try:
        return checked(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def save(record, kind, name):
    """Write a record, in place of one that has its name; returns its path. Raises ValueError for a name that is no name."""
    checked(name)
    RECORDED.mkdir(parents=True, exist_ok=True)
    path = RECORDED / f"{kind}_{name}.json"
    rows = ",\n".join(json.dumps(row) for row in record["rows"])  # a row a line, so that a diff shows which changed
    settings = json.dumps(record["settings"], indent=1)
    path.write_text(f'{{"settings": {settings},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")
    return path


def names(kind):
    """The machines or runs that have a record of this kind, such as ["h200"]."""
    return sorted(path.stem.removeprefix(f"{kind}_") for path in RECORDED.glob(f"{kind}_*.json"))


def load(kind, name="h200"):
    """The record of one run: dict(settings, rows). Raises ValueError where there is none, naming those that exist."""
    if name not in names(kind):
        raise ValueError(f"data/recorded has no run {kind}_{name}.json; of {kind} it has {', '.join(names(kind)) or 'none'}.")
    return json.loads((RECORDED / f"{kind}_{name}.json").read_text(encoding="utf-8"))


def machines(kind, *arms):
    """{name: record} of all machines that have a record of this kind with rows of these arms, "h200" first: what a widget offers."""
    found = {name: load(kind, name) for name in sorted(names(kind), key=lambda name: (name != "h200", name))}
    return {name: run for name, run in found.items() if run["rows"] and set(arms) <= {row.get("arm") for row in run["rows"]}}


def others(kind):
    """{name: record} of the machines beside the H200 that have a record of this kind."""
    return {name: run for name, run in machines(kind).items() if name != "h200"}


def reported(name):
    """Figures that others published: a dict with their source and a note beside the numbers. Raises ValueError where there are none."""
    path = REPORTED / f"{name}.json"
    if not path.exists():
        known = sorted(file.stem for file in REPORTED.glob("*.json"))
        raise ValueError(f"data/reported has no {name}.json; it has {', '.join(known) or 'nothing'}.")
    return json.loads(path.read_text(encoding="utf-8"))
