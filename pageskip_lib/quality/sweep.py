"""Recall over a grid of settings and budgets: finished cells survive a stopped run, and every mean comes with an interval.

A cell is one setting on one layer of one captured set. Each is written to a scratch file as soon as it is measured, and read from there when the
sweep is started again. The file's name holds a digest of all that decides a cell's numbers, so that no other run can pick it up.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm.auto import tqdm

from .. import scores, selection, summaries
from . import recall
from .capture import TENSORS
from .policies import DENSE_LAYERS
from .recall import Layer, Setting, measure

SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 1 / 2)
HEAT_SHARE = 1 / 8  # rows of this budget keep the mass of every head
SCRATCH = Path(__file__).resolve().parent.parent.parent / "build"
DRAWS = 2000
METRICS = ("mass", "forced", "error", "top1", "top4", "read")


def grid(page_sizes=(16, 32, 64, 128)):
    """The settings of the recorded sweep: for each page size the policies without scores, the bound under every aggregator, every other kind
    under two, and bounds over a half and a quarter of the page."""
    found = []
    for page_size in page_sizes:
        found += [Setting(policy, page_size) for policy in ("oracle", "window", "random")]
        for kind in summaries.KINDS:
            groups = recall.AGGREGATORS if kind == "minmax" else ("max", "sum")
            found += [Setting("pageskip", page_size, kind, page_size, group) for group in groups]
        found += [Setting("pageskip", page_size, "minmax", size, "max") for size in (page_size // 2, page_size // 4) if size >= 8]
    return found


class Cells:
    """Finished cells, in memory and (with a path) in a JSON-lines file that outlives the process."""

    def __init__(self, path=None):
        self.path, self.done = path, {}
        if path and path.exists():
            whole = path.read_bytes().rpartition(b"\n")[0]
            self.done = dict(json.loads(line) for line in whole.splitlines())
            path.write_bytes(whole + b"\n" * bool(whole))  # a line that was cut short goes
        elif path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def get(self, key, make):
        """The cell called ``key``: the stored one, or make()'s, which is stored before it is returned."""
        if key not in self.done:
            self.done[key] = make()
            if self.path:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps([key, self.done[key]]) + "\n")
        return self.done[key]

    def remove(self):
        if self.path:
            self.path.unlink(missing_ok=True)


def scratch_path(captures, shares=SHARES):
    """Where a sweep over these captured sets keeps its cells: the name changes with the tensors, the budgets, PyTorch and the code that measures."""
    digest = hashlib.sha256(repr((torch.__version__, shares, [one.scale for one in captures])).encode())
    for module in (recall, scores, selection, summaries):
        digest.update(Path(module.__file__).read_bytes())
    for one in captures:
        for name in TENSORS:
            digest.update(getattr(one, name).contiguous().view(torch.uint8).numpy())
    return SCRATCH / f"recall_{digest.hexdigest()[:16]}.jsonl"


@torch.inference_mode()
def sweep(captures, settings=None, shares=SHARES, *, scratch=None, progress=False):
    """Measure every setting on every layer of every captured set, at every budget. Returns the rows, one a setting and budget.

    captures: ``Captured`` sets with the same layers and heads. shares: budgets, as shares of the cache's bytes. scratch: path of the file of
    finished cells, removed at the end. Layers below ``DENSE_LAYERS`` count in per_layer and per_head only, since no policy chooses there.

    A row: the setting's fields and label, budget (share asked for), pages (K at the last position), read (share read), mass with its 95%
    interval low and high, p10 (tenth percentile over all layers, steps and KV heads), worst and worst_head ([layer, KV head] with the lowest
    mean), outside (the mass outside the forced pages) and outside_kept (how much of that is kept), error, top1, top4, per_layer (mass of each
    layer), at ``HEAT_SHARE`` per_head ([layer][KV head]), and where the same setting under "max" was measured too, over_max: [mean, low, high]
    of the mass minus that one's. Budgets that do not hold the forced pages have no row. Raises ValueError when captured sets do not fit each other.
    """
    settings = grid() if settings is None else settings
    first = captures[0]
    for one in captures:
        if (one.layers, one.kv_heads, one.queries.shape[1:]) != (first.layers, first.kv_heads, first.queries.shape[1:]):
            raise ValueError("The captured sets must hold the same layers and heads of one model.")
    deep = [n for n, layer in enumerate(first.layers) if layer >= DENSE_LAYERS]
    if not deep:
        raise ValueError(f"A captured set must hold a layer from {DENSE_LAYERS} on: those below stay dense.")
    cells = Cells(scratch)
    measured = {setting: [] for setting in settings}
    with tqdm(total=len(captures) * len(first.layers) * len(settings), desc="recall", unit="cell", disable=not progress) as bar:
        for number, one in enumerate(captures):
            for index in range(len(one.layers)):
                layer = None
                for setting in settings:
                    key = json.dumps([number, index, *asdict(setting).values()])
                    if key not in cells.done and layer is None:
                        layer = Layer(one, index)
                    measured[setting].append(cells.get(key, lambda: _packed(measure(layer, setting, shares))))
                    bar.update()
    steps = [len(one.lengths) for one in captures]
    tensors = {setting: _assembled(found, steps, len(first.layers), shares) for setting, found in measured.items()}
    rows = [_row(setting, share, tensors, first, deep) for setting in settings for share in shares if share in tensors[setting]]
    cells.remove()
    return rows


def _packed(results):
    """A cell as JSON takes it, six digits of every number."""
    short = lambda numbers: [[float(f"{x:.6g}") for x in row] for row in numbers.tolist()]  # noqa: E731
    return [result and {name: short(numbers) for name, numbers in result.items()} for result in results]


def _assembled(cells, steps, layers, shares):
    """{share: {metric: [positions, layers, Hkv]}} from a setting's cells, the steps of all captured sets one after the other."""
    found = {}
    for n, share in enumerate(shares):
        if all(cell[n] for cell in cells):
            found[share] = {
                name: torch.cat([
                    torch.tensor([cell[n][name] for cell in cells[at * layers : (at + 1) * layers]], dtype=torch.float64).transpose(0, 1)
                    for at in range(len(steps))
                ])
                for name in METRICS
            }  # fmt: skip
    return found


def _row(setting, share, tensors, captured, deep):
    of = {name: values[:, deep] for name, values in tensors[setting][share].items()}
    everywhere = tensors[setting][share]["mass"].mean(0)
    mass, by_head = of["mass"], of["mass"].mean(0)
    mean, low, high = interval(mass.mean((1, 2)))
    worst = divmod(int(by_head.argmin()), by_head.shape[1])
    outside = 1 - of["forced"].mean()
    pages = setting.pages_within(share, len(captured.ids), captured.keys.shape[-1], captured.keys.element_size())
    row = asdict(setting) | dict(
        label=setting.label, budget=share, pages=pages, read=_short(of["read"].mean()), mass=_short(mean), low=_short(low), high=_short(high),
        p10=_short(torch.quantile(mass.flatten(), 0.1)), worst=_short(by_head.min()),
        worst_head=[captured.layers[deep[worst[0]]], captured.kv_heads[worst[1]]], outside=_short(outside),
        outside_kept=_short((mass - of["forced"]).mean() / outside), **{name: _short(of[name].mean()) for name in ("error", "top1", "top4")},
        per_layer=[_short(x, 3) for x in everywhere.mean(1)],
    )  # fmt: skip
    if share == HEAT_SHARE:
        row["per_head"] = [[_short(x, 3) for x in heads] for heads in everywhere]
    rival = setting.policy == "pageskip" and Setting(setting.policy, setting.page_size, setting.kind, setting.bound_size, "max")
    if rival and rival != setting and share in tensors.get(rival, ()):
        difference = mass - tensors[rival][share]["mass"][:, deep]
        row["over_max"] = [_short(x) for x in interval(difference.mean((1, 2)))]
    return row


def _short(number, digits=4):
    return round(float(number), digits)


def interval(positions, level=0.95):
    """(mean, low, high): the mean and its percentile bootstrap interval.

    positions: [n], one mean for each query position. Whole positions are drawn again, with all their layers and heads, since those belong together.
    So the interval speaks of other positions in the same texts, not of other texts or models.
    """
    drawn = torch.randint(len(positions), (DRAWS, len(positions)), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(positions[drawn].mean(1), torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=positions.dtype))
    return float(positions.mean()), float(low), float(high)


def table(rows, budget=HEAT_SHARE):
    """The rows of one budget as text, most mass first."""
    names = dict(read=7, mass=11) | {"95% interval": 18, "10th pct.": 11, "worst head": 12, "outside": 9, "error": 7, "top 1": 7, "top 4": 7}
    lines = [" " * 38 + "".join(f"{name:>{width}}" for name, width in names.items())]
    for row in sorted((row for row in rows if row["budget"] == budget), key=lambda row: -row["mass"]):
        lines.append(
            f"{row['label']:<38}{row['read']:>7.1%}{row['mass']:>11.1%}{row['low']:>10.1%} - {row['high']:.1%}{row['p10']:>11.1%}{row['worst']:>12.1%}"
            f"{row['outside_kept']:>9.1%}{row['error']:>7.2f}{row['top1']:>7.0%}{row['top4']:>7.0%}"
        )
    return "\n".join(lines)


def ablation(rows, page_size=16, budget=1 / 4):
    """How the query heads of a group agree on pages, for the bound at one page size and budget, as text: mass, and the difference to "max"."""
    lines = [f"{'group':<16}{'read':>7}{'mass kept':>11}{'over max, 95% interval':>28}"]
    for row in rows:
        if (row["kind"], row["bound_size"], row["page_size"], row["budget"]) == ("minmax", page_size, page_size, budget):
            over = "{:+.2%} [{:+.2%}, {:+.2%}]".format(*row["over_max"]) if "over_max" in row else ""
            lines.append(f"{recall.GROUP_NAMES.get(row['group'], row['group']):<16}{row['read']:>7.1%}{row['mass']:>11.2%}{over:>28}")
    return "\n".join(lines)
