"""Tokens per second of continuous batching: that the arms are what they say, and the numbers add up. How fast it is no test can say."""

import pytest

from pageskip_lib.bench import records, serve
from pageskip_lib.bench.__main__ import main
from pageskip_lib.models import ModelUnavailable

SIZES = dict(requests=2, context=300, tokens=6, batch_tokens=256)


@pytest.fixture(scope="module")
def measured(smollm):
    return serve.measure_serve(*smollm, **SIZES, budget=1.0, rounds=1)


def test_every_arm_answers_and_is_timed(measured):
    rows, settings = measured
    assert [row["arm"] for row in rows] == list(serve.ARMS)
    assert rows[0]["attention"].endswith("sdpa") and [row["attention"] for row in rows[1:]] == 2 * ["pageskip_paged"]
    for row in rows:
        assert 2 * 2 <= row["timed_steps"] <= 2 * 5, "all decode from the last one's first token to the first one's last"
        assert 0 < row["fastest"] <= row["step"] < row["seconds"] and row["tokens_per_second"] == pytest.approx(2 / row["step"])
        assert row["all_tokens_per_second"] == pytest.approx(2 * 6 / row["seconds"])
        assert row["against_plain"] == pytest.approx(rows[0]["step"] / row["step"])
        assert row["right"] == 2 and row["same"] == 2 and "7491" in row["answer"], "the budget holds every page"
    assert (settings["requests"], settings["context"], settings["tokens"], settings["budget_pages"]) == (2, 300, 6, 18)


def test_steps_count_while_everybody_decodes():
    assert serve.steps_together([[0, 1, 3, 6], [2, 4, 5, 9]]) == [3, 2, 1]
    assert serve.steps_together([[0, 1], [2, 3]]) == []


def test_the_table_says_it_all(measured):
    lines = serve.table(measured[0]).splitlines()
    assert len(lines) == 4
    for row, line in zip(measured[0], lines[1:]):
        assert all(text in line for text in (row["arm"], row["attention"], f"{1e3 * row['step']:.1f}", f"{row['tokens_per_second']:.1f}", "7491"))


def test_an_engine_that_fails_is_no_measurement(smollm, monkeypatch):
    monkeypatch.setattr(serve.PageskipPolicy, "score", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="answered 0 of 2 requests; the first error: division by zero"):
        serve.measure_serve(*smollm, **SIZES, budget=1.0, rounds=0)


def test_what_does_not_fit_is_refused(smollm):
    with pytest.raises(ValueError, match="8,200 tokens.*8,192"):
        serve.measure_serve(*smollm, **SIZES | dict(context=8190, tokens=10))


def test_the_command_counts_records_and_says_when_there_is_no_model(smollm, measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    ticks, sizes = [], []
    monkeypatch.setattr(serve, "load_model", lambda: smollm)
    monkeypatch.setattr(serve, "serve", lambda model, inputs, policy, **options: sizes.append((len(inputs), len(inputs[0]))) or CANNED)
    serve.run_serve(progress=lambda: ticks.append(1))
    assert len(ticks) == len(sizes) == serve.measurements() and set(sizes) == {(3, 1500)}
    main(["serve", "--record", "here"])
    assert "pageskip, all pages" in capsys.readouterr().out and len(records.load("serve", "here")["rows"]) == 3

    def missing():
        raise ModelUnavailable("no model here")

    monkeypatch.setattr(serve, "load_model", missing)
    with pytest.raises(SystemExit, match="pageskip: no model here"):
        main(["serve"])


CANNED = dict(answers=[[1, 2]] * 3, attention="sdpa", seconds=2.0, step=0.5, steps=8)


def test_what_the_readme_and_notebook_09_say_of_the_records_is_so():
    readme = " ".join((records.RECORDED.parent.parent / "README.md").read_text(encoding="utf-8").split())
    notebook = (records.RECORDED.parent.parent / "notebooks" / "09_living_cache.ipynb").read_text(encoding="utf-8")
    for name, sizes, number in (("h200", (8, 8000), "eight"), ("cpu", (3, 1500), "three")):
        record = records.load("serve", name)
        plain, everything, skipping = (next(row for row in record["rows"] if row["arm"] == arm) for arm in serve.ARMS)
        assert (record["settings"]["requests"], record["settings"]["context"]) == sizes
        assert f"{number} requests of {sizes[1]:,} tokens" in readme
        assert f"a step took {1e3 * skipping['step']:.0f} ms where the engine with SDPA took {1e3 * plain['step']:.0f}, and {1e3 * everything['step']:.0f} when" in readme
        assert f"was {everything['against_plain']:.2f} times the engine" in notebook
        assert name == "cpu" or f"gained nothing ({skipping['against_plain']:.2f})" in notebook and skipping["step"] > everything["step"]
    assert skipping["against_plain"] < 1, "a loss, on the CPU"
