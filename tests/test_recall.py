"""Recall against known answers: planted mass, the library's own selection and attention, bytes by hand, resumed runs, intervals."""

import json
from dataclasses import replace

import pytest
import torch

from pageskip_lib import Budget, page_scores, reference, select_pages, summarize_pages
from pageskip_lib.bench import records
from pageskip_lib.quality import sweep as module
from pageskip_lib.quality.__main__ import main
from pageskip_lib.quality.capture import Captured
from pageskip_lib.quality.recall import Layer, Setting, measure
from pageskip_lib.quality.sweep import Cells, ablation, grid, interval, scratch_path, sweep, table

from helpers import randn

BOUND = Setting("pageskip", 16, "minmax", 16, "max")


def made(tokens=1000, steps=3, layers=(0, 2, 3), kv_heads=2, group=3, dim=64, every=37, seed=0, dtype=torch.float32):
    """A captured set of random numbers."""
    queries = randn(steps, len(layers), 1, kv_heads * group, dim, seed=seed).to(dtype)
    keys, values = (randn(len(layers), kv_heads, tokens, dim, seed=seed + n).to(dtype) for n in (1, 2))
    lengths = torch.tensor([tokens - every * (steps - 1 - n) for n in range(steps)], dtype=torch.int32)
    ids = torch.arange(tokens, dtype=torch.int32)
    facts = dict(model="random", context=f"seed {seed}", dtype=str(dtype).removeprefix("torch."), date="2026-11-30")
    return Captured(queries, keys, values, lengths, ids, list(layers), list(range(kv_heads)), dim**-0.5, facts)


def lists_of(captured, index, setting, share):
    """The setting's page lists by the library's own selection, one ``PageList`` a step (shared lists only)."""
    layer, found = Layer(captured, index), []
    for n, length in enumerate(captured.lengths.tolist()):
        keys = captured.keys[None, index, :, :length]
        pages = setting.pages_within(share, length, layer.dim, keys.element_size())
        budget = replace(Budget.for_tokens(length, setting.page_size), pages=pages)
        if setting.policy == "oracle":
            scores = reference.page_mass(captured.queries[n, index], keys, setting.page_size)
        elif setting.policy == "window":
            scores = torch.arange(-(-length // setting.page_size)).float().expand(1, keys.shape[1], -1)
        else:
            summary = summarize_pages(keys, setting.page_size, kind=setting.kind, bound_size=setting.bound_size)
            scores = page_scores(captured.queries[n, index], summary, group=setting.group)
        found.append(select_pages(scores.float(), budget, torch.tensor([length], dtype=torch.int32), setting.page_size))
    return found


@pytest.mark.parametrize(
    "setting",
    [
        BOUND, Setting("oracle", 16), Setting("window", 32), Setting("pageskip", 32, "minmax", 16, "sum"), Setting("pageskip", 16, "mean_std", 16, "softmax_sum"),
        Setting("pageskip", 32, "mean_radius", 32, "max"), Setting("pageskip", 64, "mean", 64, "sum"),
    ],
    ids=lambda setting: setting.label,
)  # fmt: skip
def test_every_number_is_that_of_the_librarys_own_lists(setting):
    """Mass, error and bytes, from page lists that select_pages makes and attention that the fp64 reference computes."""
    captured, share, index = made(), 0.4, 1
    (result,) = measure(Layer(captured, index), setting, [share])
    for n, (pages, length) in enumerate(zip(lists_of(captured, index, setting, share), captured.lengths.tolist())):
        q, keys, values = captured.queries[n, index], captured.keys[None, index, :, :length], captured.values[None, index, :, :length]
        mass = reference.page_mass(q, keys, setting.page_size)
        sparse, _ = reference.attention(q, keys, values, pages=pages, page_size=setting.page_size)
        exact, _ = reference.attention(q, keys, values)
        error = ((sparse - exact).norm(dim=-1) / exact.norm(dim=-1)).view(2, 3).mean(1)
        for head in range(2):
            listed = pages.pages[0, head][pages.pages[0, head] >= 0].long()
            assert result["mass"][n, head].item() == pytest.approx(mass[0, head, listed].sum().item(), abs=1e-12)
            assert result["error"][n, head].item() == pytest.approx(error[head].item(), rel=1e-9)
            tokens = sum(min(setting.page_size, length - page * setting.page_size) for page in listed.tolist())
            read = 2 * tokens * 64 * 4 + setting.summary_bytes(length, 64, 4)
            assert result["read"][n, head].item() == pytest.approx(read / (2 * length * 64 * 4)) and read <= share * 2 * length * 64 * 4
            forced = [page for page in range(mass.shape[-1]) if page < 1 or page >= mass.shape[-1] - Budget.for_tokens(length, setting.page_size).local]
            assert result["forced"][n, head].item() == pytest.approx(mass[0, head, forced].sum().item(), abs=1e-12)
            best = [page for page in mass[0, head].argsort(descending=True).tolist() if page not in forced]
            for r in (1, 4):
                assert result[f"top{r}"][n, head].item() == len(set(best[:r]) & set(listed.tolist())) / r


def test_a_page_that_holds_all_the_mass():
    """One page outside the forced ones matches every query: the bound, every aggregator and the oracle read it, the window cannot."""
    captured = made(layers=(2,))
    captured.queries[:] = captured.queries[:1, :, :, :1]  # the heads agree on what they look for
    captured.keys[:, :, 20 * 16 : 20 * 16 + 16] = 30 * captured.queries[0, 0, 0, 0]
    layer = Layer(captured, 0)
    for group in ("max", "sum", "softmax_sum", "none", "union"):
        (result,) = measure(layer, replace(BOUND, group=group), [0.25])
        assert (result["mass"] > 1 - 1e-9).all() and (result["top1"] == 1).all() and (result["error"] < 1e-6).all(), group
    (result,) = measure(layer, Setting("oracle", 16), [0.25])
    assert (result["mass"] > 1 - 1e-9).all()
    (result,) = measure(layer, Setting("window", 16), [0.25])
    assert (result["mass"] < 1e-6).all() and (result["top1"] == 0).all() and (result["error"] > 0.5).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_is_never_beaten(seed):
    """In no call, at no budget, by no setting of its page size: it reads the heaviest pages, and spends nothing on summaries."""
    layer, shares = Layer(made(seed=10 * seed, tokens=2000), 0), (1 / 8, 1 / 4, 1 / 2)
    best = {size: measure(layer, Setting("oracle", size), shares) for size in (16, 32, 64, 128)}
    compared = 0
    for setting in grid():
        for result, oracle in zip(measure(layer, setting, shares), best[setting.page_size]):
            if result:
                assert (result["mass"] <= oracle["mass"] + 1e-12).all(), setting
                compared += 1
    assert compared > 100


def test_the_window_reads_sink_and_newest():
    captured = made(tokens=1000, steps=1)
    (result,) = measure(Layer(captured, 0), Setting("window", 16), [0.25])
    mass = reference.page_mass(captured.queries[0, 0], captured.keys[None, 0], 16)
    pages = 250 // 16  # 15 of 63 pages: the sink and the last 14
    assert torch.allclose(result["mass"][0], mass[0, :, [0, *range(63 - (pages - 1), 63)]].sum(-1))


def test_equal_bytes_by_hand():
    """4,096 tokens of fp16 with D=64 are 1,048,576 bytes a KV head; a 16-token page is 4,096, an entry of the bound 256, of the mean 128."""
    eighth = lambda setting: setting.pages_within(1 / 8, 4096, 64, 2)  # noqa: E731
    assert eighth(Setting("window", 16)) == 131072 // 4096
    assert eighth(BOUND) == (131072 - 256 * 256) // 4096 == 16
    assert eighth(replace(BOUND, kind="mean")) == (131072 - 256 * 128) // 4096 == 24
    assert eighth(replace(BOUND, kind="mean_radius")) == (131072 - 256 * 132) // 4096 == 23
    assert eighth(Setting("pageskip", 64, "minmax", 16, "max")) == (131072 - 256 * 256) // (4 * 4096) == 4
    assert eighth(Setting("pageskip", 64, "minmax", 64, "max")) == (131072 - 64 * 256) // (4 * 4096) == 7
    assert eighth(Setting("pageskip", 16, "minmax", 8, "max")) == 0


def test_a_budget_below_the_forced_pages_has_no_result():
    layer = Layer(made(tokens=1000, steps=2), 0)
    assert measure(layer, Setting("window", 16), [6 / 63 - 0.01, 0.2])[0] is None  # 6 forced pages: the sink and 5 local ones
    assert measure(layer, Setting("window", 16), [0.2])[0] is not None


def test_the_union_of_lists_is_counted_right():
    """Case G11, by brute force: heads rank for themselves, take turns while the group's pages fit the budget, and the union is what is read."""
    captured, share, page_size = made(steps=2), 0.3, 16
    layer = Layer(captured, 1)
    (own,), (union,) = (measure(layer, replace(BOUND, group=group), [share]) for group in ("none", "union"))
    assert torch.equal(own["read"], union["read"])
    smaller = 0
    for n, length in enumerate(captured.lengths.tolist()):
        q, keys = captured.queries[n, 1], captured.keys[None, 1, :, :length]
        lengths, held = torch.tensor([length], dtype=torch.int32), -(-length // page_size)
        budget = BOUND.pages_within(share, length, 64, 4)
        scores = page_scores(q, summarize_pages(keys, page_size), group="none")
        weights = torch.softmax(torch.einsum("hd,htd->ht", q[0].double(), keys[0].double().repeat_interleave(3, 0)) / 8, -1)
        for kv_head in range(2):
            fits = []
            for turns in range(6, held + 1):
                lists = select_pages(scores[:, 3 * kv_head : 3 * kv_head + 3], Budget(turns, 1, 5), lengths, page_size).pages[0].tolist()
                if len(set().union(*lists)) <= budget:
                    fits.append(lists)
            lists, together = fits[-1], set().union(*fits[-1])
            tokens = sum(min(page_size, length - page * page_size) for page in together)
            assert own["read"][n, kv_head].item() == pytest.approx((tokens + held * page_size / 16) / length)  # an entry of 2 D: a token of K and V
            smaller += len(lists[0]) < len(together)
            of = lambda head, pages: sum(weights[3 * kv_head + head, p * page_size : (p + 1) * page_size].sum().item() for p in pages)  # noqa: E731
            assert own["mass"][n, kv_head].item() == pytest.approx(sum(of(head, lists[head]) for head in range(3)) / 3)
            assert union["mass"][n, kv_head].item() == pytest.approx(sum(of(head, together) for head in range(3)) / 3)
    assert smaller == 4, "the heads agreed everywhere, so the union was never put to the test"


FEW = (Setting("oracle", 16), BOUND, replace(BOUND, group="sum"), Setting("window", 16))


def test_rows_are_means_over_the_layers_that_choose():
    captured = made(tokens=2000)
    rows = sweep([captured], FEW, (1 / 8, 1 / 4))
    assert [(row["label"], row["budget"]) for row in rows] == [(setting.label, share) for setting in FEW for share in (1 / 8, 1 / 4)]
    row = rows[3]
    mass = torch.stack([measure(Layer(captured, index), BOUND, [1 / 4])[0]["mass"] for index in range(3)])  # [layers, steps, heads]
    assert row["mass"] == pytest.approx(mass[1:].mean().item(), abs=1e-4) and row["low"] <= row["mass"] <= row["high"]
    assert row["per_layer"] == pytest.approx(mass.mean((1, 2)).tolist(), abs=1e-3)
    by_head = mass[1:].mean(1)
    assert row["worst"] == pytest.approx(by_head.min().item(), abs=1e-4)
    layer, head = row["worst_head"]
    assert by_head[(2, 3).index(layer), head] == by_head.min()
    assert row["p10"] == pytest.approx(torch.quantile(mass[1:].flatten(), 0.1).item(), abs=1e-4)
    assert "per_head" not in row and len(rows[2]["per_head"]) == 3 and "over_max" not in row
    over = rows[5]["over_max"]
    assert over[0] == pytest.approx(rows[5]["mass"] - row["mass"], abs=2e-4) and over[1] <= over[0] <= over[2]


def test_several_contexts_are_measured_together():
    one, two = made(), made(seed=5, steps=2)
    (row,), (first,), (second,) = (sweep(captures, [BOUND], [1 / 4]) for captures in ([one, two], [one], [two]))
    assert row["mass"] == pytest.approx((3 * first["mass"] + 2 * second["mass"]) / 5, abs=2e-4)
    with pytest.raises(ValueError, match="same layers and heads"):
        sweep([one, made(layers=(2, 3))], [BOUND])
    with pytest.raises(ValueError, match="layer from 2 on"):
        sweep([made(layers=(0, 1))], [BOUND])


def test_a_stopped_run_loses_nothing_and_repeats_nothing(tmp_path, monkeypatch):
    captured, path = made(), tmp_path / "cells.jsonl"
    calls, limit = [], [5]

    def counted(layer, setting, shares):
        if len(calls) == limit[0]:
            raise KeyboardInterrupt
        calls.append((layer.index, setting))
        return measure(layer, setting, shares)

    monkeypatch.setattr(module, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        sweep([captured], FEW, scratch=path)
    assert len(path.read_text().splitlines()) == 5
    with open(path, "a") as file:
        file.write('["cut sho')  # killed in the middle of a line
    limit[0] = 8
    with pytest.raises(KeyboardInterrupt):
        sweep([captured], FEW, scratch=path)
    assert len(path.read_text().splitlines()) == 8
    limit[0] = -1
    rows = sweep([captured], FEW, scratch=path)
    assert len(calls) == len(set(calls)) == 3 * len(FEW) and not path.exists()
    assert rows == sweep([captured], FEW)


def test_the_scratch_file_is_another_for_other_numbers(tmp_path):
    captured = made()
    assert scratch_path([captured]) == scratch_path([made()])
    names = {scratch_path([captured]), scratch_path([made(seed=1)]), scratch_path([captured, captured]), scratch_path([captured], (1 / 2,))}
    captured.values[0, 0, 0, 0] += 1
    assert len(names | {scratch_path([captured])}) == 5
    cells = Cells(tmp_path / "none" / "cells.jsonl")  # a directory that is not there yet
    assert cells.get("a", lambda: [1]) == [1] and cells.get("a", lambda: pytest.fail("measured twice")) == [1]


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """400 toy samples of 32 skewed positions around 0.5. A percentile interval of so few runs a little short of 95%."""
    covered = 0
    for seed in range(400):
        positions = torch.rand(32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2 * 1.5
        mean, low, high = interval(positions)
        assert low <= mean <= high and mean == pytest.approx(positions.mean().item())
        covered += low <= 0.5 <= high
    assert 0.90 <= covered / 400 <= 0.97


def test_equal_positions_have_no_spread():
    assert interval(torch.full((8,), 0.25, dtype=torch.float64)) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("best", 16), "policy must be one of"),
        (("window", 48), "page_size must be one of"),
        (("pageskip", 16, "median", 16, "max"), "kind must be one of"),
        (("pageskip", 16, "minmax", 32, "max"), "bound_size must be"),
        (("pageskip", 16, "minmax", 16, "mean"), "group must be one of"),
    ],
)
def test_a_setting_that_is_none_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Setting(*arguments)


def test_the_grid_holds_what_is_compared():
    """Cases G12 and G13: every aggregator and every kind is in the ablation."""
    settings = grid()
    assert len(settings) == len(set(settings)) == len({setting.label for setting in settings})
    assert {setting.group for setting in settings if setting.kind == "minmax"} == {"max", "sum", "softmax_sum", "none", "union"}
    assert {setting.kind for setting in settings} == {None, "minmax", "minmax8", "mean_radius", "mean_std", "mean"}
    assert {setting.bound_size for setting in settings if setting.page_size == 64} == {None, 64, 32, 16}


def test_the_command_measures_prints_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    monkeypatch.setattr(module, "SCRATCH", tmp_path / "scratch")
    files = [str(tmp_path / f"{seed}.safetensors") for seed in (0, 5)]
    for seed, file in zip((0, 5), files):
        made(seed=seed, tokens=2000).save(file)
    main(["recall", "--captured", *files, "--record", "here", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    record = records.load("recall", "here")
    assert record == json.loads((tmp_path / "out.json").read_text()) and table(record["rows"]) in printed and ablation(record["rows"]) in printed
    assert record["settings"]["contexts"] == ["seed 0", "seed 5"] and record["settings"]["positions"] == 6 and record["settings"]["layers"] == [0, 2, 3]
    assert {"machine", "date", "method", "model", "dense_layers"} <= set(record["settings"])
    assert all("bound, page 16, " + group in printed for group in ("max", "sum", "own lists")) and "softmax_sum" in ablation(record["rows"])
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_shipped_set_is_the_default(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "SCRATCH", tmp_path)
    main(["recall", "--json", "-"])
    record = json.loads(capsys.readouterr().out)
    assert record["settings"]["model"] == "SmolLM2-135M-Instruct" and record["settings"]["layers"] == [0, 1, 5, 8, 13, 21]
    assert record["rows"] == sweep([Captured.load()])


@pytest.mark.parametrize("name", ["cpu_transcripts", "cpu_jargon"])
def test_the_recorded_sweeps_hold_together(name):
    """Whole grids of 64 positions in 30 layers; at equal bytes no choice keeps more than its page size's oracle, and more bytes keep more."""
    record = records.load("recall", name)
    assert record["settings"]["positions"] == 64 and record["settings"]["layers"] == list(range(30)) and len(set(record["settings"]["contexts"])) == 4
    rows = {(row["label"], row["budget"]): row for row in record["rows"]}
    assert {label for label, _ in rows} == {setting.label for setting in grid()}
    for (label, budget), row in rows.items():
        assert row["read"] <= budget and row["low"] <= row["mass"] <= row["high"] and len(row["per_layer"]) == 30
        assert row["mass"] <= rows[f"oracle, page {row['page_size']}", budget]["mass"]
        assert row["outside_kept"] * row["outside"] == pytest.approx(row["mass"] - (1 - row["outside"]), abs=3e-4)
        assert ("per_head" in row) == (budget == module.HEAT_SHARE)
        more = [other["mass"] for (name, share), other in rows.items() if name == label and share > budget]
        assert all(row["mass"] <= mass for mass in more)


def test_the_command_captures_what_it_is_told(smollm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pageskip_lib.quality.__main__.load_model", lambda name, dtype=None: smollm)
    file = str(tmp_path / "set.safetensors")
    main(["capture", file, "--context", "120", "--steps", "2", "--every", "5", "--layers", "3", "--kv-heads", "2", "--haystack", "jargon", "--seed", "1"])
    captured = Captured.load(file)
    assert captured.queries.shape == (2, 1, 1, 3, 64) and captured.lengths.tolist() == [115, 120] and captured.provenance["context"] == "jargon, seed 1"
    assert "2 steps, 1 layers, 120 tokens" in capsys.readouterr().out


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="^pageskip: .*none.safetensors"):
        main(["recall", "--captured", str(tmp_path / "none.safetensors")])
