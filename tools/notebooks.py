"""Runs the notebooks: `refresh` rewrites their stored outputs, `site` writes them as linked pages, `keep` files a run of another machine.

    python tools/notebooks.py refresh          all of them, in order
    python tools/notebooks.py refresh 03 08    those whose names begin so
    python tools/notebooks.py site --needle site/needle.json
    python tools/notebooks.py keep h200        executed copies under docs/runs/h200/, which `site` turns into pages too
"""
import argparse
import json
import re
import sys
import time
from datetime import date
from html import escape
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
SITE = ROOT / "site"
RUNS = ROOT / "docs" / "runs"
CELL_SECONDS = 240
NO_ALT = "Figure; its numbers are printed beside it"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Refused(Exception):
    """One sentence that says which notebook cannot be used and why."""


def find(prefixes=()):
    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    if prefixes:
        paths = [path for path in paths if path.name.startswith(tuple(prefixes))]
    if not paths:
        raise Refused(f"no notebook in {NOTEBOOKS.name}/ begins with {' or '.join(prefixes) or 'two digits'}")
    return paths


def tags(cell):
    return set(cell.metadata.get("tags", []))


def execute(path, attempts=2):
    """Run one notebook in a fresh kernel, inside its folder. Returns (notebook, seconds)."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_SECONDS,
        coalesce_streams=True,
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # kernels warn about how they talk to this process
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.perf_counter()
    try:
        client.execute()
    except CellExecutionError as error:
        failed = next(i for i, cell in reversed(list(enumerate(notebook.cells))) if has_error(cell))
        raise Refused(f"{path.name}: cell {failed} raised {error.ename}: {error.evalue}; nothing was written") from None
    except CellTimeoutError:
        if attempts > 1:  # on a busy machine a kernel has been seen to miss a request and wait for ever, with nothing to do
            return execute(path, attempts - 1)
        raise Refused(f"{path.name}: a cell ran longer than {CELL_SECONDS} seconds, twice; nothing was written") from None
    except DeadKernelError:
        raise Refused(f"{path.name}: the kernel died, most likely out of memory; nothing was written") from None
    notebook.metadata.pop("widgets", None)  # nbclient needs the widgets' state only while it runs
    return notebook, time.perf_counter() - start


def has_error(cell):
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def refresh(path):
    """Execute a notebook and store it in its one normal form; an error leaves the file as it was."""
    stored = nbformat.read(path, as_version=4)
    notebook, seconds = execute(path)
    for before, cell in zip(stored.cells, notebook.cells):
        if "gpu" in tags(cell) and before.outputs and not has_cuda():
            cell.outputs = before.outputs  # measured on a CUDA machine: only such a machine replaces it
    normalise(notebook)
    nbformat.write(notebook, path)
    return seconds


def keep(path, name):
    """Execute a notebook and file the executed copy, which says in its first cell where and when; an error leaves what was there."""
    from pageskip_lib import runtime  # here, because refresh and site do without torch

    notebook, seconds = execute(path)
    normalise(notebook)
    where = f"**A kept run.** {runtime.machine()}; {date.today().isoformat()}, {seconds:.0f} s from the first cell to the last, no error."
    where += f" The notebook itself is [{path.name}](../../../notebooks/{path.name})."
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(where, id="kept-run"))
    (RUNS / name).mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, RUNS / name / path.name)
    return seconds


def code_of(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def has_cuda():
    import torch  # here, because only gpu-tagged cells need it

    return torch.cuda.is_available()


def normalise(notebook):
    """Drop whatever changes from run to run or from machine to machine, in place."""
    notebook.nbformat_minor = 5
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": cell.metadata["tags"]} if tags(cell) else {})
        if cell.cell_type == "code":
            cell.outputs = stored_form(cell.outputs)
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count  # kept gpu outputs may hold an older one


def stored_form(outputs):
    """The outputs without widgets, whose models went with their kernel, and without this machine's files."""
    outputs = [output for output in outputs if WIDGET_VIEW not in output.get("data", {})]
    for output in outputs:
        if output.output_type == "error":
            output.traceback = [f"{output.ename}: {output.evalue}"]  # the frames name files
        if "data" in output:
            alt = output.metadata.get("image/png", {}).get("alt")
            output.metadata = nbformat.from_dict({"image/png": {"alt": alt}} if alt else {})
        if "image/png" in output.get("data", {}):
            kept = {"image/png", "text/plain"} & output.data.keys()
            output.data = {kind: output.data[kind] for kind in kept}
    return outputs


def site(needle_file, started):
    from nbconvert import HTMLExporter  # here, because refresh does without its slow import

    # Not embed_images: that is for pictures in markdown, and it would unfold every folded answer.
    exporter = HTMLExporter(template_name="lab")
    exporter.log.setLevel("ERROR")  # it warns of missing alt texts, which page() fills in
    SITE.mkdir(exist_ok=True)
    pages = []
    for path in find():
        print(f"{path.stem:28}", end="", flush=True)
        notebook, seconds = execute(path)
        print(f"{seconds:6.1f} s", flush=True)
        title, question = title_and_question(notebook.cells[0])
        target = SITE / f"{path.stem}.html"
        target.write_text(page(exporter, notebook, title), encoding="utf-8")
        pages.append((target.name, title, question, seconds))

    needle = json.loads(Path(needle_file).read_text()) if needle_file else None
    kept = {folder.name: kept_pages(exporter, folder) for folder in sorted(RUNS.glob("*/"))}
    (SITE / "index.html").write_text(index(pages, needle, kept), encoding="utf-8")
    print(summary(pages, needle, started))


def kept_pages(exporter, folder):
    """Write a kept run as pages; (file, title, where and when it ran, whether the notebook's code is another one by now) of each."""
    (SITE / folder.name).mkdir(exist_ok=True)
    pages = []
    for path in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        now = NOTEBOOKS / path.name
        changed = not now.exists() or code_of(nbformat.read(now, as_version=4)) != code_of(notebook)
        where = notebook.cells[0].source.partition(" The notebook itself")[0].replace("**", "")
        title, _ = title_and_question(notebook.cells[1])
        target = SITE / folder.name / f"{path.stem}.html"
        target.write_text(page(exporter, notebook, f"{title} ({folder.name})"), encoding="utf-8")
        pages.append((f"{folder.name}/{target.name}", title, where, changed))
    return pages


def page(exporter, notebook, title):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"(\]\([^)\s:]+)\.ipynb", r"\1.html", cell.source).replace("../../../notebooks/", "../")
        elif cell.cell_type == "code":
            kept = stored_form(cell.outputs)
            if "widget" in tags(cell):
                note = "<em>Interactive in JupyterLab; the figure before it shows the default view.</em>"
                kept.append(nbformat.v4.new_output("display_data", {"text/html": note}))
            cell.outputs = kept
    resources = {"metadata": {"name": title, "path": str(NOTEBOOKS)}}
    html, _ = exporter.from_notebook_node(notebook, resources)
    # MathJax comes from the network: deferred, it cannot hold up a reader who is offline.
    html = html.replace('<script src="https:', '<script defer src="https:')
    # The exporter knows nothing of the alternative texts that the figures brought along; it meets the figures in their order.
    figures = [output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    alts = iter([output.metadata.get("image/png", {}).get("alt", NO_ALT) for output in figures])
    return re.sub("No description has been provided for this image", lambda _: escape(next(alts, NO_ALT)), html)


def title_and_question(cell):
    """The heading and the first paragraph that says "question" of a notebook's first cell, as plain text."""
    paragraphs = re.split(r"\n\s*\n", cell.source)
    title = paragraphs[0].splitlines()[0].lstrip("# ")
    question = next((p for p in paragraphs[1:] if "question" in p.lower()), "")
    question = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", question)  # links to their text
    return title, " ".join(re.sub(r"[*#`]+", "", question).split())


def needle_table(needle):
    """Header and rows, every cell a string."""
    shown = {
        "answer": str.strip,
        "right": lambda right: "yes" if right else "no",
        "bytes_per_token": lambda count: f"{count / 1e6:.1f} MB",
        "needle_page_share": lambda share: f"{share:.0%}",
        "seconds_per_token": lambda seconds: f"{seconds:.3f} s",
    }
    rows = [["policy", "answer", "right", "read per token", "needle's page kept", "time per token"]]
    for row in needle["rows"]:
        rows.append([row["policy"], *(show(row[key]) for key, show in shown.items())])
    return rows


def needle_settings(needle):
    of = needle["settings"]
    return (
        f"{of['model']} in {of['dtype']} on {of['machine']['name']}, {of['date']}: code {of['code']} planted {of['depth']:.0%} into "
        f"{of['context']:,} tokens, {of['budget_pages']} pages of {of['page_size']} ({of['budget']:.0%})"
    )


INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>pageskip</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2rem .8rem .2rem 0; text-align: left; }}
small {{ color: #555; }}
</style></head><body>
<h1>pageskip</h1>
<p>Page-sparse decode attention, in notebooks. These pages show them as they ran here, just now.</p>
<ul>
{notebooks}
</ul>
{needle}
{kept}
</body></html>
"""


def index(pages, needle, kept):
    items = [
        f'<li>{name[:2]} <a href="{name}">{escape(title)}</a> <small>{seconds:.0f} s</small><br>{escape(question)}</li>'
        for name, title, question, seconds in pages
    ]
    block = ""
    if needle:
        head, *rows = needle_table(needle)
        lines = ["<tr>" + "".join(f"<th>{escape(text)}</th>" for text in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows]
        block = f"<h2>The needle test</h2>\n<p><small>{escape(needle_settings(needle))}</small></p>\n"
        block += "<table>\n" + "\n".join(lines) + "\n</table>"
    runs = []
    for name, pages in kept.items():
        runs.append(f"<h2>The same notebooks on another machine: {escape(name)}</h2>\n<ul>")
        for target, title, where, changed in pages:
            note = " The notebook's code has changed since." if changed else ""
            runs.append(f'<li>{Path(target).name[:2]} <a href="{target}">{escape(title)}</a><br><small>{escape(where + note)}</small></li>')
        runs.append("</ul>")
    return INDEX.format(notebooks="\n".join(items), needle=block, kept="\n".join(runs))


def summary(pages, needle, started):
    lines = [""]
    if needle:
        table = needle_table(needle)
        widths = [max(map(len, column)) for column in zip(*table)]
        lines += [f"The needle test, {needle_settings(needle)}:"]
        lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in table]
        lines += [""]
    lines += [f"{len(pages)} notebooks ran in {sum(page[-1] for page in pages):.0f} s without an error."]
    if started:
        lines += [f"Everything together took {(time.time() - started) / 60:.1f} minutes."]
    return "\n".join(lines + [f"Open {SITE.name}/index.html in a browser, or run: make lab"])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("refresh", help="execute notebooks and store their outputs")
    command.add_argument("names", nargs="*", help="how the names begin, such as 03; all without one")
    command = commands.add_parser("keep", help="execute notebooks and file the executed copies as this machine's run")
    command.add_argument("run", metavar="NAME", help="of the run: its folder under docs/runs")
    command.add_argument("names", nargs="*", help="as for refresh")
    command = commands.add_parser("site", help="execute every notebook and write HTML pages")
    command.add_argument("--needle", metavar="JSON", help="the needle test's result, for the index page")
    command.add_argument("--started", type=float, metavar="EPOCH", help="when the whole run began")
    options = parser.parse_args(arguments)
    try:
        if options.command == "site":
            site(options.needle, options.started)
        else:
            for path in find(options.names):
                seconds = keep(path, options.run) if options.command == "keep" else refresh(path)
                print(f"{path.stem:28}{seconds:6.1f} s", flush=True)
    except Refused as refusal:
        print(f"{refusal}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
