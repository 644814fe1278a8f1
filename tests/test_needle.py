"""The needle test: where the code is planted, what is counted, and that the answers come from the chosen pages."""

import json

import pytest
import torch

from pageskip_lib import PageList
from pageskip_lib.quality import needle
from pageskip_lib.quality.__main__ import main
from pageskip_lib.quality.policies import FullPolicy, PageskipPolicy, WindowPolicy

from helpers import int32

SHORT = dict(context=600, depth=0.3, budget=0.25, progress=False)


@pytest.fixture(scope="module")
def short_run(smollm):
    return needle.run_needle(*smollm, **SHORT)


def test_the_code_stands_where_the_prompt_says(smollm):
    tokenizer = smollm[1]
    for depth in (0.0, 0.3, 1.0):
        prompt = needle.plant(tokenizer, needle.haystack("jargon"), context=300, depth=depth, code="90210")
        assert len(prompt.body) + len(prompt.question) == 300
        assert tokenizer.decode([prompt.body[i] for i in prompt.code_tokens]) == "90210"
        assert "The vault access code is 90210." in tokenizer.decode(prompt.body)
        assert tokenizer.decode(prompt.question) == needle.QUESTION


def test_a_seed_changes_the_surroundings_and_nothing_else(smollm):
    text, settings = needle.haystack("transcripts"), dict(context=300, depth=0.5, code="1234")
    first, again, other = (needle.plant(smollm[1], text, **settings, seed=seed) for seed in (1, 1, 2))
    assert first == again and first.body != other.body and first.code_tokens == other.code_tokens


@pytest.mark.parametrize("name", needle.HAYSTACKS)
def test_no_haystack_holds_anything_like_a_code(name, smollm):
    text = needle.haystack(name)
    assert not needle.re.search(r"\d{3}", text)
    assert len(smollm[1](text).input_ids) > 40_000


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(depth=1.5), "depth must lie between"),
        (dict(code="74x1"), "1 to 12 digits"),
        (dict(code="2"), "itself contains 2"),
        (dict(context=9000), "at most 8,192"),
        (dict(budget=0.0), "above 0 and at most 1"),
        (dict(budget=0.01), "below its forced pages"),
        (dict(page_size=48), "page_size must be one of"),
    ],
)
def test_bad_settings_are_refused_before_the_model_runs(smollm, change, words, monkeypatch):
    monkeypatch.setattr(needle, "prefill", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=words):
        needle.run_needle(*smollm, **{**SHORT, **change})


def test_a_context_or_haystack_that_is_too_short_is_refused(smollm):
    with pytest.raises(ValueError, match="context must hold at least the needle and the question"):
        needle.plant(smollm[1], needle.haystack("jargon"), context=12, depth=0.5, code="7491")
    with pytest.raises(ValueError, match="The haystack has"):
        needle.plant(smollm[1], "a short text", context=300, depth=0.5, code="7491")


def test_full_attention_and_pageskip_answer_where_the_window_cannot(short_run):
    rows, _ = short_run
    assert {row["policy"]: row["right"] for row in rows} == dict(full=True, pageskip=True, window=False, random=False)
    share = {row["policy"]: row["needle_page_share"] for row in rows}
    assert share["full"] == 1.0 and share["window"] == 0.0 and 0.0 < share["pageskip"] < 1.0


def test_the_run_is_deterministic(smollm, short_run):
    again, _ = needle.run_needle(*smollm, **SHORT)
    strip = lambda rows: [{key: value for key, value in row.items() if key != "seconds_per_token"} for row in rows]  # noqa: E731
    assert strip(again) == strip(short_run[0])


def test_bytes_are_those_of_the_tokens_that_were_read(short_run):
    rows, settings = short_run
    layers, kv_heads, dim, fp32 = 30, 3, 64, 4
    steps = 7 + needle.ANSWER_TOKENS - 1  # seven tokens of question
    mean_tokens = 600 - 7 + (steps + 1) / 2
    read = {row["policy"]: row["bytes_per_token"] for row in rows}
    assert read["full"] == pytest.approx(2 * layers * kv_heads * dim * fp32 * mean_tokens, abs=1)
    assert read["window"] < read["pageskip"] < read["full"]
    # Layers 0 and 1 read everything, the others at most the budget's pages.
    assert read["window"] <= 2 * kv_heads * dim * fp32 * (2 * mean_tokens + 28 * settings["budget_pages"] * 16)


def test_a_partly_filled_page_counts_its_tokens_only():
    pages = PageList.from_rows([[[0, 2], [1, 2]]])
    call = (5, int32([40]), pages)  # 40 tokens: page 2 of size 16 holds 8
    policy = WindowPolicy(needle.Budget(4, 1, 1), page_size=16)
    assert needle.bytes_read(call, policy, kv_heads=2, dim=64, element_size=2) == 2 * (2 * (16 + 8)) * 64 * 2
    bound = PageskipPolicy(needle.Budget(4, 1, 1), page_size=16, kind="minmax")
    assert needle.bytes_read(call, bound, 2, 64, 2) == 2 * (2 * (16 + 8) + 2 * 3) * 64 * 2
    assert needle.bytes_read((0, int32([40]), None), bound, 2, 64, 2) == 2 * 2 * 40 * 64 * 2
    finer = PageskipPolicy(needle.Budget(4, 1, 1), page_size=16, kind="minmax", bound_size=8)  # 5 entries, of two vectors each
    assert needle.bytes_read(call, finer, 2, 64, 2) == 2 * (2 * (16 + 8) + 2 * 5) * 64 * 2
    plain = PageskipPolicy(needle.Budget(4, 1, 1), page_size=16)  # the default, 8 bits: two bytes a dimension, and a scale
    assert needle.bytes_read(call, plain, 2, 64, 2) == 2 * 2 * (16 + 8) * 64 * 2 + 2 * 3 * (2 * 64 + 4)
    radius = PageskipPolicy(needle.Budget(4, 1, 1), page_size=16, kind="mean_radius")  # one vector and 4 bytes
    assert needle.bytes_read(call, radius, 2, 64, 2) == 2 * 2 * (16 + 8) * 64 * 2 + 2 * 3 * (64 * 2 + 4)


def test_rows_of_different_lengths_count_their_own_tokens():
    """By hand: rows of 40 and 21 tokens, and one that holds nothing yet; the mean of what each would read alone."""
    lengths, pages = int32([40, 21, 0]), PageList.from_rows([[[0, 2], [1, 2]], [[0, 1], [1]], [[], []]])
    read = [16 + 8 + 16 + 8, 16 + 5 + 5, 0]  # tokens of both KV heads' lists
    token = 2 * 64 * 2
    window, bound = WindowPolicy(needle.Budget(4, 1, 1)), PageskipPolicy(needle.Budget(4, 1, 1), kind="minmax")
    assert needle.bytes_read((5, lengths, pages), window, 2, 64, 2) == token * sum(read) // 3
    assert needle.bytes_read((5, lengths, pages), bound, 2, 64, 2) == token * (sum(read) + 2 * (3 + 2)) // 3  # an entry is as long as a token
    assert needle.bytes_read((0, lengths, None), bound, 2, 64, 2) == token * 2 * (40 + 21) // 3


def test_a_straddling_code_needs_all_of_its_pages():
    prompt = needle.Prompt(body=[], question=[], code_tokens=range(30, 34))  # pages 1 and 2
    lists = PageList.from_rows([[[0, 1, 2], [0, 1]]]), PageList.from_rows([[[1, 2], [1, 2]]])
    calls = [(2, int32([64]), lists[0]), (0, int32([64]), None), (2, int32([65]), lists[1])]
    assert needle.held_by_step(calls, prompt, WindowPolicy(needle.Budget(4, 1, 1))) == {(2, 0): 1, (2, 1): 2}


@pytest.mark.parametrize("answer, right", [(" 7491.", True), ("7491", True), (" 17491", False), (" 74911", False), (" 3 or 7491", False), (" a secret", False)])
def test_only_the_first_number_counts(answer, right):
    assert needle.is_right(answer, "7491") is right


def test_nothing_exact_leaks_the_code_to_a_blind_policy(smollm):
    """A window that keeps every page but the code's must not answer: the question was never read by exact attention."""
    model, tokenizer = smollm
    prompt = needle.plant(tokenizer, needle.haystack("transcripts"), context=600, depth=0.3, code="7491")

    class AllButTheCode(WindowPolicy):
        def score(self, q, keys, summary):
            scores = super().score(q, keys, summary).clone()
            scores[..., [token // 16 for token in prompt.code_tokens]] = float("-inf")
            return scores

    cache = needle.LiveCache(model.config)
    needle.prefill(model, torch.tensor([prompt.body]), cache)
    blind = AllButTheCode(needle.Budget(60, 1, 2), dense_layers=0)
    assert not needle.is_right(needle.ask(model, tokenizer, prompt, blind, cache)["answer"], "7491")
    assert needle.is_right(needle.ask(model, tokenizer, prompt, FullPolicy(), cache)["answer"], "7491")


def test_the_command_prints_a_table_and_writes_json(smollm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pageskip_lib.quality.__main__.load_model", lambda dtype=None: smollm)
    out = tmp_path / "needle.json"
    main(["needle", "--context", "400", "--depth", "0.5", "--budget", "0.4", "--page-size", "32", "--code", "55", "--seed", "3", "--json", str(out)])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("full", "pageskip", "window", "random", "'55' planted 50% into 400 tokens"))
    result = json.loads(out.read_text())
    for row in result["rows"]:
        assert set(row) == {"policy", "answer", "right", "bytes_per_token", "needle_page_share", "seconds_per_token"}
    settings = result["settings"]
    assert (settings["context"], settings["page_size"], settings["code"], settings["seed"]) == (400, 32, "55", 3)


def test_the_command_says_one_sentence_about_a_mistake(smollm, monkeypatch):
    monkeypatch.setattr("pageskip_lib.quality.__main__.load_model", lambda dtype=None: smollm)
    with pytest.raises(SystemExit, match="^pageskip: depth must lie between 0"):
        main(["needle", "--depth", "7"])


def recorded(name):
    return json.loads((needle.DATA / "recorded" / f"needle_{name}.json").read_text())


def test_the_readme_shows_the_recorded_run():
    readme = " ".join((needle.DATA.parent / "README.md").read_text(encoding="utf-8").split())
    run = recorded("cpu_transcripts_0")
    for row in run["rows"]:
        start = f"| {row['policy']} | {row['answer'].strip()} | {'yes' if row['right'] else 'no'} | {row['bytes_per_token'] / 1e6:.1f} MB |"
        assert f"{start} {row['needle_page_share']:.0%} of the calls |" in readme
    seconds = {row["policy"]: f"{row['seconds_per_token']:.3f} s" for row in recorded("h200_bfloat16")["rows"]}
    assert f"{seconds['full']} with full attention and {seconds['pageskip']} with pageskip on the H200 (bf16)" in readme
    assert run["settings"]["date"] in readme and run["settings"]["machine"]["name"] in readme


@pytest.mark.parametrize("name", ["h200_float16", "h200_bfloat16"])
def test_the_recorded_gpu_runs_gave_the_same_verdicts(name):
    run, here = recorded(name), recorded("cpu_transcripts_0")
    assert run["settings"]["machine"]["kernels"] == "compiled"
    for there, row in zip(run["rows"], here["rows"], strict=True):
        assert (there["policy"], there["right"]) == (row["policy"], row["right"])
        assert there["answer"] == row["answer"] or not row["right"]  # wrong answers lie close together: rounding picks one
