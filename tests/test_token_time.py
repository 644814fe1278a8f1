"""The price model of notebook 09: it finds prices that are there, sees only what it says it sees, and is checked on recorded points."""

import pytest

from pageskip_lib import Budget, figures_living, token_time
from pageskip_lib.bench import generate, records, step
from pageskip_lib.cards import CARDS
from pageskip_lib.controls import title_of
from pageskip_lib.costs import MODELS, decode_step

SMOL, QWEN, LLAMA = MODELS.values()
H200, BUDGET, PAGE = CARDS["H200"], Budget(pages=32), 64
READS = dict(products=(3.0, 3e6), exact=(6.0, 4e6), selection=(5.0, 2e6), listed=(7.0, 3.5e6))
PRICES = token_time.Prices(**{name: token_time.Read(*read) for name, read in READS.items()}, small=8.0)


def predicted(shape, batch, tokens, dense_layers=2, prices=PRICES, card=H200):
    return token_time.predict(prices, shape, batch, tokens, budget=BUDGET, page_size=PAGE, card=card, dense_layers=dense_layers)


def test_a_read_that_is_a_line_is_found():
    true = token_time.Read(4.5, 3.2e6)
    found = token_time.fit_read([(size, times, true(size, times)) for size, times in ((1e6, 1), (5e8, 100), (3e9, 7))])
    assert (found.start, found.rate) == (pytest.approx(4.5), pytest.approx(3.2e6))


def test_small_and_large_reads_count_alike():
    """The errors are relative: a large read is met as well as two small ones that disagree leave room for, and those are met halfway."""
    found = token_time.fit_read([(0, 1, 5.0), (0, 1, 6.0)] + [(1e10, 1, 5000.0)])
    assert 5.0 < found.start < 6.0 and found(1e10) == pytest.approx(5000, rel=1e-6)


def test_bytes_are_those_of_the_benchmark_and_of_the_cache():
    for heads in ((12, 2, 128), (9, 3, 64)):
        exact, summaries, listed = token_time.layer_bytes(*heads[1:], 8, 65536, BUDGET, PAGE)
        assert summaries + listed == step.step_bytes(8, 65536, heads, 2)
        assert exact == 32 * listed == 8 * 65536 * 2 * heads[1] * heads[2] * 2
    assert QWEN.layers * token_time.layer_bytes(2, 128, 8, 65536, BUDGET, PAGE)[0] == decode_step(QWEN, 8, 65536).cache


def test_every_part_by_hand():
    parts = predicted(QWEN, 8, 65536)
    exact, summaries, listed = token_time.layer_bytes(2, 128, 8, 65536, BUDGET, PAGE)
    assert list(parts) == list(token_time.PARTS)
    assert parts["weights"] == pytest.approx(113 * 3.0 + 2 * QWEN.parameters_read / 3e6)
    assert parts["attention"] == pytest.approx(2 * (6 + exact / 4e6) + 26 * (7 + listed / 3.5e6))
    assert parts["selection"] == pytest.approx(26 * (5 + summaries / 2e6)) and parts["small kernels"] == 28 * 8.0


def test_exact_attention_and_short_contexts_select_nothing():
    exact = predicted(QWEN, 8, 65536, QWEN.layers)
    assert exact["selection"] == 0 and exact["attention"] > 3 * predicted(QWEN, 8, 65536)["attention"]
    assert predicted(QWEN, 1, 8192) == predicted(QWEN, 1, 8192, QWEN.layers)
    assert predicted(QWEN, 8, 65536, 0)["attention"] < predicted(QWEN, 8, 65536)["attention"]


def test_another_card_reads_faster_and_begins_as_late():
    moved = PRICES.on(CARDS["RTX 4090"], H200)
    assert moved.exact.rate == pytest.approx(4e6 * 1008 / 4800) and moved.exact.start == 6.0 and moved.small == 8.0
    assert PRICES.on(H200, H200) == PRICES


def test_a_recorded_name_finds_its_shape():
    assert token_time.model_named("SmolLM2-135M-Instruct") is SMOL and token_time.model_named(generate.RANDOM) is QWEN


def test_what_cannot_be_fitted_or_found_is_one_sentence():
    for points in ([], [(1e6, 1, 5.0)], [(1e6, 1, 5.0), (2e6, 2, 10.0)]):
        with pytest.raises(ValueError, match=r"two reads of different sizes at least, got \[.*\]\.$"):
            token_time.fit_read(points)
    with pytest.raises(ValueError, match="must begin as one of SmolLM2-135M, .*, got 'GPT-2'"):
        token_time.model_named("GPT-2")
    with pytest.raises(ValueError, match="batch must be an int"):
        predicted(QWEN, 0, 8192)


@pytest.fixture(scope="module")
def recorded():
    return records.load("step", "h200")["rows"], records.load("generate", "h200")["rows"]


def test_the_fit_sees_one_sequence_of_each_model_and_no_attention(recorded):
    steps, tokens = recorded
    prices = token_time.fit(steps, tokens, BUDGET, PAGE)
    seen = token_time.fitted_rows(tokens)
    assert [(row["model"], row["batch"], row["tokens"]) for row in seen] == [("SmolLM2-135M-Instruct", 1, 8192), (generate.RANDOM, 1, 65536)]
    times = "microseconds", "products", "rest", "attention"
    worse = [row | (dict(attention=1e9, microseconds=1e9) if row in seen else {name: 9 * row[name] for name in times if name in row}) for row in tokens]
    assert token_time.fit(steps, worse, BUDGET, PAGE) == prices
    slower = [row | {name: 2 * row[name] for name in ("products", "rest")} if row in seen else row for row in tokens]
    assert token_time.fit(steps, slower, BUDGET, PAGE).small == pytest.approx(2 * prices.small)


def errors(recorded):
    """{(model, batch, tokens): ([error of exact, pageskip, pageskip in every layer], error of the gain, seen by the fit)}."""
    steps, tokens = recorded
    prices, seen, found = token_time.fit(steps, tokens, BUDGET, PAGE), token_time.fitted_rows(tokens), {}
    for at in dict.fromkeys((row["model"], row["batch"], row["tokens"]) for row in tokens):
        shape, off = token_time.model_named(at[0]), []
        arms = {row["arm"]: row for row in tokens if (row["model"], row["batch"], row["tokens"]) == at}
        for arm, layers in ((generate.OURS, shape.layers), (generate.SERVED, 2), (generate.EVERY, 0)):
            off.append(sum(predicted(shape, *at[1:], layers, prices).values()) / arms[arm]["microseconds"] - 1)
        found[at] = off, (1 + off[0]) / (1 + off[1]) - 1, arms[generate.OURS] in seen
    return found


def test_what_notebook_09_says_of_its_prediction_is_so(recorded):
    found = errors(recorded)
    unseen = {at: max(map(abs, off)) for at, (off, _, seen) in found.items() if not seen}
    assert len(unseen) == 5 and max(unseen.values()) < 0.1
    assert max(abs(gain) for _, gain, _ in found.values()) <= max(unseen.values())  # the gain is no worse
    assert max(unseen, key=unseen.get) == (generate.RANDOM, 1, 262144)
    assert max(row["tokens"] for row in recorded[0]) == 262144 // 2
    gain = lambda shape, *at: sum(predicted(shape, *at, shape.layers).values()) / sum(predicted(shape, *at).values())  # noqa: E731
    assert gain(LLAMA, 8, 65536) > gain(QWEN, 8, 65536) and gain(SMOL, 8, 65536) > gain(QWEN, 8, 65536)
    assert round(LLAMA.parameters_read / QWEN.parameters_read) == 5 and round(LLAMA.kv_bytes() / QWEN.kv_bytes(), 1) == 4.6
    for batch, even in ((1, 26000), (32, 3000)):
        above, below = int(1.1 * even), int(0.9 * even)
        assert predicted(QWEN, batch, above)["selection"] > 0 == predicted(QWEN, batch, below)["selection"]


def test_what_notebook_09_says_of_the_record_is_so(recorded):
    steps, tokens = recorded
    arms = {(row["model"].split("-")[0], row["batch"], row["tokens"], row["arm"]): row for row in tokens}
    took = lambda *key: arms[key]["microseconds"]  # noqa: E731
    large = "DeepSeek", 32, 65536
    best = min(took(*large, arm) for arm in ("pageskip dense", "SDPA flash", "SDPA cuDNN"))
    served, every, none = (took(*large, arm) for arm in (generate.SERVED, generate.EVERY, generate.NONE))
    assert 0.87 < 1 - none / best < 0.93  # nine tenths
    alone = {row["arm"]: row["microseconds"] for row in steps if token_time.place(row) == (12, 128, 32, 65536)}
    selection = 26 * (alone["score"] + alone["select"])
    assert 0.4 < (served - none - selection) / served < 0.5  # nearly half
    assert 0.4 < (served - every) / (served - none) < 0.6  # two layers are about half of attention
    assert 1.28 < served / every < 1.4  # a third as much again
    single = "DeepSeek", 1, 65536
    assert 0.67 < took(*single, generate.NONE) / took(*single, "pageskip dense") < 0.75  # more than two thirds
    for batch, most in ((1, True), (8, True), (32, False)):
        assert (took("SmolLM2", batch, 8192, generate.NONE) / took("SmolLM2", batch, 8192, generate.SERVED) > 0.5) == most
    slow = {row["policy"]: 1e6 * row["seconds_per_token"] for row in records.load("needle", "h200_bfloat16")["rows"]}
    assert 20 < slow["full"] / took("SmolLM2", 1, 8192, "pageskip dense") < 30 and 2.7 < slow["pageskip"] / slow["full"] < 3
    assert records.load("needle", "h200_bfloat16")["settings"]["context"] == 4096
    cpu = {row["arm"]: row["seconds"] for row in records.load("live", "cpu")["rows"]}
    copied, uncopied, *skipping = cpu.values()
    assert uncopied < copied and all(seconds > uncopied for seconds in skipping)
    assert not arms["SmolLM2", 1, 8192, generate.SERVED]["selects"] and abs(arms["SmolLM2", 1, 8192, generate.SERVED]["speed_up_best"] - 1) < 0.02
    gains = {key[:3]: row["speed_up_best"] for key, row in arms.items() if key[3] == generate.SERVED}
    assert max(gains, key=gains.get) == large and min(gains, key=gains.get) == ("SmolLM2", 1, 8192)


def test_the_box_of_the_last_page_is_what_the_title_speaks_of():
    figure = figures_living.box_walk([0.0, 1.0, -1.0, 5.0, 6.0], [(-1.0, 1.0), (5.0, 5.0)], 3, 4, "x")
    assert title_of(figure) == "4 of 5 tokens kept: the box of page 1 is [5.00, 5.00] over 1 tokens"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["in the cache", "rolled back"]
    assert len(figure.axes[0].collections) == 2


def test_bars_share_the_exact_tokens_time():
    exact, skipping = (dict(zip(token_time.PARTS, parts)) for parts in ((100, 700, 0, 200), (100, 100, 100, 200)))
    figure = figures_living.token_bars({"a": (skipping, skipping), "b": (exact, skipping)}, "x")
    assert title_of(figure) == "b: 1.00 ms a token, 0.50 with pageskip, 2.00x; attention 70% before"
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths[:8] == pytest.approx([0.1, 0.7, 0, 0.2, 0.1, 0.1, 0.1, 0.2])  # the last shape is drawn first, at the bottom
    assert [text.get_text() for text in figure.axes[0].texts] == ["1,000 µs", "500 µs", "500 µs", "500 µs"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(token_time.PARTS)


def test_errors_count_what_the_fit_has_not_seen():
    point = lambda arm, predicted, fitted: dict(label="a", arm=arm, recorded=100.0, predicted=predicted, fitted=fitted)  # noqa: E731
    points = [point(generate.OURS, 190.0, True), point(generate.SERVED, 110.0, False), point(generate.EVERY, 98.0, False)]
    figure = figures_living.prediction_errors(points, "x")
    assert title_of(figure) == "2 points that the fit has not seen: off by 10% at most, 6% on average"
    drawn = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert {(line.get_fillstyle(), round(x, 6)) for line in drawn for x in line.get_xdata()} == {("none", 0.9), ("full", 0.1), ("full", -0.02)}
    assert figure.axes[0].get_xlim()[1] > 0.9
