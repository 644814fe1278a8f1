"""Every widget of the notebooks, without a browser: each value of each control draws, changes the picture, and shows no error.

The cells are the notebooks' own; what they need of the cells before them is made here, small.
"""

from dataclasses import replace
from types import SimpleNamespace

import ipywidgets
import pytest
import torch
from test_notebook_contract import PATHS, read, tags

from pageskip_lib import Budget, PagedKVCache, PageList, figures, figures_living, runtime, select_pages, token_time
from pageskip_lib.bench import generate, pitfalls, records
from pageskip_lib.cards import CARDS
from pageskip_lib.controls import explore, on_click, show
from pageskip_lib.costs import MODELS, decode_step
from pageskip_lib.quality import grid, needle
from pageskip_lib.quality.capture import Captured
from pageskip_lib.quality.recall import Layer, Setting


def start_here():
    rising = lambda power: [((n + 1) / 16) ** power for n in range(16)]  # noqa: E731
    curve = lambda layer: dict(oracle=rising(0.2 + layer / 50), pageskip=rising(0.3 + layer / 50), window=rising(0.6))  # noqa: E731
    return dict(curves={"2 to 29": curve(31), **{layer: curve(layer) for layer in range(30)}}, ids=torch.zeros(1, 2048))


def needle_notebook():
    def ask(model, tokenizer, prompt, policy, cache, *, record=None):
        """Policies that read summaries have the code's page in some lists, the later the code and the larger the budget the more often."""
        if record is not None:
            pages = policy.budget.pages + (9 if policy.reads else 0)
            record += [(layer, 0, PageList.from_rows([[[layer * 7 % pages]] * 3])) for step in range(7) for layer in range(2, 6)]
        return dict(policy=policy.name, answer=f" {len(prompt.body)}", needle_page_share=0.5)

    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            return SimpleNamespace(input_ids=[ord(letter) for letter in text])

        def decode(self, tokens):
            return "".join(map(chr, tokens))

    def plant(tokenizer, text, *, context, depth, code):
        return needle.Prompt(body=[0] * (round(300 + 100 * depth) + len(text) % 7), question=[65, 66], code_tokens=range(4))

    recorded = records.load("grid", "h200")
    return dict(
        needle=SimpleNamespace(**{**vars(needle), "ask": ask, "plant": plant}), grid=grid, prefill=lambda *_: None, LiveCache=lambda config: None,
        FullPolicy=lambda: SimpleNamespace(name="full", reads=None), GRID=recorded, records=records, CODE="7491", BEST="bound in 8 bits, page 16, max",
        model=SimpleNamespace(config=None, device="cpu"), tokenizer=Tokenizer(), on_click=on_click,
    )  # fmt: skip


def memory_wall():
    return dict(CARDS=CARDS, MODELS=MODELS, decode_step=decode_step)


def sparse_notebook():
    grows = dict(score=0.001, select=0.002, attend=0.0, **{"pageskip step": 0.003, "pageskip dense": 0.1})
    return dict(rows=[dict(arm=arm, tokens=n, microseconds=9 + n * slope, dtype="float32") for arm, slope in grows.items() for n in (4096, 65536)])


def pitfalls_notebook():
    rows = [
        dict(trap="cache", batch=32, tokens=tokens, arm=f"{kernel} {how}", kv_bytes=32768 * tokens, gb_per_s=slow * (1000 + n * (how == "warm")))
        for n, (_, tokens) in enumerate(pitfalls.SHAPES["cuda"]["cache"])
        for kernel, slow in (("read", 1), ("dense", 0.9))
        for how in ("warm", "cold")
    ]
    card = dict(name="a card", torch="2", triton="3")
    settings = dict(machine=card, date="2026-11-30", dtype="float16", datasheet_gb_per_s=1010, caches={"L2": 62914560})
    cpu = [row | dict(batch=1, tokens=row["tokens"] // 4) for row in rows if row["arm"].startswith("read")]
    unknown = settings | dict(datasheet_gb_per_s=None, caches={})
    return dict(MACHINES=dict(h200=dict(rows=rows, settings=settings), cpu=dict(rows=cpu, settings=unknown)), pitfalls=pitfalls)


def page_bound():
    return dict(keys=torch.randn(12, 2, generator=torch.Generator().manual_seed(0)))


def by_heads(run):
    sets = {}
    for row in run["rows"]:
        sets.setdefault(f"{row['heads']} on {row['kv_heads']} heads, D={row['head_dim']}", []).append(row)
    return sets


def graphs_notebook():
    contexts = {tokens: (tokens / 4096) ** 0.5 for tokens in (1024, 4096, 16384, 65536)}
    rows = [
        dict(arm="pageskip step", batch=batch, tokens=tokens, speed_up=times * batch**0.5, dtype="float16")
        for batch in (1, 8, 32)
        for tokens, times in contexts.items()
    ]
    slower = [dict(row, speed_up=row["speed_up"] / 2) for row in rows]
    settings = dict(machine=dict(name="a card", torch="2", triton="3"), date="2026-11-30")
    sets = {"12 on 2 heads, D=128": rows, "9 on 3 heads, D=64": slower}
    return dict(STEP=dict(rows=rows, settings=settings), SETS=sets, here=[row for row in slower if row["batch"] == 1], records=records, by_heads=by_heads)


def recall_notebook():
    captured = Captured.load()
    ways = {name: dict(policy=name) for name in ("oracle", "window", "random")}
    ways |= {name: dict(policy="pageskip", kind=kind, group="max") for name, kind in (("bound", "minmax"), ("bound in 8 bits", "minmax8"))}
    sweeps = {name: records.load("recall", f"cpu_{name}") for name in ("transcripts", "jargon")}
    return dict(
        captured=captured, layers={number: Layer(captured, n) for n, number in enumerate(captured.layers)}, WAYS=ways, SWEEPS=sweeps,
        of=sweeps["jargon"]["settings"], Budget=Budget, Setting=Setting, replace=replace, select_pages=select_pages,
    )  # fmt: skip


def living_notebook():
    reads = {name: token_time.Read(5.0, 4e6) for name in ("products", "exact", "selection", "listed")}
    prices = token_time.Prices(**reads, small=8.0)

    def predicted(model, batch, tokens, dense_layers=2, prices=prices, card=CARDS["H200"]):
        return token_time.predict(prices, model, batch, tokens, budget=Budget(pages=32), page_size=64, card=card, dense_layers=dense_layers)

    def make():
        return PagedKVCache(4, 1, 64, rows=3, row_pages=4, page_size=16, dtype=torch.float32, device="cpu", kind="minmax")

    walk = torch.randn(60, generator=torch.Generator().manual_seed(0))
    return dict(
        make=make, token=lambda n: (torch.full((1, 1, 64), walk[n].item()),) * 2, walk=walk, predicted=predicted, PRICES=prices, CARDS=CARDS, MODELS=MODELS,
        box=lambda cache, row, page: tuple(bound[row, 0, page, 0].item() for bound in (cache.summary.kmin, cache.summary.kmax)),
        H200=CARDS["H200"], decode_step=decode_step, figures_living=figures_living, generate=generate, token_time=token_time, BUDGET=Budget(pages=32), PAGE=64,
    )  # fmt: skip


STAND_INS = {
    "00_start_here": start_here, "01_memory_wall": memory_wall, "02_dense_two_stage_kernel": dict, "03_bandwidth_pitfalls": pitfalls_notebook,
    "04_page_bound_and_gemm_identity": page_bound, "05_sparse_kernel": sparse_notebook,
    "06_cuda_graphs": graphs_notebook, "07_recall": recall_notebook, "08_needle": needle_notebook, "09_living_cache": living_notebook,
}  # fmt: skip


def widgets():
    """(notebook's name, its cells that make the widget's draw function, the widget's cell)."""
    for path in PATHS:
        cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
        for i, cell in enumerate(cells):
            if "widget" in tags(cell):
                last_draw = max(j for j in range(i) if "def draw(" in cells[j].source)
                yield pytest.param(path.stem, cells[last_draw], cell, id=f"{path.stem}-{i}")


@pytest.mark.parametrize("name, draw_cell, widget_cell", list(widgets()))
def test_each_control_redraws(name, draw_cell, widget_cell):
    namespace = dict(torch=torch, figures=figures, runtime=runtime, explore=explore, show=show)
    namespace.update(STAND_INS[name]())
    exec(compile(draw_cell.source, name, "exec"), namespace)
    *before, last = widget_cell.source.split("\n\n")
    exec("\n\n".join(before), namespace)
    box = eval(last, namespace)
    assert isinstance(box, ipywidgets.VBox)
    assert "<b>" not in box.finding.value, box.finding.value
    for control in box.controls.values():
        start, pictures = control.value, set()
        values = [value for _, value in control._options_full]
        for value in [*values[:: max(1, len(values) // 4)], values[-1]]:  # a long slider: every few steps, and both ends
            control.value = value
            if hasattr(box, "button"):
                box.button.click()
                assert box.bar.value == 1
            assert "<b>" not in box.finding.value, f"{value}: {box.finding.value}"
            pictures.add(box.picture.value)
        assert len(pictures) > 1, f"the picture never changes with {control.description}"
        control.value = start
    assert not any(getattr(control, "continuous_update", False) for control in box.controls.values())


def test_a_button_runs_what_takes_long_and_its_bar_moves():
    ran, bars = [], []

    def draw(report, n):
        ran.append((n, box.button.disabled))
        for share in (0.5, 1):
            report(share)
            bars.append(box.bar.value)
        return figures.needle_map({(2, 0): n % 3}, 3, ["a"], f"asked with {n}", "x")

    box = on_click(draw, "ask", n=ipywidgets.IntSlider(3))
    box.controls["n"].value = 5
    assert not ran and not box.picture.value, "it ran without a click"
    for _ in range(2):
        box.button.click()
    assert ran == [(5, True)] * 2 and bars == [0.5, 1] * 2 and not box.button.disabled
    assert box.finding.value == "asked with 5" and box.picture.value


def test_an_error_in_draw_is_shown_to_the_reader():
    def draw(n):
        raise ValueError("n is <odd>")

    box = explore(draw, n=ipywidgets.IntSlider())
    assert box.finding.value == "<b>ValueError</b>: n is &lt;odd&gt;"
