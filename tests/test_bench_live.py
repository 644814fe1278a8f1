"""Tokens per second of generate(): that the arms are what they say, and the numbers add up. How fast it is no test can say."""

import pytest
import torch

from pageskip_lib.bench import live, records
from pageskip_lib.bench.__main__ import main
from pageskip_lib.live_model import LiveCache, prefill
from pageskip_lib.models import ModelUnavailable

from transformers import DynamicCache


@pytest.fixture(scope="module")
def measured(smollm):
    return live.measure_live(*smollm, context=300, budget=1.0, tokens=6, rounds=2)


def test_every_arm_answers_and_is_timed(measured):
    rows, settings = measured
    assert [row["arm"] for row in rows] == [live.PLAIN, live.UNCOPIED, "pageskip, all pages", "pageskip, minmax", "pageskip, minmax8"]
    for row in rows:
        assert row["timed_tokens"] == 2 * 5, "from one token to the next"
        assert 0 < row["fastest"] <= row["seconds"] == pytest.approx(1 / row["tokens_per_second"])
        assert row["against_plain"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
        assert (row["answer"], row["right"]) == (rows[0]["answer"], True), "the budget holds every page"
    assert settings["context"] == 300 and settings["budget_pages"] == 18 and settings["dtype"] == "float32"


def test_the_table_says_it_all(measured):
    lines = live.table(measured[0]).splitlines()
    assert len(lines) == 6 and all(row["arm"] in line and "7491" in line and "(right)" in line for row, line in zip(measured[0], lines[1:]))
    wrong = [dict(row, right=False) for row in measured[0]]
    assert live.table(wrong).count("(wrong)") == 5


def test_each_arm_gets_its_own_cache_and_attention(smollm, monkeypatch):
    model, tokenizer = smollm
    seen, generate = [], type(model).generate

    def spy(self, *args, **options):
        cache = options[live.cache_argument(self)]
        seen.append((type(cache), cache.get_seq_length(), self.config._attn_implementation))
        return generate(self, *args, **options)

    monkeypatch.setattr(type(model), "generate", spy)
    live.measure_live(model, tokenizer, context=200, budget=0.5, tokens=2, rounds=2, kinds=("minmax",))
    arms = [(DynamicCache, 199, "sdpa"), (LiveCache, 199, "sdpa"), (LiveCache, 199, "pageskip"), (LiveCache, 199, "pageskip")]
    assert seen == 2 * arms


def test_the_copy_is_one(smollm):
    model, tokenizer = smollm
    cache = LiveCache(model.config)
    prefill(model, torch.tensor([tokenizer("One, two, three, four, five.").input_ids]), cache)
    copy = live.copied(cache, model.config)
    for one, other in zip(cache.layers, copy.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        assert one.keys.data_ptr() != other.keys.data_ptr() and one.values.data_ptr() != other.values.data_ptr()


def test_what_does_not_fit_is_refused(smollm):
    with pytest.raises(ValueError, match="8,200 tokens.*8,192"):
        live.measure_live(*smollm, context=8190, tokens=10)


def test_the_command_counts_records_and_says_when_there_is_no_model(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    calls = []
    monkeypatch.setattr(live, "load_model", lambda: ("model", "tokenizer"))
    monkeypatch.setattr(live, "measure_live", lambda *given, progress: calls.append(given) or measured)
    main(["live", "--record", "here"])
    assert calls == [("model", "tokenizer")] and "pageskip, minmax8" in capsys.readouterr().out
    assert records.load("live", "here")["rows"] == measured[0]

    def missing():
        raise ModelUnavailable("no model here")

    monkeypatch.setattr(live, "load_model", missing)
    with pytest.raises(SystemExit, match="pageskip: no model here"):
        main(["live"])


def test_the_bar_counts_to_its_end(smollm):
    ticks = []
    live.measure_live(*smollm, context=200, budget=0.5, tokens=2, progress=lambda: ticks.append(1))
    assert len(ticks) == live.measurements()


def test_the_readme_shows_the_recorded_run():
    """Also what flatters nobody: without a single page skipped, not copying the cache gains more."""
    record = records.load("live", "cpu")
    seconds = {row["arm"]: row["seconds"] for row in record["rows"]}
    text = " ".join((records.RECORDED.parent.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"takes {seconds[live.PLAIN]:.3f} s a token by transformers' SDPA, {seconds[live.UNCOPIED]:.3f} s when the cache" in text
    assert f"and {seconds['pageskip, minmax8']:.3f} s with pageskip at an eighth of the pages" in text
    settings = record["settings"]
    assert settings["context"] == 7000 and settings["budget"] == 1 / 8 and settings["threads"] == 2 and settings["date"] in text
    assert all(row["right"] for row in record["rows"])
