"""Figures are pure functions whose titles state what the data says; recall and page mass add up."""

import io

import PIL.Image
import pytest
import torch

from pageskip_lib import figures, reference, runtime
from pageskip_lib.bench import records
from pageskip_lib.cards import CARDS
from pageskip_lib.controls import png, title_of
from pageskip_lib.costs import MODELS, decode_step
from pageskip_lib.quality import grid
from pageskip_lib.quality.recall import mass_curve

def test_page_mass_is_the_softmax_added_up_by_page():
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 64), torch.randn(1, 2, 37, 64)
    mass = reference.page_mass(q, k, 16)
    assert mass.shape == (1, 2, 3)
    assert torch.allclose(mass.sum(-1), torch.ones(1, 2, dtype=torch.float64))
    first_head = torch.softmax(k[0, 0].double() @ q[0, :2].double().T * 64**-0.5, dim=0)
    assert torch.allclose(mass[0, 0, 2], first_head[32:].sum(0).mean())


def test_mass_curve_takes_forced_pages_first_and_ends_at_one():
    mass = torch.tensor([[[0.1, 0.2, 0.3, 0.15, 0.25]]], dtype=torch.float64)
    curve = mass_curve(mass, torch.tensor([[[0.0, 9.0, 5.0, 1.0, 0.0]]]), sink=1, local=1)
    assert curve == pytest.approx([0.1, 0.35, 0.55, 0.85, 1.0])


def test_titles_state_the_finding():
    curves = dict(oracle=[0.5, 0.9, 1.0, 1.0], pageskip=[0.4, 0.8, 0.9, 1.0], window=[0.4, 0.6, 0.7, 1.0])
    assert "2 of 4 pages keep 90% (oracle), 80% (bound), 60% (window) of the attention" == title_of(figures.mass_kept(curves, 0.5, "x"))


def test_axes_have_units_and_captions_say_where_from():
    figure = figures.codes_kept(CODE_POINTS, figures.measured_here(runtime.machine(), "a test"))
    assert "%" in figure.axes[0].get_xlabel()
    assert "Measured here, now" in figure.get_supxlabel()
    recorded = figures.recorded_on(dict(name="NVIDIA H200", torch="2.11", triton="3.6"), "2026-11-30", "x")
    assert recorded == "Recorded on NVIDIA H200 (torch 2.11, Triton 3.6), 2026-11-30: x."


def test_the_needle_map_shows_every_layer_and_token():
    held = {(layer, step): (layer + step) % 4 for layer in range(2, 6) for step in range(3)}
    figure = figures.needle_map(held, 3, ["The", "\n", " "], "title", "x")
    assert figure.axes[0].images[0].get_array().shape == (4, 3)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["The", "\\n", "␣"]


def line(label, bandwidth, start=5.0, sizes=(1e6, 10e6, 1e9)):
    return dict(label=label, bytes=list(sizes), microseconds=[start + x / bandwidth * 1e6 for x in sizes], bandwidth=bandwidth, start=start)


def test_the_roofline_puts_work_on_the_first_cards_roof():
    points = {"attention": 6, "weights, batch 256": 256}
    figure = figures.roofline([CARDS["H200"], CARDS["RTX 4090"]], points, "x")
    assert title_of(figure) == "attention: 6 FLOP per byte, where the H200 needs 206 to be busy"
    assert "attention: 3 FLOP per byte, where the RTX 3090 needs 76" in title_of(figures.roofline([CARDS["RTX 3090"]], {"attention": 3}, "x"))
    axes = figure.axes[0]
    drawn = [(x, y) for one in axes.lines if one.get_marker() == "o" for x, y in zip(one.get_xdata(), one.get_ydata())]
    assert drawn == [(6, pytest.approx(28.8)), (256, pytest.approx(989.4))]
    assert "byte" in axes.get_xlabel() and "FLOP/s" in axes.get_ylabel()


def test_a_time_line_compares_two_slopes_and_marks_live_numbers():
    series = [line("decode", 900e9), line("read", 1e12)]
    assert title_of(figures.time_against_bytes(series, "x", live=False)) == "decode: 900.0 GB/s by its slope; read: 1,000.0 GB/s"
    assert title_of(figures.time_against_bytes(series[::-1], "x", live=True)) == "read: ~1,000.0 GB/s by its slope; decode: ~900.0 GB/s"


def test_a_time_line_is_logarithmic_only_when_it_must_and_labels_what_was_reported():
    wide = figures.time_against_bytes([line("a", 1e12), line("b", 1e12)], "x", live=False, reported=("a card, as reported", (915e9, 945e9)))
    near = figures.time_against_bytes([line("a", 1e12, sizes=(1e6, 2e6)), line("b", 1e12)], "x", live=True)
    assert [figure.axes[0].get_xscale() for figure in (wide, near)] == ["log", "linear"]
    assert "(MB)" in wide.axes[0].get_xlabel() and "(µs)" in wide.axes[0].get_ylabel()
    legends = [[text.get_text() for text in figure.axes[0].get_legend().get_texts()] for figure in (wide, near)]
    assert "a card, as reported" in legends[0] and legends[1] == ["a", "b"]
    (band,) = wide.axes[0].collections
    at_1_mb = [y for x, y in band.get_paths()[0].vertices if x == pytest.approx(1)]
    assert min(at_1_mb) == pytest.approx(1e12 / 945e9) and max(at_1_mb) == pytest.approx(1e12 / 915e9)


def test_step_bars_say_floor_ceiling_and_whether_it_fits():
    shape = MODELS["DeepSeek-R1-Distill-Qwen-1.5B"]
    steps = {f"{tokens:,}": decode_step(shape, 32, tokens) for tokens in (16384, 65536)}
    small, large = (figures.step_bars(steps, CARDS[name], "x") for name in ("RTX 4090", "H200"))
    assert title_of(small) == "63.2 GB a step (1.98 a token): ≥ 62.7 ms, ≤ 510 tokens/s; too big for 24 GB"
    assert title_of(large) == "63.2 GB a step (1.98 a token): ≥ 13.2 ms, ≤ 2,430 tokens/s; fits 141 GB"
    widths = [bar.get_width() for bar in small.axes[0].patches]
    assert widths == pytest.approx([3.087, 15.03, 3.087, 60.13], rel=1e-3)
    notes = [text.get_text().strip() for text in small.axes[0].texts]
    assert notes == ["17.98 ms", "62.72 ms, does not fit"]


def test_rare_colours_survive_the_palette():
    """A thin dashed line keeps its own colour, which a palette by frequency would blend into the rest."""
    steps = {"65,536": decode_step(MODELS["DeepSeek-R1-Distill-Qwen-1.5B"], 32, 65536)}
    picture = PIL.Image.open(io.BytesIO(png(figures.step_bars(steps, CARDS["RTX 4090"], "x")))).convert("RGB")
    assert any(red > 200 and green < 120 and blue < 40 for _, (red, green, blue) in picture.getcolors())


def cache_rows(warm):
    """A cliff at 16 MB: warm GB/s as given left of it, the cold rate of 40 everywhere else."""
    sizes = {512: 0.5e6, 4096: 4e6, 65536: 64e6}
    return [
        dict(tokens=tokens, arm=f"read {how}", kv_bytes=size, gb_per_s=warm if how == "warm" and size < 16e6 else 40)
        for tokens, size in sizes.items()
        for how in ("warm", "cold")
    ]


def launch_rows(eager):
    times = {("one-element add", "eager"): 4, ("one-element add", "graph"): 1, ("dense", "eager"): eager, ("dense", "graph"): 5}
    return [dict(arm=arm, how=how, batch=1, tokens=1024, microseconds=us) for (arm, how), us in times.items()]


def baseline_rows(flash):
    times = {"pageskip dense": 100, "SDPA flash": flash, "SDPA math": 4000}
    rows = [dict(arm=arm, batch=1, tokens=8192, microseconds=us) for arm, us in times.items()]
    return [*rows, dict(arm="SDPA, is_causal", batch=1, tokens=8192, error="is off")]


def cliff(warm, limit=50, tokens=None):
    return figures.bandwidth_cliff(cache_rows(warm), "read", limit, "the datasheet", {"L3": 16e6, "L2": 1e3}, "x", tokens=tokens)


def test_the_cliff_says_what_was_timed():
    assert title_of(cliff(140)) == "0.5 MB: 140 GB/s warm, 40 cold; above the datasheet: the cache was timed"
    assert title_of(cliff(140, limit=200)) == "0.5 MB: 140 GB/s warm, 40 cold; 3.5 times the cold rate: the cache helped"
    assert title_of(cliff(140, tokens=65536)) == "64 MB: 40 GB/s warm, 40 cold; warm and cold agree"
    marks = [text.get_text().strip() for text in cliff(140).axes[0].texts]
    assert marks == ["L3"]  # a cache smaller than every size has no place on the axis


def test_launch_cost_names_the_call_that_suffers_most():
    assert title_of(figures.launch_cost(launch_rows(40), "x")) == "dense, 1 x 1,024: 40 µs from a Python loop, 5.0 µs in a graph"
    assert title_of(figures.launch_cost(launch_rows(10), "x")) == "one-element add, 1 x 1,024: 4 µs from a Python loop, 1.0 µs in a graph"


def test_baseline_bars_show_both_claims_and_no_wrong_baseline():
    figure = figures.baseline_bars(baseline_rows(110), "x")
    assert title_of(figure) == "40.00x over SDPA math, 1.10x over SDPA flash: one kernel"
    assert len(figure.axes[0].patches) == 3
    assert "0.90x over SDPA flash" in title_of(figures.baseline_bars(baseline_rows(90), "x"))


def test_the_box_shows_the_corner_that_the_query_picks():
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -0.5]])
    figure = figures.box_bound(keys, torch.tensor([1.0, 1.0]), "x")
    assert title_of(figure) == "The corner says 2.00, the best key reaches 1.00: 1.00 too much"
    turned = figures.box_bound(keys, torch.tensor([-1.0, -1.0]), "x")
    assert title_of(turned) == "The corner says 1.50, the best key reaches 1.50: 0.00 too much"
    marks = {line.get_label(): (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in figure.axes[0].lines}
    assert marks["bounding corner"] == (1, 1) and marks["best key"] in [(1, 0), (0, 1)]


def test_step_reads_names_the_ratio_now_and_its_ceiling():
    contexts = [1024, 2048, 4096]
    reads = {"whole cache": [64 * t for t in contexts], "summaries of 1/16": [4 * t + 16384 for t in contexts]}
    figure = figures.step_reads(contexts, reads, "x")
    assert title_of(figure) == "summaries of 1/16: 8.0x fewer bytes at 4,096 tokens, 16x at most"
    other = figures.step_reads(contexts, {"whole cache": reads["whole cache"], "1/8": [8 * t for t in contexts]}, "x")
    assert title_of(other) == "1/8: 8.0x fewer bytes at 4,096 tokens, 8x at most"
    assert "MB" in figure.axes[0].get_ylabel() and len(figure.axes[0].lines) == 2


def test_pictures_stay_small():
    assert len(png(figures.codes_kept(grid.summarized(records.load("grid", "h200")["rows"]), "x"))) < 20_000


def test_titles_fit_their_figure():
    parts = ("score", "select", "attend")
    rising = [(n + 1) / 129 for n in range(129)]
    held = {(layer, step): 3 for layer in range(2, 30) for step in range(12)}
    title = "pageskip: ' a secret code that is hidden', all: ' 7491.'; needle's page in 10% of the lists"
    told = {0.5: depth_row("bound in 8 bits of 16, page 64, max", "pageskip", 10, 10, bytes_per_token=165e6)}
    for figure in (
        figures.mass_kept(dict(oracle=rising, pageskip=rising, window=rising), 0.999, "x"),
        figures.codes_kept([dict(point, label=point["label"].replace("8 bits, page 16", "8 bits of 16, page 64")) for point in CODE_POINTS], "x"),
        figures.codes_by_depth(told, told, 0.5, "x"),
        figures.needle_map(held, 3, [" access"] * 12, title, "x"),
        figures.roofline([CARDS["H200"]], {"Decode attention, any batch": 6}, "x"),
        figures.time_against_bytes([line("Dense decode", 4.5678e12), line("plain read", 4.5678e12)], "x", live=True),
        figures.step_bars({"131,072": decode_step(MODELS["Llama-3-8B"], 128, 131072)}, CARDS["RTX 3090"], "x"),
        cliff(12345),
        figures.box_bound(torch.tensor([[-3.0, 2.0], [3.0, -2.0]]), torch.tensor([-20.0, -20.0]), "x"),
        figures.step_reads([1048576, 2097152], {"whole cache": [4096, 8192], "16-token min/max in 8 bits": [33, 65]}, "x"),
        figures.pareto([dict(row, label=row["label"].replace("bound, page 16, max", "mean + 3 std, page 128, union of lists")) for row in recall_rows()], "x"),
        figures.layer_heat([recall_row("mean + 3 std, page 128, union of lists", 1 / 8, 0.8, per_head=[[1.0]] * 4)], [0, 1, 2, 3], "x"),
        figures.kept_pages([1 / 128] * 128, range(100), 16, "bound in 8 bits", "x"),
        figures.agreement(agree_rows(), "x"),
        figures.timelines({name: timeline_events(99) for name in ("eager", "dense", "graph")}, "x"),
        figures.speed_ups(speed_rows((1, 8, 32)), "x"),
        figures.step_lines([dict(arm=arm, tokens=n, microseconds=n / 100) for arm in parts for n in (4096, 131072)], parts, "x"),
        figures.launch_cost([dict(row, arm="score, select, attend") for row in launch_rows(400)], "x"),
        figures.baseline_bars([dict(row, arm=row["arm"].replace("math", "flash, KV expanded before")) for row in baseline_rows(3999)], "x"),
    ):
        figure.draw_without_rendering()
        drawn = next(text for text in figure.texts if text.get_text() == title_of(figure))
        assert drawn.get_window_extent().x1 <= figure.bbox.x1


def shares(ours, cudnn, batch=8, tokens=1024):
    took = {"streaming read": 10.0, "pageskip dense": ours, "SDPA cuDNN": cudnn}
    return [dict(batch=batch, tokens=tokens, arm=arm, microseconds=time, share_of_read=10 / time) for arm, time in took.items()]


def test_dense_shares_counts_who_is_ahead_and_by_how_much_we_lose():
    rows = shares(11, 12) + shares(20, 25, tokens=4096)
    assert title_of(figures.dense_shares(rows, "x")) == "Exact decode is ahead of every peer at 2 of 2 shapes"
    assert title_of(figures.dense_shares(rows + shares(12.6, 12, batch=1), "x")).endswith("at 2 of 3 shapes, at worst 5.0% behind")
    assert title_of(figures.dense_shares(rows + shares(12, 12, batch=1), "x")).endswith("at 2 of 3 shapes, level at the rest")
    refused = dict(batch=8, tokens=1024, arm="FlexAttention", error="no")
    figure = figures.dense_shares([*rows, refused], "x")
    assert [axes.get_title() for axes in figure.axes] == ["batch 8"] and "plain read" in figure.axes[0].get_ylabel()


def test_lines_differ_in_more_than_their_colour():
    rising, parts = [0.2, 1.0], ("score", "select", "attend")
    splits = [dict(batch=batch, tokens=65536, splits=n, microseconds=300.0 / n, chosen=n == 4) for batch in (1, 8) for n in (1, 4)]
    for figure in (
        figures.mass_kept(dict(oracle=rising, pageskip=rising, window=rising), 1, "x"),
        figures.roofline([CARDS["H200"], CARDS["RTX 4090"]], {"attention": 6}, "x"),
        figures.dense_shares(shares(11, 12), "x"),
        figures.splits_time(splits, "x"),
        cliff(140),
        figures.launch_cost(launch_rows(40), "x"),
        figures.box_bound(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]), "x"),
        figures.step_reads([1024, 2048], {"whole cache": [64, 128], "1/8": [8, 16]}, "x"),
        figures.step_lines([dict(arm=arm, tokens=n, microseconds=n / 100) for arm in parts for n in (4096, 131072)], parts, "x"),
        figures.speed_ups(speed_rows((1, 8, 32)), "x"),
    ):
        named = [line for line in figure.axes[0].lines if not line.get_label().startswith("_") and line.get_label() != "keys"]
        looks = {(line.get_linestyle(), line.get_marker()) for line in named}
        assert len(looks) == len(named) > 1, f"{title_of(figure)}: {looks}"


def test_the_split_map_adds_up():
    for rows, tiles, splits, sms in ((16, 512, 8, 132), (16, 512, 9, 132), (3, 7, 5, 4)):
        figure = figures.split_map(rows, tiles, splits, sms, "x")
        bars = figure.axes[0].patches
        assert len(bars) == rows * splits and sum(bar.get_height() for bar in bars) == rows * tiles
        busiest = max(bar.get_y() + bar.get_height() for bar in bars)
        assert title_of(figure).startswith(f"{rows * splits} programs on {sms} SMs: the busiest reads {busiest:g} tiles")
        assert ("SMs idle" in title_of(figure)) == (rows * splits < sms)


def test_the_title_of_splits_says_what_the_rule_lost():
    rows = [dict(batch=1, tokens=65536, splits=n, microseconds=t, chosen=n == 4) for n, t in ((1, 300.0), (2, 100.0), (4, 110.0))]
    title = title_of(figures.splits_time(rows, "x"))
    assert title == "One split: up to 3 times slower than the best. The rule's choice (circle): within 10%"


def test_step_lines_say_what_grows():
    rows = [dict(arm=arm, tokens=n, microseconds=n * slope + 10) for arm, slope in (("score", 0.01), ("attend", 0)) for n in (1000, 16000)]
    figure = figures.step_lines(rows, ("score", "attend"), "x")
    assert title_of(figure) == "1,000 to 16,000 tokens, times as long: score ~8.5, attend ~1.0"
    axes = figure.axes[0]
    assert "(µs)" in axes.get_ylabel() and len(axes.lines) == 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["10", "30", "100"]
    recorded = figures.step_lines(rows, ("score", "attend"), "x", live=False)
    assert title_of(recorded) == "1,000 to 16,000 tokens, times as long: score 8.5, attend 1.0"


def event(name, where, start, duration):
    return dict(name=name, where=where, start_us=start, duration_us=duration)


def timeline_events(scale=1):
    """Two parts of 50 and 40 on the CPU, with a launch in each; the GPU works for 10, and twice for 20, half of it at once."""
    cpu = [event("append", "cpu", 0, 50), event("cudaLaunchKernel", "cpu", 5, 8), event("attend", "cpu", 50, 40), event("cuLaunchKernelEx", "cpu", 60, 8)]
    gpu = [event("copy", "gpu", 20, 10), event("attend kernel", "gpu", 70, 20), event("merge kernel", "gpu", 80, 20)]
    return [dict(one, start_us=scale * one["start_us"], duration_us=scale * one["duration_us"]) for one in cpu + gpu]


def test_a_timeline_says_how_long_and_how_busy():
    """Work that overlaps counts once: 10 + 30 of 100."""
    figure = figures.timelines({"eager": timeline_events(10), "graph": timeline_events()[-3:]}, "x")
    assert title_of(figure) == "GPU busy: eager 40% of 1,000 µs, graph 40% of 100 µs"
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["eager, CPU", "eager, GPU", "graph, CPU", "graph, GPU"]
    assert "microseconds" in axes.get_xlabel() and len(axes.collections) == 10
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["append", "launch", "attend", "GPU work"]
    lanes = {round(bar.get_paths()[0].get_extents().y0 + bar.get_paths()[0].get_extents().y1, 6) / 2 for bar in axes.collections}
    assert lanes == {0, -1, -3.3}  # nothing of the replay's CPU: a part of the lane, not of another one


def test_break_even_is_where_the_last_loss_ends():
    points = [(1024, 1.2), (2048, 1.1), (4096, 0.6), (8192, 0.9), (16384, 1.3), (65536, 5.0)]
    assert figures.break_even(points) == pytest.approx(8192 * 2**0.25)  # a quarter of the way from 0.9 to 1.3
    assert figures.break_even(points[::-1]) == figures.break_even(points)
    assert figures.break_even(points[:2]) == 1024 and figures.break_even([(4096, 1.0), (8192, 2.0)]) == 4096
    assert figures.break_even(points[:4]) is None and figures.break_even([(4096, 0.5)]) is None


def speed_rows(batches=(1, 8), **more):
    values = {1: [(4096, 0.5), (65536, 0.9)], 8: [(4096, 0.75), (16384, 1.25), (65536, 4.0)], 32: [(4096, 2.0), (65536, 16.0)]}
    return [dict(arm="pageskip step", batch=batch, tokens=n, speed_up=times) | more for batch in batches for n, times in values[batch]]


def test_speed_ups_name_the_context_and_who_is_ahead_from_where():
    rows = [*speed_rows((32, 1, 8)), *speed_rows((8,), arm="SDPA cuDNN", speed_up=99.0)]
    figure = figures.speed_ups(rows, "x")
    assert title_of(figure) == "65,536 tokens: 0.90x at batch 1, 4.00x at batch 8, 16.00x at batch 32"
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["batch 1: never ahead", "batch 8: ahead from 8k on", "batch 32: ahead everywhere"]
    assert title_of(figures.speed_ups(rows, "x", tokens=16384)) == "16,384 tokens: 1.25x at batch 8"
    assert title_of(figures.speed_ups(rows, "x", tokens=1024)) == "1,024 tokens: not measured"
    axes = figure.axes[0]
    assert (8192, 1) in [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "|"]
    assert axes.get_ylabel() == "speed-up over SDPA" and axes.get_ylim()[1] < 40
    on_a_gpu = figures.speed_ups([*rows, *speed_rows((8,), arm="SDPA flash", speed_up=1.0)], "x")
    assert on_a_gpu.axes[0].get_ylabel() == "speed-up over SDPA flash"


def test_reported_points_are_hollow_and_said_to_be_reported():
    told = [dict(batch=8, tokens=65536, times=8.1), dict(batch=32, tokens=65536, times=16.4)]
    figure = figures.speed_ups(speed_rows(), "x", reported=told)
    diamonds = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in diamonds] == [([65536], [8.1])]  # no batch 32 of ours to stand beside
    assert diamonds[0].get_fillstyle() == "none" and "as reported" in diamonds[0].get_label()
    assert not [line for line in figures.speed_ups(speed_rows(), "x").axes[0].lines if line.get_marker() == "D"]


def recall_row(label, budget, mass, policy="pageskip", kind="minmax", page_size=16, **more):
    kind = kind if policy == "pageskip" else None
    return dict(label=label, budget=budget, read=0.98 * budget, mass=mass, policy=policy, kind=kind, page_size=page_size, **dict(bound_size=page_size) | more)


def recall_rows(bound=0.8):
    values = {1 / 8: (0.9, bound, 0.7), 1 / 4: (0.95, 0.93, 0.75)}
    return [
        row
        for budget, (oracle, mass, window) in values.items()
        for row in (
            recall_row("oracle, page 16", budget, oracle, "oracle"), recall_row("bound, page 16, max", budget, mass),
            recall_row("window, page 16", budget, window, "window"),
        )
    ]  # fmt: skip


def test_pareto_names_the_best_choice_at_the_budget():
    assert title_of(figures.pareto(recall_rows(), "x")) == "12.5% of the bytes: 80.0% by bound, page 16, max; oracle 90.0%"
    figure = figures.pareto(recall_rows(bound=0.6), "x")
    assert title_of(figure) == "12.5% of the bytes: 70.0% by window, page 16; oracle 90.0%"
    assert title_of(figures.pareto(recall_rows(), "x", budget=1 / 4)) == "25.0% of the bytes: 93.0% by bound, page 16, max; oracle 95.0%"
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines["bound, page 16, max"].get_ydata()) == [0.6, 0.93] and "% of the cache" in figure.axes[0].get_xlabel()
    assert max(lines.values(), key=lambda line: line.get_linewidth()) is lines["window, page 16"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["oracle", "bound", "window", "pages of 16"]
    finer = [*recall_rows(), recall_row("bound of 8, page 16, max", 1 / 8, 0.5, bound_size=8)]
    dashed = [line.get_label() for line in figures.pareto(finer, "x").axes[0].lines if line.get_linestyle() == "--" and line.get_marker() == "o"]
    assert dashed == ["bound of 8, page 16, max"]


def test_every_recorded_setting_has_its_line_and_its_mark():
    rows = records.load("recall", "cpu_transcripts")["rows"]
    figure = figures.pareto(rows, "x")
    assert len(figure.axes[0].lines) == len({row["label"] for row in rows}) + 1  # and the budget's
    marks = [text.get_text() for text in figure.legends[0].get_texts()]
    families = [name for name in dict(figures.FAMILY.values()) if name != "keys in 2 bits"]  # which the sweep was recorded without
    assert marks == families + [f"pages of {size}" for size in (16, 32, 64, 128)] + ["finer bounds"]


def test_kept_pages_adds_up_what_is_read_and_what_could_have_been():
    figure = figures.kept_pages([0.5, 0.0, 0.3, 0.2], [0, 3], 16, "window", "x")
    assert title_of(figure) == "window: 2 of 4 pages keep 70.0% of the attention; the heaviest 2: 80.0%"
    read, unread = figure.axes[0].containers
    assert [bar.get_x() for bar in read] == [0, 48] and [bar.get_height() for bar in unread] == [0.0, 0.3]


def code_point(label, kept, read, policy="pageskip", budget=1 / 4, cells=4, **more):
    about = dict(page_size=16, kind=None, bound_size=16, group=None) | more
    return dict(label=label, policy=policy, kept=kept, known=40, read=read, budget=budget, cells=cells, **about)


CODE_POINTS = [
    code_point("everything", 40, 1.0, "full", 1.0, page_size=None),
    code_point("window, page 16", 0, 0.3, "window"), code_point("window, page 16", 0, 0.2, "window", 1 / 8),
    code_point("bound in 8 bits, page 16, max", 38, 0.28, kind="minmax8", group="max"),
    code_point("bound in 8 bits, page 16, max", 10, 0.18, budget=1 / 8, cells=3, kind="minmax8", group="max"),
    code_point("bound in 8 bits of 16, page 64, sum", 20, 0.27, kind="minmax8", group="sum", page_size=64),
    code_point("bound in 8 bits of 16, page 64, max", 24, 0.27, kind="minmax8", group="max", page_size=64),
    *(code_point(f"pages from 1/{n} on, page 16", kept, read, "adaptive", 1 / 2, kind="minmax8", group="softmax_sum") for n, kept, read in ((8, 39, 0.4), (4, 9, 0.2))),
]  # fmt: skip


def test_codes_kept_names_the_best_at_the_budget():
    figure = figures.codes_kept(CODE_POINTS, "x")
    assert title_of(figure) == "28% of the bytes: bound in 8 bits, page 16, max keeps 95% of the codes; window 0%"
    worse = [dict(point, kept=7) if point["label"] == "bound in 8 bits, page 16, max" else point for point in CODE_POINTS]
    assert "27% of the bytes: bound in 8 bits of 16, page 64, max keeps 60%" in title_of(figures.codes_kept(worse, "x"))
    lines = {line.get_label(): line for line in figure.axes[0].lines if not line.get_label().startswith("_")}
    assert list(lines) == [*lines][:-1] + ["bound in 8 bits, page 16, max"] and len(lines) == 5, "a setting is missing, or the best is not on top"
    assert list(lines["bound in 8 bits, page 16, max"].get_ydata()) == [0.25, 0.95] and list(lines["adaptive lists, page 16"].get_xdata()) == [0.2, 0.4]
    assert {label: line.get_linestyle() for label, line in lines.items() if line.get_linestyle() != "-"} == {
        "bound in 8 bits of 16, page 64, sum": ":", "bound in 8 bits of 16, page 64, max": "--",
    }  # fmt: skip
    assert lines["window, page 16"].get_color() == figures.COLOURS["window"] and lines["bound in 8 bits of 16, page 64, sum"].get_marker() == "^"
    hollow = [list(line.get_xdata()) for line in figure.axes[0].lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert hollow == [[0.18]]
    marks = [text.get_text() for text in figure.legends[0].get_texts()]
    assert marks == ["bound in 8 bits", "window", "adaptive lists", "pages of 16", "pages of 64", "sum of the group", "finer bounds"]


def test_every_recorded_needle_setting_has_its_point():
    points = grid.summarized(records.load("grid", "h200")["rows"])
    drawn = [xy for line in figures.codes_kept(points, "x").axes[0].lines if not line.get_label().startswith("_") for xy in zip(*line.get_data())]
    assert sorted(drawn) == sorted((point["read"], point["kept"] / point["known"]) for point in points if point["policy"] != "full")


def depth_row(label, policy, kept, known=2, **more):
    answers = dict(codes=["1234", "5678"], answers=[" 1234.", " a secret"])
    return dict(label=label, policy=policy, kept=kept, control_right=known, asked=2, context=4096, **answers | dict(bytes_per_token=20e6) | more)


def test_codes_by_depth_says_what_a_small_record_has_not():
    control = {0.5: depth_row("everything", "full", 2)}
    for there in (control, {}):
        figure = figures.codes_by_depth(there, {}, 0.25, "x")
        assert figure.get_suptitle() == "Not in this record: depth 25% of this text, wording and context" and not figure.axes[0].axison


def test_codes_by_depth_speaks_of_the_chosen_depth_and_marks_the_controls_failures():
    control = {0.0: depth_row("everything", "full", 0, 0), 0.5: depth_row("everything", "full", 2, bytes_per_token=80e6)}
    chosen = {0.0: depth_row("window, page 16", "window", 0, 0), 0.5: depth_row("window, page 16", "window", 1)}
    figure = figures.codes_by_depth(control, chosen, 0.5, "x")
    assert title_of(figure) == "window, page 16: 1 of 2 codes at depth 50%, 20.0 of 80.0 MB"
    axes, told = figure.axes
    assert [text.get_text() for text in told.texts] == ["1234: ' 1234.'", "5678: ' a secret'"]
    assert [text.get_color() for text in told.texts] == [figures.HONEST, figures.FLATTERED]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "x"] == [0]
    assert [bar.get_height() for bars in axes.containers for bar in bars] == [0, 0, 2, 1]
    assert "the control itself finds no code" in title_of(figures.codes_by_depth(control, chosen, 0.0, "x"))
    unasked = figures.codes_by_depth(control, {}, 0.5, "x")
    assert title_of(unasked) == "The forced pages alone exceed this budget: not asked" and not unasked.axes[1].texts


def agree_row(label, budget, agreement, policy="pageskip", kind=None, page_size=16):
    return dict(
        label=label, budget=budget, agreement=agreement, low=agreement - 0.02, high=agreement + 0.01, policy=policy, kind=kind, page_size=page_size,
    )  # fmt: skip


def agree_rows(bound=0.95):
    return [
        agree_row("everything, at once", 1.0, 0.999, "full"),
        *(agree_row("window, page 16", budget, 0.9 + budget / 10, "window") for budget in (1 / 8, 1 / 4)),
        *(agree_row("random, page 16", budget, 0.85, "random") for budget in (1 / 8, 1 / 4)),
        *(agree_row("bound in 8 bits, page 64, max", budget, bound, kind="minmax8", page_size=64) for budget in (1 / 8, 1 / 4)),
        agree_row("bound, page 16, max", 1 / 4, 0.93, kind="minmax"),  # at an eighth its summaries leave no room
    ]


def test_agreement_names_the_best_at_the_budget_and_its_rivals():
    figure = figures.agreement(agree_rows(), "x")
    assert title_of(figure) == "Same token at 12.5% of the bytes: bound in 8 bits 95.0%, window 91.2%, random 85.0%"
    assert title_of(figures.agreement(agree_rows(bound=0.8), "x")) == "Same token at 12.5% of the bytes: window 91.2%, random 85.0%"
    assert "25.0% of the bytes: bound 93.0%, window 92.5%" in title_of(figures.agreement(agree_rows(bound=0.8), "x", budget=1 / 4))
    axes = figure.axes[0]
    drawn = {bars.get_label(): bars for bars in axes.containers}
    line, _, (interval,) = drawn["bound in 8 bits, page 64, max"]
    assert list(line.get_ydata()) == [0.95, 0.95] and line.get_marker() == "^" and line.get_color() == figures.COLOURS["pageskip"]
    assert [tuple(end[1] for end in segment) for segment in interval.get_segments()] == [pytest.approx((0.93, 0.96))] * 2
    assert [label for label, bars in drawn.items() if bars[0].get_linestyle() == "--"] == ["bound, page 16, max"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["12.5", "25"] and "bytes" in axes.get_xlabel()
    assert 0.999 in [y for one in axes.lines for y in one.get_ydata()], "no control"


def test_the_heat_map_compares_first_layers_with_the_rest():
    heads = [[0.1, 0.3], [0.2, 0.2], [0.9, 0.7]]
    rows = [recall_row("bound, page 16, max", 1 / 8, 0.8, per_head=heads), recall_row("oracle, page 16", 1 / 8, 0.9, "oracle", per_head=heads[::-1])]
    figure = figures.layer_heat(rows, [0, 1, 13], "x")
    assert title_of(figure) == "Layers below 2 keep 20%, others 80% (bound, page 16, max, 12.5%)"
    assert "Layers below 2 keep 50%, others 20%" in title_of(figures.layer_heat(rows[1:], [0, 1, 13], "x"))
    panels = figure.axes[:2]
    assert [panel.images[0].get_array().shape for panel in panels] == [(2, 3)] * 2
    assert [label.get_text() for label in panels[1].get_xticklabels()] == ["0", "1", "13"]
    assert "oracle, page 16: 90.0% from layer 2 on" == panels[1].get_title(loc="left")


@pytest.mark.parametrize("width", (600, 601))
def test_a_picture_is_what_pillow_would_have_stored(width):
    """Whole and half bytes at the end of a line."""
    figure = figures.kept_pages([0.5, 0.0, 0.3, 0.2], [0, 3], 16, "window", "x")
    figure.set_size_inches(width / figure.dpi, 2)
    full = io.BytesIO()
    figure.savefig(full, format="png")
    few = PIL.Image.open(full).convert("RGB").quantize(16, method=PIL.Image.Quantize.MAXCOVERAGE, dither=PIL.Image.Dither.NONE)
    PIL.Image.open(io.BytesIO(png(figure))).verify()  # checksums; it spends the image
    stored = PIL.Image.open(io.BytesIO(png(figure)))
    assert stored.size == few.size and stored.width == width
    assert stored.convert("RGB").tobytes() == few.convert("RGB").tobytes()
