"""Agreement with full attention on plain text: what is compared, that a batch reads as each stretch would alone, and that a stopped run goes on."""

import json
import math

import pytest
import torch
from tqdm.auto import tqdm

from pageskip_lib.bench import records
from pageskip_lib.live_model import LiveCache, prefill, step, use_pageskip
from pageskip_lib.quality import agree
from pageskip_lib.quality.__main__ import main
from pageskip_lib.quality.policies import FullPolicy, PageskipPolicy, RandomPolicy
from pageskip_lib.quality.recall import Setting
from pageskip_lib.selection import Budget

CONTEXT, TOKENS = 200, 32
FEW = (Setting("random", 16), Setting("pageskip", 16, "minmax8", 16, "max"))
SMALL = dict(context=CONTEXT, tokens=TOKENS, stretches_each=2, settings=FEW, shares=(0.6,), progress=False)


@pytest.fixture
def reading(qwen):
    model, tokenizer = qwen
    with torch.inference_mode():
        yield agree.Reading(model, agree.stretches(tokenizer, "jargon", 2, CONTEXT + TOKENS + 1), CONTEXT, tqdm(disable=True))


def test_the_default_run_compares_two_thousand_tokens():
    assert agree.TOKENS * agree.STRETCHES * len(agree.HAYSTACKS) >= 2000 and agree.SHARES == (1 / 16, 1 / 8, 1 / 4, 1 / 2)
    assert {(one.policy, one.kind, one.page_size) for one in agree.SETTINGS} == {
        ("window", None, 16), ("random", None, 16), ("pageskip", "minmax8", 16), ("pageskip", "minmax8", 64), ("pageskip", "minmax", 16),
    }  # fmt: skip


def test_stretches_do_not_overlap(qwen):
    ids = torch.tensor(qwen[1](agree.haystack("jargon"), add_special_tokens=False).input_ids)
    found = agree.stretches(qwen[1], "jargon", 3, len(ids) // 3)
    assert torch.equal(found.flatten(), ids[: found.numel()])
    assert torch.equal(agree.stretches(qwen[1], "jargon", 3, 50)[2], ids[2 * (len(ids) // 3) :][:50])


def test_what_is_compared():
    """Two rows: the first prefers another token than full attention, the second is a shifted copy, which is the same distribution."""
    exact = torch.tensor([[0.0, math.log(3)], [1.0, 2.0]])
    logits = torch.tensor([[math.log(3), 0.0], [5.0, 6.0]])
    same, loss, kl = agree.compared(logits, exact, torch.tensor([1, 0])).tolist()
    assert same == [0, 1]
    assert loss == pytest.approx([math.log(4), math.log(1 + math.e)])
    assert kl == pytest.approx([0.75 * math.log(3) - 0.25 * math.log(3), 0], abs=1e-6)


def test_full_attention_agrees_with_itself_and_its_loss_is_transformers_own(qwen, reading):
    cell, control = reading.cell(FullPolicy()), reading.cell(None)
    assert set(cell["agreement"]) == {1.0} and set(cell["kl"]) == {0.0} and cell["loss"] == cell["full"]
    logits = qwen[0](reading.ids).logits[:, CONTEXT:-1]
    following = reading.ids[:, CONTEXT + 1 :].flatten()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following, reduction="none").unflatten(0, (2, TOKENS))
    # A logit is off by up to 64 errors of 2^-22 of the largest (as in test_live_model), a loss by up to twice that.
    close = 2 * 64 * 2**-22 * logits.abs().max().item()
    for found in (cell, control):
        assert found["loss"] == pytest.approx(losses.mean(1).tolist(), abs=close, rel=1e-5)  # stored with six digits
    assert max(control["kl"]) < close and min(control["agreement"]) > 0.9


def test_a_cell_is_what_each_stretch_would_give_alone(qwen, reading):
    """Read again by hand, one stretch at a time, the policy's keys staying in the cache for the tokens after."""
    model, _ = qwen
    policy = PageskipPolicy(Budget(7), dense_layers=0)
    cell = reading.cell(policy)
    for row, ids in enumerate(reading.ids):
        cache = LiveCache(model.config)
        prefill(model, ids[None, :CONTEXT], cache)
        same = []
        with use_pageskip(model, policy):
            for n, token in enumerate(ids[CONTEXT:-1]):
                same.append(step(model, token[None, None], cache).argmax() == reading.exact[0][n][row].argmax())
        assert cell["agreement"][row] == pytest.approx(torch.stack(same).float().mean().item(), abs=1 / TOKENS)  # one near tie
    assert min(cell["kl"]) > 1e-3, "the policy left no trace"


def test_rows_hold_what_they_promise(qwen):
    rows, settings = agree.run_agree(*qwen, **SMALL, texts=("jargon", "transcripts"))
    assert [(row["policy"], row["budget"], row["tokens"]) for row in rows] == [("full", 1.0, 128), ("random", 0.6, 128), ("pageskip", 0.6, 128)]
    full, random, bound = rows
    of_a_token = 2 * 2 * 128 * 4  # of one layer, in fp32
    mean = CONTEXT + (TOKENS + 1) / 2
    assert full["bytes_per_token"] == round(3 * of_a_token * mean)
    for row, entries in ((random, 0), (bound, sum(-(-(CONTEXT + 1 + n) // 16) for n in range(TOKENS)) / TOKENS)):
        most = 2 * of_a_token * mean + 16 * 7 * of_a_token + entries * 2 * (2 * 128 + 4)  # two dense layers, a third that chooses
        assert most - 16 * of_a_token < row["bytes_per_token"] < most
    for row in rows:
        assert row["low"] <= row["agreement"] <= row["high"] and row["full_perplexity"] == full["full_perplexity"]
        texts = row["by_text"].values()
        assert row["agreement"] == pytest.approx(sum(text["agreement"] for text in texts) / 2, abs=1e-4)
        assert math.log(row["perplexity"]) == pytest.approx(sum(math.log(text["perplexity"]) for text in texts) / 2, abs=1e-3)
    assert full["kl"] < 1e-3 < min(random["kl"], bound["kl"]) and max(random["agreement"], bound["agreement"]) < full["agreement"]
    assert (settings["context"], settings["tokens_each"], settings["stretches_each"]) == (CONTEXT, TOKENS, 2)
    assert f"{random['agreement']:.1%}" in agree.table(rows) and "random, page 16" in agree.table(rows)


def test_budgets_without_room_for_the_forced_pages_have_no_row(qwen):
    model, _ = qwen
    found = agree.arms(model, 2048, (Setting("window", 16), Setting("pageskip", 16, "minmax", 16, "max")), (1 / 32, 1 / 8))
    assert [(about["policy"], about["budget"]) for about, _ in found] == [("full", 1.0), ("window", 1 / 8), ("pageskip", 1 / 8)]


def test_a_stopped_run_loses_no_finished_cell(qwen, tmp_path, monkeypatch):
    """And gives the same rows as one that was not stopped, random pages included."""
    options = SMALL | dict(settings=FEW[:1], stretches_each=1, texts=("jargon", "transcripts"))
    expected, _ = agree.run_agree(*qwen, **options)
    real, asked = agree.Reading.cell, []

    def cell(reading, policy):
        asked.append(policy)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return real(reading, policy)

    monkeypatch.setattr(agree.Reading, "cell", cell)
    options["scratch"] = tmp_path / "cells.jsonl"
    with pytest.raises(KeyboardInterrupt):
        agree.run_agree(*qwen, **options)
    rows, _ = agree.run_agree(*qwen, **options)
    assert rows == expected and len(asked) == 5 and isinstance(asked[-1], RandomPolicy) and not options["scratch"].exists()


def test_the_scratch_file_changes_with_the_run(qwen):
    model, _ = qwen
    assert agree.scratch_path(model, tokens=32) == agree.scratch_path(model, tokens=32) != agree.scratch_path(model, tokens=64)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(tokens=33), "tokens must be a multiple of 32"),
        (dict(tokens=0), "tokens must be a multiple of 32"),
        (dict(context=1), "context of 2 tokens or more"),
        (dict(stretches_each=0), "1 stretch or more"),
        (dict(shares=(0.5, 1.5)), r"shares must lie above 0 and at most at 1, got \[0.5, 1.5\]"),
        (dict(shares=()), "shares must lie"),
        (dict(context=2030), "reads at most 2,048"),
        (dict(stretches_each=5000), "stretches of 233 need"),
        (dict(texts=("novel",)), "haystack must be one of"),
    ],
)
def test_bad_wishes_are_refused_before_anything_is_read(qwen, change, words, monkeypatch):
    monkeypatch.setattr(agree, "Reading", None)
    with pytest.raises(ValueError, match=words):
        agree.run_agree(*qwen, **SMALL | change)


def test_the_command_takes_a_model_by_name_prints_and_records(qwen_directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    monkeypatch.setattr(agree, "SCRATCH", tmp_path)
    monkeypatch.setattr(agree, "SETTINGS", FEW[1:])
    given = ["--texts", "jargon", "--context", "200", "--tokens", "32", "--stretches", "1", "--shares", "0.6"]
    main(["agree", "--model", str(qwen_directory), *given, "--record", "here", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert "bound in 8 bits, page 16, max" in printed and "prefilled exactly" in printed
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == records.load("agree", "here")["rows"]
    assert {row["tokens"] for row in records.load("agree", "here")["rows"]} == {32}


def test_what_the_readme_and_notebook_09_say_of_the_record_is_so():
    readme = " ".join((records.RECORDED.parent.parent / "README.md").read_text(encoding="utf-8").split())
    record = records.load("agree", "cpu")
    rows = {(row["label"], row["budget"]): row for row in record["rows"]}
    best, window = "bound in 8 bits, page 16, max", "window, page 16"
    eighth, quarter = ([f"{rows[label, share]['agreement']:.1%}" for label in (best, window)] for share in (1 / 8, 1 / 4))
    assert f"in {eighth[0]} of the places at an eighth of the bytes, where the window's is in {eighth[1]}" in readme
    assert f"in {quarter[0]} against {quarter[1]} at a quarter" in readme
    lost = [f"{rows[label, share]['perplexity']:.2f} and {rows[label, 1 / 4]['perplexity']:.2f}" for label, share in ((best, 1 / 8), (window, 1 / 8))]
    assert f"perplexity {lost[0]} against {lost[1]}; {rows[best, 1 / 4]['full_perplexity']:.2f} with everything" in readme
    assert {row["tokens"] for row in record["rows"]} == {2048} and "Over 2,048 tokens" in readme and record["settings"]["context"] == 2048
    # 09: one token in six at an eighth, level with the window there; little for half
    assert abs(1 - rows[best, 1 / 8]["agreement"] - 1 / 6) < 0.01 and rows[window, 1 / 8]["low"] < rows[best, 1 / 8]["agreement"] < rows[window, 1 / 8]["high"]
    assert rows[best, 1 / 2]["agreement"] > 0.96 and rows[best, 1 / 8]["perplexity"] < rows[window, 1 / 8]["perplexity"] - 0.5
