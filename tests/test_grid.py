"""The needle's grid: what its cells hold, that a batch of codes answers as each would alone, and that a stopped run goes on."""

import json

import pytest
import torch

from pageskip_lib import PageList
from pageskip_lib.bench import records
from pageskip_lib.live_model import LiveCache, prefill
from pageskip_lib.quality import grid, needle
from pageskip_lib.quality.__main__ import main
from pageskip_lib.quality.policies import FullPolicy
from pageskip_lib.quality.recall import Setting

from helpers import int32

CELL = grid.Cell("transcripts", "verbatim", 400, 0.4, codes=2)
FEW = dict(settings=(Setting("window", 16), Setting("pageskip", 16, "minmax8", 16, "max"), Setting("pageskip", 64, "minmax8", 64, "max")), shares=(0.6,), adaptive=())


def test_the_default_grid_is_what_is_promised():
    """Ten codes a cell, every haystack, both wordings, the ends of the context too; both page sizes at every budget."""
    todo = grid.cells()
    assert len(todo) == len(set(todo)) == 3 * 2 * 2 * 5 and {cell.codes for cell in todo} == {10}
    assert {cell.depth for cell in todo} >= {0.0, 1.0} and {cell.wording for cell in todo} == {"verbatim", "reworded"}
    statement, question = grid.WORDINGS["reworded"]  # only the last word before the code is the same in both
    asked, told = question.split(), statement[0].split()
    assert question.strip() not in statement[0] and asked[-1] == told[-1] and asked[-2] != told[-2]


def test_codes_are_the_cells_own():
    codes = grid.codes_for(CELL)
    assert len(set(codes)) == 2 and codes == grid.codes_for(CELL) and codes != grid.codes_for(grid.Cell("transcripts", "verbatim", 400, 0.5, codes=2))
    assert all(len(code) == 4 and code not in needle.haystack("transcripts") for code in codes)


def test_equal_budgets_are_equal_bytes():
    """Within a page: 64-token pages may not read more than 16-token ones; a window spends on keys what others spend on summaries."""
    fine, coarse, window = (
        grid.policy_for(setting, 1 / 8, 4096, 64, 4)
        for setting in (Setting("pageskip", 16, "minmax8", 16, "max"), Setting("pageskip", 64, "minmax8", 16, "max"), Setting("window", 16))
    )
    per_token, allowed, summaries = 2 * 64 * 4, 4096 * 2 * 64 * 4 // 8, 256 * (2 * 64 + 4)
    for policy, extra in ((fine, summaries), (coarse, summaries), (window, 0)):
        spent = policy.budget.pages * policy.page_size * per_token + extra
        assert allowed - policy.page_size * per_token < spent <= allowed
    assert grid.policy_for(Setting("pageskip", 64, "minmax8", 64, "max"), 1 / 16, 2048, 64, 4) is None  # a sink and two local pages are more


def test_a_batch_answers_as_each_code_would_alone(smollm):
    model, tokenizer = smollm
    rows = grid.run_cells(model, tokenizer, [CELL], **FEW)
    assert [row["policy"] for row in rows] == ["full", "window", "pageskip", "pageskip"] and {row["control_right"] for row in rows} == {rows[0]["right"]}
    for n, code in enumerate(grid.codes_for(CELL)):
        prompt = needle.plant(tokenizer, needle.haystack(CELL.hay), context=CELL.context, depth=CELL.depth, code=code)
        cache = LiveCache(model.config)
        prefill(model, torch.tensor([prompt.body]), cache)
        for row, policy in zip(rows, [FullPolicy(), *(grid.policy_for(setting, 0.6, 400, 64, 4) for setting in FEW["settings"])]):
            alone = needle.ask(model, tokenizer, prompt, policy, cache)
            assert alone["answer"] == row["answers"][n] and alone["bytes_per_token"] == pytest.approx(row["bytes_per_token"], rel=0.02)
    shares = {row["label"]: row["needle_page_share"] for row in rows}
    assert shares["everything"] == 1 and shares["window, page 16"] == 0 < shares["bound in 8 bits, page 16, max"]


def test_adaptive_lists_take_what_seems_to_matter(smollm):
    """The lower the share that a page must seem to hold, the more is read, up to half of the cache; the row says what it came to."""
    rows = grid.run_cells(*smollm, [CELL], (), (), adaptive=((16, 0.5), (16, 1 / 100), (16, 1e-9)))
    assert [row["label"] for row in rows[1:]] == ["pages from 1/2 on, page 16", "pages from 1/100 on, page 16", "pages from 1/1000000000 on, page 16"]
    full, *read = (row["bytes_per_token"] for row in rows)
    assert read[0] < read[1] < read[2] < 0.6 * full  # two layers of thirty read everything


def test_the_share_of_lists_with_the_code():
    """Two sequences with their codes on pages 2 and 3 to 4; a list must hold all of a code's pages."""
    prompts, held = [needle.Prompt([0] * 99, [0], range(40, 44)), needle.Prompt([0] * 99, [0], range(63, 66))], int32([99, 99])
    lists = PageList.from_rows([[[0, 2], [0, 1]], [[3, 5], [3, 4]]])
    assert grid.needle_shares([(0, held, None), (2, held, lists)], prompts, 16) == [0.5, 0.5]
    lists = PageList.from_rows([[[1, 2], [0, 2]], [[3, 5], [4, 5]]])
    assert grid.needle_shares([(0, held, None), (2, held, lists)], prompts, 16) == [1.0, 0.0]
    assert grid.needle_shares([(0, held, None)], prompts, 16) == [1.0, 1.0]


def test_cells_of_one_batch_answer_as_they_would_apart(smollm):
    """Texts and depths side by side in a batch, as on a GPU: each row's answers, counts and shares are its own."""
    both = [CELL, grid.Cell("jargon", "verbatim", 400, 0.9, codes=1)]
    together = grid.run_cells(*smollm, both, **FEW)
    apart = [row for cell in both for row in grid.run_cells(*smollm, [cell], **FEW)]
    varying = ("bytes_per_token", "needle_page_share")
    assert [{k: v for k, v in row.items() if k not in varying} for row in together] == [{k: v for k, v in row.items() if k not in varying} for row in apart]
    for one, other in zip(together, apart):
        assert all(one[name] == pytest.approx(other[name], rel=0.05, abs=0.02) for name in varying)


def test_a_stopped_run_loses_no_finished_cell(smollm, tmp_path, monkeypatch):
    todo = [grid.Cell("jargon", wording, 300, 0.5, codes=1) for wording in grid.WORDINGS]
    real, asked = grid.run_cells, []

    def run_cells(model, tokenizer, together, *rest):
        asked.extend(together)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(model, tokenizer, together, *rest)

    monkeypatch.setattr(grid, "run_cells", run_cells)
    options = dict(settings=FEW["settings"][:1], shares=(0.5,), adaptive=(), scratch=tmp_path / "cells.jsonl", progress=False)
    with pytest.raises(KeyboardInterrupt):
        grid.run_grid(*smollm, todo, **options)
    rows, _ = grid.run_grid(*smollm, todo, **options)
    assert asked == [todo[0], todo[1], todo[1]] and len(rows) == 4 and not options["scratch"].exists()


def test_codes_that_the_control_misses_are_marked_not_counted():
    row = dict(label="a", budget=0.5, policy="window", asked=10, bytes_per_token=2e6, needle_page_share=0.5, hay="jargon", wording="verbatim", context=9)
    full = row | dict(depth=0.5, right=9, kept=9, control_right=9, bytes_per_token=8e6, policy="full", label="b")
    rows = [row | dict(depth=0.5, right=9, kept=8, control_right=9), row | dict(depth=0.0, right=3, kept=0, control_right=0), full]
    found = {of["label"]: of for of in grid.summarized(rows)}
    assert {name: found["a"][name] for name in ("kept", "known", "cells", "bytes_per_token", "needle_page_share")} == dict(
        kept=8, known=9, cells=1, bytes_per_token=2e6, needle_page_share=0.5
    )
    assert (found["a"]["read"], found["b"]["read"]) == (0.25, 1.0)
    assert "8 of 9" in grid.table(rows) and "1 cells; the control misses 1 of their 10 codes, all of them in 0 cells" in grid.table(rows)


@pytest.fixture(scope="module")
def far():
    """{(label, budget): point} of the H200's record, of codes that stand on no forced page."""
    rows = records.load("grid", "h200")["rows"]
    return {(point["label"], point["budget"]): point for point in grid.summarized([row for row in rows if 0 < row["depth"] < 1])}


BEST, SUM, EXACT = "bound in 8 bits, page 16, max", "bound in 8 bits, page 16, sum", "bound, page 16, max"
COARSE, WIDE = "keys in 2 bits, page 16, max", "keys in 2 bits, page 64, max"


def test_what_notebook_08_says_of_the_record_is_so(far):
    kept = {key: point["kept"] / point["known"] for key, point in far.items()}
    bounds = {label for label, _ in kept if not label.startswith(("keys", "everything", "pages from"))}
    assert BEST == max(bounds, key=lambda label: kept[label, 1 / 4]) == max(bounds, key=lambda label: kept[label, 3 / 16])  # the default
    mass = {(row["label"], row["budget"]): row["mass"] for row in records.load("recall", "cpu_transcripts")["rows"]}
    for share in (1 / 8, 1 / 4):
        assert kept[SUM, share] < kept[BEST, share] - 0.2 and mass[BEST, share] < mass[SUM, share] < mass[BEST, share] + 0.0105
        assert kept["window, page 16", share] == kept["random, page 16", share] == 0
    assert far["random, page 16", 1 / 4]["needle_page_share"] > far[BEST, 1 / 8]["needle_page_share"]
    assert kept[BEST, 1 / 8] > kept[EXACT, 1 / 8] + 0.1 and 0 <= kept[BEST, 1 / 4] - kept[EXACT, 1 / 4] < 0.03
    for least, share in ((128, 1 / 8), (512, 3 / 16), (2048, 1 / 4)):  # adaptive lists: behind at equal bytes, the last one although it reads more
        lists = f"pages from 1/{least} on, page 16", 1 / 2
        assert kept[lists] < kept[BEST, share] - 0.03 and far[lists]["read"] > far[BEST, share]["read"] - 0.01
    assert kept[COARSE, 3 / 16] > 0.99 and kept[WIDE, 1 / 4] > kept[BEST, 1 / 4] and kept["bound in 8 bits of 16, page 64, max", 3 / 16] < 0.5
    rows = [row for row in records.load("grid", "h200")["rows"] if 0 < row["depth"] < 1]
    short, *longer = [
        {(point["label"], point["budget"]): point["kept"] / point["known"] for point in grid.summarized([r for r in rows if r["context"] == context])}
        for context in grid.CONTEXTS
    ]
    assert short[WIDE, 3 / 16] == 0 and all(abs(there[WIDE, 3 / 16] - there[BEST, 3 / 16]) < 0.1 for there in longer)
    assert all(short[BEST, share] < there[BEST, share] for share in (1 / 8, 3 / 16, 1 / 4) for there in longer)  # short contexts are the hard ones


def test_what_the_readme_says_of_the_record_is_so(far):
    readme = " ".join((records.RECORDED.parent.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"of {far[BEST, 1 / 4]['known']} codes that full attention finds" in readme
    quarter, three, eighth = (far[BEST, share]["kept"] for share in (1 / 4, 3 / 16, 1 / 8))
    assert f"keeps {quarter} at a quarter of the cache's bytes, {three} at three sixteenths and {eighth} at an eighth" in readme
    assert f"keeps {far[COARSE, 3 / 16]['kept']} at three sixteenths, and {far[WIDE, 1 / 4]['kept']} with pages of 64 at a quarter" in readme
    assert f"window and random pages keep {far['window, page 16', 1 / 4]['kept'] + far['random, page 16', 1 / 4]['kept']}." in readme


def test_the_command_prints_and_records(smollm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    monkeypatch.setattr(grid, "SETTINGS", FEW["settings"][:1])
    monkeypatch.setattr(grid, "SCRATCH", tmp_path)
    small = grid.cells(contexts=(300,), depths=(0.5,), hays=("jargon",), codes=1)
    monkeypatch.setattr(grid, "cells", lambda **given: small)
    main(["needle", "--grid", "--contexts", "300", "--depths", "0.5", "--codes", "1", "--record", "here", "--json", str(tmp_path / "out.json")])
    assert "2 cells" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == records.load("grid", "here")["rows"]


def test_by_depth_takes_one_text_wording_context_setting_and_budget():
    place = dict(hay="jargon", wording="verbatim", context=2048, label="bound", budget=0.25)
    row = lambda **other: place | dict(depth=0.5, kept=1) | other  # noqa: E731
    others = [row(hay="transcripts"), row(wording="reworded"), row(context=4096), row(label="window"), row(budget=0.125)]
    assert grid.by_depth([*others, row(), row(depth=1.0)], *place.values()) == {0.5: row(), 1.0: row(depth=1.0)}
