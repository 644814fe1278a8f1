"""Every figure of the notebooks: a pure function of data that returns a matplotlib Figure.

The title states the finding, the caption says where the data comes from (``measured_here`` or ``recorded_on``).
Colours are Okabe and Ito's, which colour-blind readers can tell apart; lines differ in their style or marker as well.
"""

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from .quality.needle import is_right

COLOURS = {
    "full": "#4d4d4d",
    "oracle": "#009E73",
    "pageskip": "#0072B2",
    "window": "#E69F00",
    "random": "#CC79A7",
    "coarse": "#882255",
}
STYLES, MARKERS = ("-", "--", ":", "-."), "os^DvPX"
FLATTERED, HONEST = "#D55E00", "#0072B2"  # the number that flatters and the one beside it
LABELS = {
    "full": "full attention",
    "oracle": "oracle (true mass)",
    "pageskip": "pageskip (page bound)",
    "window": "sliding window",
    "random": "random pages",
}


def measured_here(machine, what):
    """Caption of a figure whose data this session produced. machine: a ``runtime.Machine``."""
    kind = "CUDA GPU" if machine.device == "cuda" else "CPU"
    return f"Measured here, now, on this machine's {kind}: {what}."


def recorded_on(machine, when, what):
    """Caption of a figure drawn from a recorded run. machine: its ``Machine.as_dict()``; when: ISO date."""
    return f"Recorded on {machine['name']} (torch {machine['torch']}, Triton {machine['triton']}), {when}: {what}."


def _blank(title, caption, height=3.4):
    figure = Figure(figsize=(7.2, height), dpi=80, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=7.5, color="#555555", x=0.01, ha="left")
    return figure, axes


def mass_kept(curves, share, caption):
    """How much attention mass the first pages of each ranking hold.

    curves: {policy: [mass kept by the best 1, 2, ... N pages]} for oracle, pageskip and window; share: the budget to mark, 0 to 1.
    """
    pages = len(curves["oracle"])
    budget = max(1, int(share * pages))
    oracle, bound, window = (curves[policy][budget - 1] for policy in ("oracle", "pageskip", "window"))
    title = f"{budget} of {pages} pages keep {oracle:.0%} (oracle), {bound:.0%} (bound), {window:.0%} (window) of the attention"
    figure, axes = _blank(title, caption)
    for (policy, kept), style in zip(curves.items(), STYLES):
        axes.plot([(n + 1) / pages for n in range(pages)], kept, color=COLOURS[policy], linestyle=style, label=LABELS[policy])
    axes.axvline(budget / pages, color="#999999", linewidth=0.8, linestyle="--")
    axes.set(xlabel="share of the pages read", ylabel="attention mass kept", xlim=(0, 1), ylim=(0, 1.02))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    return figure


def needle_map(held, kv_heads, tokens, title, caption):
    """In which layers, and at which step, the selection held the needle's page.

    held: {(layer, step): KV heads whose list held it}; layers without an entry read everything. tokens: the text of each step.
    """
    layers = sorted({layer for layer, _ in held})
    figure, axes = _blank(title, caption, height=4.4)
    counts = [[held[layer, step] for step in range(len(tokens))] for layer in layers]
    image = axes.imshow(
        counts, aspect="auto", cmap=colormaps["Blues"].resampled(kv_heads + 1), vmin=-0.5, vmax=kv_heads + 0.5, origin="lower",
        extent=(-0.5, len(tokens) - 0.5, layers[0] - 0.5, layers[-1] + 0.5),
    )  # fmt: skip
    axes.set_xticks(range(len(tokens)), [repr(token)[1:-1].replace(" ", "␣") for token in tokens], rotation=45, ha="right", fontsize=8)
    axes.set(xlabel="token whose query asks (its step predicts the next token)", ylabel="layer")
    bar = figure.colorbar(image, ax=axes, ticks=range(kv_heads + 1))
    bar.set_label("KV heads that hold the needle's page")
    return figure


SERIES = ("#0072B2", "#4d4d4d", "#E69F00")


def roofline(cards, points, caption):
    """What a card can compute at a given number of FLOP per byte, and where the work stands.

    cards: ``CardFacts``; the points lie on the first one's roof. points: {what: FLOP per byte}; the title speaks of the first.
    """
    first, ((what, intensity), *_) = cards[0], points.items()
    title = f"{what}: {intensity:.0f} FLOP per byte, where the {first.name} needs {first.ridge:.0f} to be busy"
    figure, axes = _blank(title, caption, height=3.8)
    span = [0.05, max(6 * max(points.values()), 2000)]
    for card, colour, style in zip(cards, ("#4d4d4d", "#E69F00", "#CC79A7"), STYLES):
        corners = [span[0], card.ridge, span[1]]
        axes.plot(corners, [min(x * card.bandwidth, card.fp16_flops) / 1e12 for x in corners], color=colour, linestyle=style, label=card.name)
    for what, intensity in points.items():
        reached = min(intensity * first.bandwidth, first.fp16_flops) / 1e12
        axes.plot(intensity, reached, "o", color=COLOURS["pageskip"])
        above = (0, 7) if intensity > first.ridge else (-7, 2)  # on the slope there is room to the left only
        axes.annotate(
            what, (intensity, reached), xytext=above, textcoords="offset points", ha="center" if intensity > first.ridge else "right", fontsize=8.5,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=span, ylim=(None, 3 * first.fp16_flops / 1e12))
    axes.set(xlabel="FLOP per byte read", ylabel="TFLOP/s at most (fp16)")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    return figure


def time_against_bytes(series, caption, *, live, reported=None):
    """Time of a call against the bytes it must read, points and fitted line; logarithmic when they span more than two decades.

    series: dicts with label, bytes and microseconds (lists), bandwidth (bytes/s, of the fitted line) and start (its microseconds at 0 bytes);
    the title compares the first two. live: measured in this session, so the title marks its numbers with the ~ that the notebooks' checks
    skip. reported: (label, [low, high] bytes/s) that somebody else published, drawn as a band.
    """
    ours = series[0]
    slopes = [f"{'~' * live}{one['bandwidth'] / 1e9:,.1f} GB/s" for one in series[:2]]
    title = f"{ours['label']}: {slopes[0]} by its slope; {series[1]['label']}: {slopes[1]}"
    figure, axes = _blank(title, caption, height=3.8)
    least, most = min(ours["bytes"]), max(ours["bytes"])
    wide = most > 100 * least
    steps = [least * (most / least) ** (n / 60) for n in range(61)] if wide else [0, most]
    if reported:
        label, (low, high) = reported
        edges = [[x / rate * 1e6 for x in steps] for rate in (high, low)]
        axes.fill_between([x / 1e6 for x in steps], *edges, color=COLOURS["random"], alpha=0.7, linewidth=0, label=label)
    for one, colour, marker in zip(series, SERIES, "os^"):
        axes.plot([x / 1e6 for x in one["bytes"]], one["microseconds"], marker, color=colour, markersize=4.5, label=one["label"])
        axes.plot([x / 1e6 for x in steps], [one["start"] + x / one["bandwidth"] * 1e6 for x in steps], color=colour, linewidth=0.9)
    axes.set(xlabel="keys and values the call must read (MB)", ylabel="time of one call (µs)")
    axes.set(xscale="log", yscale="log") if wide else axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    return figure


def step_bars(steps, card, caption):
    """Bytes that a decode step reads, weights and cache, with the time floor beside each bar.

    steps: {context as text: ``Step``}, the last one is what the title speaks of. card: ``CardFacts``.
    """
    asked = list(steps.values())[-1]
    title = (
        f"{asked.bytes / 1e9:,.1f} GB a step ({asked.bytes / asked.tokens / 1e9:,.2f} a token): ≥ {asked.floor(card) * 1e3:,.1f} ms, "
        f"≤ {asked.ceiling(card):,.0f} tokens/s; {'fits' if asked.fits(card) else 'too big for'} {card.memory_bytes / 1e9:.0f} GB"
    )
    figure, axes = _blank(title, caption, height=2.8)
    for label, step in steps.items():
        weights, cache = step.weights / 1e9, step.cache / 1e9
        first = step is asked
        axes.barh(label, weights, color=COLOURS["full"], height=0.6, label="weights" if first else None)
        axes.barh(label, cache, left=weights, color=COLOURS["pageskip"], height=0.6, label="KV cache" if first else None)
        note = f" {step.floor(card) * 1e3:,.2f} ms" + ("" if step.fits(card) else ", does not fit")
        axes.annotate(note, (weights + cache, label), xytext=(3, 0), textcoords="offset points", va="center", fontsize=9)
    right = 1.4 * max(step.bytes for step in steps.values()) / 1e9
    axes.set(xlabel="GB read in one decode step", ylabel="tokens in each cache", xlim=(0, right))
    if card.memory_bytes / 1e9 < right:
        axes.axvline(card.memory_bytes / 1e9, color="#D55E00", linewidth=1, linestyle="--", label=f"memory of the {card.name}")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    return figure


ARM_COLOURS = {
    "pageskip dense": "#0072B2", "SDPA cuDNN": "#E69F00", "SDPA flash": "#4d4d4d", "FlashInfer": "#009E73", "FA3": "#CC79A7",
    "FlexAttention": "#999999", "SDPA": "#4d4d4d",
}  # fmt: skip


def dense_shares(rows, caption):
    """Exact decode as a share of the machine's own read rate, a panel a batch size.

    rows: of one head shape and dtype, as ``bench.dense`` makes them.
    """
    timed = [row for row in rows if "share_of_read" in row and row["arm"] in ARM_COLOURS]
    ours = {(row["batch"], row["tokens"]): row["microseconds"] for row in timed if row["arm"] == "pageskip dense"}
    best = {
        shape: min(row["microseconds"] for row in timed if (row["batch"], row["tokens"]) == shape and row["arm"] != "pageskip dense")
        for shape in ours
    }  # fmt: skip
    ahead, behind = sum(best[shape] > ours[shape] for shape in ours), max(ours[shape] / best[shape] for shape in ours)
    rest = "" if ahead == len(ours) else ", level at the rest" if behind < 1.0005 else f", at worst {behind - 1:.1%} behind"
    title = f"Exact decode is ahead of every peer at {ahead} of {len(ours)} shapes{rest}"
    figure, axes = _blank(title, caption, height=3.8)
    axes.remove()
    batches = sorted({row["batch"] for row in timed})
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for batch, panel in zip(batches, panels):
        for arm, marker in zip(dict.fromkeys(row["arm"] for row in timed), MARKERS):
            points = sorted((row["tokens"], row["share_of_read"]) for row in timed if (row["batch"], row["arm"]) == (batch, arm))
            wide = arm == "pageskip dense"
            look = dict(color=ARM_COLOURS[arm], marker=marker, markersize=4)
            panel.plot(*zip(*points), linewidth=2.2 if wide else 1, zorder=3 if wide else 2, label=arm, **look)
        panel.axhline(1, color="#999999", linewidth=0.8, linestyle="--")
        panel.set(title=f"batch {batch}", xlabel="context (tokens)", xscale="log", ylim=(0, 1.05))
        panel.title.set_fontsize(9)
        panel.set_xticks([1024, 8192, 65536], ["1k", "8k", "64k"])
        panel.minorticks_off()
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of a plain read of the same bytes")
    panels[0].yaxis.set_major_formatter(PercentFormatter(1))
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    return figure


def split_map(rows, tiles, splits, sms, caption):
    """Which SM reads how many tiles, when ``rows`` caches of ``tiles`` tiles are each dealt out to ``splits`` programs.

    Programs go to the SMs in turn, as long as there are any, which is how a GPU places programs of equal length.
    """
    shares = [tiles // splits + (split < tiles % splits) for split in range(splits)]
    stacks = [[] for _ in range(sms)]
    for program in range(rows * splits):
        stacks[program % sms].append((program // splits, shares[program % splits]))
    busiest = max(sum(share for _, share in stack) for stack in stacks)
    idle = sum(not stack for stack in stacks)
    title = f"{rows * splits} programs on {sms} SMs: the busiest reads {busiest:,} tiles, an even share is {rows * tiles / sms:,.1f}"
    figure, axes = _blank(title + (f"; {idle} SMs idle" if idle else ""), caption, height=2.5)
    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
    for sm, stack in enumerate(stacks):
        bottom = 0
        for row, share in stack:
            axes.bar(sm, share, bottom=bottom, width=1, color=colours[row % 4], edgecolor="white", linewidth=0.5)
            bottom += share
    axes.axhline(rows * tiles / sms, color="#000000", linewidth=0.8, linestyle="--")
    axes.set(xlabel="SM (neighbouring caches in different colours)", ylabel="tiles to read", xlim=(-0.5, sms - 0.5))
    return figure


def splits_time(rows, caption):
    """Time against the number of splits. rows: as ``bench.dense.run_splits`` makes them; the library's own choice has chosen=True."""
    by_shape = {}
    for row in rows:
        by_shape.setdefault((row["batch"], row["tokens"]), []).append(row)
    fastest = {shape: min(row["microseconds"] for row in points) for shape, points in by_shape.items()}
    ratio = {(shape, row["splits"]): row["microseconds"] / fastest[shape] for shape, points in by_shape.items() for row in points}
    chosen = {shape: next(row["splits"] for row in points if row["chosen"]) for shape, points in by_shape.items()}
    unsplit, lost = max(ratio[shape, 1] for shape in by_shape), max(ratio[choice] for choice in chosen.items()) - 1
    title = f"One split: up to {unsplit:.0f} times slower than the best. The rule's choice (circle): within {lost:.0%}"
    figure, axes = _blank(title, caption, height=2.5)
    for colour, marker, (shape, points) in zip(("#0072B2", "#E69F00", "#009E73", "#CC79A7"), MARKERS, by_shape.items()):
        counts = [row["splits"] for row in points]
        label = f"{shape[0]} x {shape[1]:,} ({fastest[shape]:.1f} µs)"
        axes.plot(counts, [ratio[shape, n] for n in counts], marker=marker, markersize=4, color=colour, label=label)
        axes.plot(chosen[shape], ratio[shape, chosen[shape]], marker="o", markersize=10, fillstyle="none", color=colour)
    axes.set(xlabel="splits of each KV head's cache", ylabel="time over the fastest", xscale="log", yscale="log")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64, 128, 256], [1, 2, 4, 8, 16, 32, 64, 128, 256])
    axes.set_yticks([1, 2, 5, 10, 20, 50], [1, 2, 5, 10, 20, 50])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8, title="batch x context (fastest)", title_fontsize=8)
    return figure


def bandwidth_cliff(rows, kernel, limit, limit_name, caches, caption, *, tokens=None):
    """Bytes per second against the size of the KV cache, warm and cold: left of the cliff the warm loop times the cache.

    rows: the cache trap's, as ``bench.pitfalls`` makes them. kernel: "read" or "dense". limit: the GB/s that the memory can deliver, limit_name:
    who says so. caches: {"L2": bytes}, marked where the sizes reach them. tokens: the context to point at (default: the best warm rate).
    """
    rate = {(row["tokens"], row["arm"]): row["gb_per_s"] for row in rows if "gb_per_s" in row}
    size = {row["tokens"]: row["kv_bytes"] / 1e6 for row in rows if (row["tokens"], f"{kernel} warm") in rate}
    tokens = tokens or max(size, key=lambda n: rate[n, f"{kernel} warm"])
    warm, cold = (rate[tokens, f"{kernel} {how}"] for how in ("warm", "cold"))
    if warm > limit:
        verdict = f"above {limit_name}: the cache was timed"
    elif warm > 1.1 * cold:
        verdict = f"{warm / cold:.1f} times the cold rate: the cache helped"
    else:
        verdict = "warm and cold agree"
    figure, axes = _blank(f"{size[tokens]:.3g} MB: {warm:,.0f} GB/s warm, {cold:,.0f} cold; {verdict}", caption)
    for how, colour, marker in (("warm", FLATTERED, "^"), ("cold", HONEST, "o")):
        label = f"{how} ({'same inputs again and again' if how == 'warm' else 'rotated past the cache'})"
        axes.plot(list(size.values()), [rate[n, f"{kernel} {how}"] for n in size], color=colour, marker=marker, markersize=4, label=label)
        axes.plot([size[tokens]], [rate[tokens, f"{kernel} {how}"]], color=colour, marker="o", markersize=10, fillstyle="none")
    axes.axhline(limit, color="#4d4d4d", linewidth=0.8, linestyle="--", label=f"{limit:,.0f} GB/s: {limit_name}")
    axes.set(xlabel="keys and values read by a call (MB)", ylabel="bytes over time (GB/s)", xscale="log", ylim=(0, None))
    for name, capacity in caches.items():
        if min(size.values()) <= capacity / 1e6 <= max(size.values()):
            axes.axvline(capacity / 1e6, color="#999999", linewidth=0.8, linestyle=":")
            axes.annotate(f" {name}", (capacity / 1e6, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8, color="#555555")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend(frameon=False, fontsize=8, loc="lower center")
    return figure


def launch_cost(rows, caption):
    """The same calls from a Python loop and inside a CUDA graph. rows: the launch trap's of a GPU, as ``bench.pitfalls`` makes them."""
    took = {(row["arm"], row["batch"], row["tokens"], row["how"]): row["microseconds"] for row in rows if "microseconds" in row}
    calls = sorted({call[:3] for call in took}, key=lambda call: (call[0] != "one-element add", *call), reverse=True)
    arm, batch, tokens = worst = max(calls, key=lambda call: took[*call, "eager"] / took[*call, "graph"])
    eager, graph = took[*worst, "eager"], took[*worst, "graph"]
    figure, axes = _blank(f"{arm}, {batch} x {tokens:,}: {eager:.0f} µs from a Python loop, {graph:.1f} µs in a graph", caption, height=3.8)
    for how, colour, marker, label in (("eager", FLATTERED, "^", "from a Python loop"), ("graph", HONEST, "o", "inside one CUDA graph")):
        axes.plot([took[*call, how] for call in calls], range(len(calls)), marker, color=colour, label=label, zorder=2)
    for place, call in enumerate(calls):
        ends = sorted((took[*call, "graph"], took[*call, "eager"]))
        axes.plot(ends, [place] * 2, color="#bbbbbb", linewidth=3, zorder=1)
        for value, shift, side in ((ends[0], -7, "right"), (ends[1], 7, "left")):
            text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            axes.annotate(text, (value, place), xytext=(shift, 0), textcoords="offset points", va="center", ha=side, fontsize=8)
    axes.set_yticks(range(len(calls)), [f"{arm}, {batch} x {tokens:,}" for arm, batch, tokens in calls], fontsize=8)
    axes.set(xlabel="microseconds per call", xscale="log", xlim=(min(took.values()) / 2, 3 * max(took.values())))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def baseline_bars(rows, caption):
    """Dense decode and its possible baselines at one shape, with the speed-up that each would let us claim.

    rows: the baseline trap's of one shape, as ``bench.pitfalls`` makes them; a baseline with an error gets no bar.
    """
    took = {row["arm"]: row["microseconds"] for row in rows if "microseconds" in row}
    ours, *others = took
    worst, best = max(others, key=took.get), min(others, key=took.get)
    claims = [f"{took[name] / took[ours]:.2f}x over {name}" for name in (worst, best)]
    figure, axes = _blank(f"{claims[0]}, {claims[1]}: one kernel", caption, height=2.8)
    for arm in sorted(took, key=took.get, reverse=True):
        axes.barh(arm, took[arm], color=HONEST if arm in (ours, best) else FLATTERED, height=0.6)
        claim = "" if arm == ours else f"  ({took[arm] / took[ours]:.2f}x)"
        axes.annotate(f"{took[arm]:,.0f}{claim}", (took[arm], arm), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set(xlabel="microseconds per call", xlim=(0, 1.3 * took[worst]))
    return figure


def box_bound(keys, q, caption):
    """A page of 2-D keys, the box around them, and the corner that bounds q.k. keys: [P, 2], q: [2], both tensors."""
    low, high = keys.amin(0), keys.amax(0)
    corner, best = [high[d] if q[d] > 0 else low[d] for d in (0, 1)], keys[(keys @ q).argmax()]
    bound, reached = float(q[0] * corner[0] + q[1] * corner[1]), float(best @ q)
    figure, axes = _blank(f"The corner says {bound:.2f}, the best key reaches {reached:.2f}: {bound - reached:.2f} too much", caption, height=3)
    across, up = (high - low).tolist()
    axes.plot(low[0] + across * low.new_tensor([0, 1, 1, 0, 0]), low[1] + up * low.new_tensor([0, 0, 1, 1, 0]), color="#4d4d4d", linewidth=1)
    axes.plot(*keys.T, "o", color="#999999", label="keys")
    for point, colour, marker, label in ((corner, FLATTERED, "s", "bounding corner"), (best, HONEST, "o", "best key")):
        # Everything on the dashed line has the same product with q.
        axes.axline([float(x) for x in point], [float(point[0] - q[1]), float(point[1] + q[0])], color=colour, linewidth=0.8, linestyle="--")
        axes.plot(*[float(x) for x in point], marker, color=colour, markersize=9, label=label)
    axes.quiver(0, 0, float(q[0]), float(q[1]), angles="xy", scale_units="xy", scale=1, width=0.008, label="query")
    axes.set(xlabel="dimension 0", ylabel="dimension 1", xlim=(-3, 3), ylim=(-2, 2), xticks=(-2, 0, 2), yticks=(-2, 0, 2), aspect="equal")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def step_reads(contexts, reads, caption):
    """Bytes that one step reads over the context, for several ways to choose pages.

    contexts: tokens, ascending. reads: {label: bytes at each context}; the first one reads the whole cache, the title speaks of the second.
    """
    whole, asked = list(reads)[:2]
    now = reads[whole][-1] / reads[asked][-1]
    limit = (reads[whole][-1] - reads[whole][-2]) / (reads[asked][-1] - reads[asked][-2])
    title = f"{asked}: {now:.1f}x fewer bytes at {contexts[-1]:,} tokens, {limit:.0f}x at most"
    figure, axes = _blank(title, caption, height=2.5)
    for (label, sizes), colour, style in zip(reads.items(), ("#4d4d4d", "#0072B2", "#E69F00", "#CC79A7"), STYLES):
        axes.plot(contexts, [size / 1e6 for size in sizes], color=colour, linestyle=style, label=label)
    axes.set(xlabel="context (tokens)", ylabel="MB read in a step", xscale="log", yscale="log")
    axes.set_xticks(contexts[::3], [f"{tokens // 1024}k" for tokens in contexts[::3]])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


STEP_COLOURS = {"pageskip step": "#0072B2", "pageskip dense": "#4d4d4d", "score": "#E69F00", "select": "#CC79A7", "attend": "#009E73"}


def step_lines(rows, arms, caption, *, live=True):
    """Time against context for some arms of the step, as ``bench.step`` measures them; the title says how much each grows.

    live: the numbers are this machine's, and get the tilde that says so.
    """
    took = {arm: sorted((row["tokens"], row["microseconds"]) for row in rows if row["arm"] == arm) for arm in arms}
    contexts = [tokens for tokens, _ in took[arms[0]]]
    tilde = "~" if live else ""
    grown = ", ".join(f"{arm.removeprefix('pageskip ')} {tilde}{points[-1][1] / points[0][1]:.1f}" for arm, points in took.items())
    figure, axes = _blank(f"{contexts[0]:,} to {contexts[-1]:,} tokens, times as long: {grown}", caption)
    for (arm, points), marker in zip(took.items(), MARKERS):
        axes.plot(*zip(*points), marker=marker, markersize=4, color=STEP_COLOURS[arm], label=arm)
    axes.set(xlabel="context (tokens)", ylabel="time of one call (µs)", xscale="log", yscale="log")
    axes.set_xticks(contexts, [f"{tokens:,}" for tokens in contexts])
    axes.minorticks_off()
    times = [time for points in took.values() for _, time in points]
    ticks = [step * 10**n for n in range(-1, 7) for step in (1, 3) if min(times) / 1.5 <= step * 10**n <= 1.5 * max(times)]
    axes.set_yticks(ticks, [f"{tick:,.12g}" for tick in ticks])
    axes.legend(frameon=False, fontsize=8)
    return figure


FAMILY = {
    "oracle": ("oracle", COLOURS["oracle"]),
    "minmax8": ("bound in 8 bits", "#56B4E9"),
    "minmax": ("bound", COLOURS["pageskip"]),
    "mean_radius": ("mean + radius", "#000000"),
    "mean_std": ("mean, mean + 3 std", "#555555"),  # one grey, and the caption's: a picture is stored in 16 colours
    "mean": ("mean, mean + 3 std", "#555555"),
    "coarse": ("keys in 2 bits", COLOURS["coarse"]),
    "window": ("window", COLOURS["window"]),
    "random": ("random", COLOURS["random"]),
}
PAGE_MARKERS = {16: "o", 32: "s", 64: "^", 128: "D"}


def pareto(rows, caption, *, budget=1 / 8):
    """Attention mass kept against bytes read, one line a setting; the best one without an oracle at ``budget`` is drawn thick, on top.

    rows: as ``quality.sweep`` makes them. budget: the one that the title speaks of. Colour tells what ranks the pages, the marker the page size;
    dashed: bounds finer than a page. What settings differ in besides has no mark of its own.
    """
    lines = {}
    for row in rows:
        lines.setdefault(row["label"], []).append(row)
    there = {label: next((row for row in line if row["budget"] == budget), None) for label, line in lines.items()}
    kept = {label: row["mass"] for label, row in there.items() if row}
    oracle = max(row["mass"] for row in there.values() if row and row["policy"] == "oracle")
    best = max((label for label in kept if there[label]["policy"] != "oracle"), key=kept.get)
    title = f"{budget:.1%} of the bytes: {kept[best]:.1%} by {best}; oracle {oracle:.1%}"
    figure, axes = _blank(title, caption, height=3.1)
    marks = {}
    for label, line in sorted(lines.items(), key=lambda item: kept.get(item[0], 0)):
        first, top = line[0], label == best
        name, colour = FAMILY[first["kind"] or first["policy"]]
        marker = PAGE_MARKERS[first["page_size"]]
        size = dict(zorder=3, markersize=7, linewidth=2.6) if top else dict(zorder=2, markersize=4, linewidth=0.9)
        points = [row["read"] for row in line], [row["mass"] for row in line]
        finer = first["bound_size"] != first["page_size"] and first["policy"] == "pageskip"
        # not antialiased: fewer shades of many colours, and the picture is stored in 16
        axes.plot(*points, color=colour, marker=marker, linestyle="--" if finer else "-", label=label, antialiased=False, **size)
        marks[name] = dict(color=colour)
        marks[f"pages of {first['page_size']}"] = dict(color="#000000", marker=marker, linestyle="none", markersize=4)
        if finer:
            marks["finer bounds"] = dict(color="#000000", linestyle="--", linewidth=0.9)
    axes.axvline(budget, color="#555555", linewidth=0.8, linestyle="--")
    axes.set(xlabel="bytes read, summaries included (% of the cache)", ylabel="attention mass kept", xscale="log")
    ticks = sorted({row["budget"] for row in rows})
    axes.set_xticks(ticks, [f"{100 * tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    known = [*dict(FAMILY.values()), *(f"pages of {size}" for size in PAGE_MARKERS), "finer bounds"]
    shown = [name for name in known if name in marks]
    figure.legend([Line2D([], [], **marks[name]) for name in shown], shown, frameon=False, fontsize=8, loc="outside right center")
    return figure


def codes_kept(points, caption, *, budget=1 / 4):
    """Codes kept of those that the control finds, against bytes read, one line a setting; the best one at ``budget`` is drawn thick, on top.

    points: as ``quality.grid.summarized`` makes them. budget: the one that the title speaks of. Colour tells the policy or what ranks the pages,
    the marker the page size; dotted: the group's scores are added; dashed: bounds finer than a page; hollow: not asked in every cell, since the
    forced pages alone are too many there.
    """
    control = next(point for point in points if point["policy"] == "full")
    lines = {}
    for point in points:
        name = f"adaptive lists, page {point['page_size']}" if point["policy"] == "adaptive" else point["label"]
        if point is not control:
            lines.setdefault(name, []).append(point)
    share = lambda point: point["kept"] / point["known"]  # noqa: E731
    there = {name: point for name, line in lines.items() for point in line if point["budget"] == budget}
    best = max(there, key=lambda name: share(there[name]))
    title = f"{there[best]['read']:.0%} of the bytes: {best} keeps {share(there[best]):.0%} of the codes; window {share(there['window, page 16']):.0%}"
    figure, axes = _blank(title, caption, height=2.75)
    marks = {}
    for name, line in sorted(lines.items(), key=lambda item: item[0] == best):
        line = sorted(line, key=lambda point: point["read"])
        first, adaptive = line[0], line[0]["policy"] == "adaptive"
        kind, colour = ("adaptive lists", FLATTERED) if adaptive else FAMILY[first["kind"] or first["policy"]]
        marker, finer = PAGE_MARKERS[first["page_size"]], first["policy"] == "pageskip" and first["bound_size"] != first["page_size"]
        style = ":" if first["group"] == "sum" else "--" if finer else "-"
        wide = name == best or first["policy"] == "window"  # the window would lie hidden under random pages
        size = dict(zorder=3 if name == best else 1, markersize=7, linewidth=2.4) if wide else dict(zorder=2, markersize=4.5, linewidth=0.9)
        # not antialiased: fewer shades of many colours, and the picture is stored in 16
        look = dict(color=colour, marker=marker, antialiased=False, **size)
        axes.plot([point["read"] for point in line], [share(point) for point in line], linestyle=style, label=name, **look)
        some = [point for point in line if point["cells"] < control["cells"]]
        axes.plot([point["read"] for point in some], [share(point) for point in some], linestyle="none", markerfacecolor="white", **look)
        marks[kind] = dict(color=colour)
        marks[f"pages of {first['page_size']}"] = dict(color="#000000", marker=marker, linestyle="none", markersize=4)
        for there_is, mark, its in ((style == ":", "sum of the group", ":"), (style == "--", "finer bounds", "--")):
            if there_is:
                marks[mark] = dict(color="#000000", linestyle=its, linewidth=0.9)
    axes.set(xlabel="bytes read, summaries included (% of the control's)", ylabel="codes kept", ylim=(-0.03, 1.03))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    known = [*dict(FAMILY.values()), "adaptive lists", *(f"pages of {size}" for size in PAGE_MARKERS), "sum of the group", "finer bounds"]
    shown = [name for name in known if name in marks]
    figure.legend([Line2D([], [], **marks[name]) for name in shown], shown, frameon=False, fontsize=8, loc="outside right center")
    return figure


def codes_by_depth(control, chosen, depth, caption):
    """Codes found at every depth of one text, wording and context, beside what the control finds; at ``depth`` the answers as they came.

    control, chosen: {depth: row}, rows as ``quality.grid.run_grid`` returns them; chosen is empty where the setting's forced pages exceed the budget.
    A cross marks a depth at which the control finds nothing; wrong answers are orange. Where nothing was asked, the title says so.
    """
    if depth not in control:
        figure, axes = _blank(f"Not in this record: depth {depth:.0%} of this text, wording and context", caption, height=2.9)
        axes.axis("off")
        return figure
    whole, row = control[depth], chosen.get(depth)
    if row is None:
        title = "The forced pages alone exceed this budget: not asked"
    elif not whole["control_right"]:
        title = f"At depth {depth:.0%} the control itself finds no code: nothing here counts"
    else:
        read = f"{row['bytes_per_token'] / 1e6:.1f} of {whole['bytes_per_token'] / 1e6:.1f} MB"
        title = f"{row['label']}: {row['kept']} of {row['control_right']} codes at depth {depth:.0%}, {read}"
    figure, axes = _blank(title, caption, height=2.9)
    axes.remove()
    axes, told = figure.subplots(1, 2, width_ratios=(3, 2))
    for place, (at, full) in enumerate(control.items()):
        axes.bar(place, full["control_right"], width=0.8, fill=False, edgecolor=COLOURS["full"], linewidth=2 if at == depth else 0.8)
        if at in chosen:
            policy = chosen[at]["policy"]
            axes.bar(place, chosen[at]["kept"], width=0.6, color=FLATTERED if policy == "adaptive" else COLOURS[policy])
        if not full["control_right"]:
            axes.plot(place, 0.5, "x", color="#000000", markersize=9)
    axes.set_xticks(range(len(control)), [f"{at:.0%}" for at in control])
    axes.set(xlabel="where the code stands (outline: found by the control)", ylabel=f"codes, of {whole['asked']}", ylim=(0, whole["asked"] + 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    told.axis("off")
    for line, (code, answer) in enumerate(zip(row["codes"], row["answers"]) if row else ()):
        colour = HONEST if is_right(answer, code) else FLATTERED
        told.text(0, 1 - (line + 0.5) / len(row["codes"]), f"{code}: {answer!r}", color=colour, fontsize=8, va="center", parse_math=False)
    return figure


def kept_pages(mass, pages, page_size, policy, caption):
    """The softmax's share on each page of one step, over the page's place in the text; what a policy reads is coloured.

    mass: [N] shares that add up to 1. pages: the numbers of the pages read. policy: its name, for the title.
    """
    kept = set(pages)
    held, best = sum(mass[page] for page in kept), sum(sorted(mass)[-len(kept) :])
    title = f"{policy}: {len(kept)} of {len(mass)} pages keep {held:.1%} of the attention; the heaviest {len(kept)}: {best:.1%}"
    figure, axes = _blank(title, caption, height=2.6)
    for colour, label, some in ((HONEST, "read", kept), (FLATTERED, "left unread", set(range(len(mass))) - kept)):
        places = sorted(some)
        axes.bar([page * page_size for page in places], [mass[page] for page in places], width=0.8 * page_size, align="edge", color=colour, label=label)
    axes.set(xlabel="position of the page (tokens)", ylabel="share of the softmax", yscale="log", ylim=(1e-5, 1), xlim=(0, len(mass) * page_size))
    ticks = [10.0**n for n in range(-5, 1)]
    axes.set_yticks(ticks, [f"{100 * tick:g}%" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
    return figure


def agreement(rows, caption, *, budget=1 / 8):
    """How often the greedy next token is full attention's, against the share of the bytes: one line a setting, with 95% intervals.

    rows: as ``quality.agree`` makes them, the control among them. budget: the share that the title speaks of. Colour tells the policy, the marker
    the page size; dashed: bounds of 16 bits.
    """
    control = next(row for row in rows if row["policy"] == "full")
    lines = {}
    for row in rows:
        if row is not control:
            lines.setdefault(row["label"], []).append(row)
    there = [row for line in lines.values() for row in line if row["budget"] == budget]
    best = max(there, key=lambda row: row["agreement"])
    named = [best, *(row for row in there if row["policy"] in ("window", "random") and row is not best)]
    parts = ", ".join(f"{row['label'].split(',')[0]} {row['agreement']:.1%}" for row in named)
    figure, axes = _blank(f"Same token at {budget:.1%} of the bytes: {parts}", caption, height=3.8)
    for number, (label, line) in enumerate(lines.items()):
        first = line[0]
        nudge = 1.015 ** (number - len(lines) / 2)  # or else intervals of one budget would hide each other
        axes.errorbar(
            [row["budget"] * nudge for row in line], [row["agreement"] for row in line],
            yerr=[[row["agreement"] - row["low"] for row in line], [row["high"] - row["agreement"] for row in line]], color=COLOURS[first["policy"]],
            marker=PAGE_MARKERS[first["page_size"]], markersize=5, linewidth=1.4, elinewidth=0.8, linestyle="--" if first["kind"] == "minmax" else "-",
            label=label,
        )  # fmt: skip
    axes.axhline(control["agreement"], color=COLOURS["full"], linewidth=0.9, linestyle=":", label="everything, at once (rounding)")
    axes.set(xlabel="budget, page summaries included (% of the cache's bytes)", ylabel="next token is full attention's", xscale="log")
    ticks = sorted({row["budget"] for row in rows if row is not control})
    axes.set_xticks(ticks, [f"{100 * tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    return figure


def layer_heat(rows, layers, caption, *, dense_layers=2):
    """Attention mass kept in every layer and KV head, one panel a row.

    rows: as ``quality.sweep`` makes them, of a budget that has per_head. layers: the numbers of its layers. The title compares, for the first row, the layers below ``dense_layers`` with the rest.
    """
    first = rows[0]
    split = [[x for heads, layer in zip(first["per_head"], layers) if (layer < dense_layers) == low for x in heads] for low in (True, False)]
    low, high = (sum(part) / len(part) for part in split)
    title = f"Layers below {dense_layers} keep {low:.0%}, others {high:.0%} ({first['label']}, {first['budget']:.1%})"
    figure, axes = _blank(title, caption, height=0.6 + 0.95 * len(rows))
    axes.remove()
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for row, panel in zip(rows, panels):
        grid = list(zip(*row["per_head"]))
        image = panel.imshow(grid, aspect="auto", cmap=colormaps["viridis"].resampled(5), vmin=0, vmax=1)  # stored in 16 colours, more bands would merge
        panel.set_yticks(range(len(grid)), range(len(grid)), fontsize=8)
        panel.set_title(f"{row['label']}: {row['mass']:.1%} from layer {dense_layers} on", fontsize=8.5, loc="left")
        edge = sum(layer < dense_layers for layer in layers) - 0.5
        panel.axvline(edge, color="#D55E00", linewidth=1.5)
    shown = range(0, len(layers), max(1, len(layers) // 15))
    panels[-1].set_xticks(shown, [layers[n] for n in shown], fontsize=8)
    panels[-1].set_xlabel("layer")
    panels[len(rows) // 2].set_ylabel("KV head")
    bar = figure.colorbar(image, ax=list(panels))
    bar.set_label("attention mass kept")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


PART_COLOURS = STEP_COLOURS | {"append": "#56B4E9"}


def _covered(events):
    """Microseconds during which at least one of the events runs."""
    total = until = 0.0
    for event in sorted(events, key=lambda event: event["start_us"]):
        end = event["start_us"] + event["duration_us"]
        total += max(0.0, end - max(until, event["start_us"]))
        until = max(until, end)
    return total


def timelines(calls, caption):
    """What the CPU and the GPU do during a call, one pair of lanes a call, on one clock; the title says how long and how busy the GPU is.

    calls: {label: events}, as ``bench.launches.timeline`` makes them. Named parts are bars, launches ticks on them.
    """
    spans, kinds = {}, set()
    figure, axes = _blank("", caption, height=0.9 + 0.62 * len(calls))
    for place, (label, events) in enumerate(calls.items()):
        spans[label] = max(event["start_us"] + event["duration_us"] for event in events)
        for lane, where in ((-2.3 * place, "cpu"), (-2.3 * place - 1, "gpu")):
            for event in events:
                if event["where"] != where:
                    continue
                part = event["name"] if event["name"] in PART_COLOURS else None
                kind = part or ("launch" if where == "cpu" else "GPU work")
                height = 0.4 if kind == "launch" else 0.8
                colour = PART_COLOURS[part] if part else "#000000" if kind == "launch" else HONEST
                axes.broken_barh(
                    [(event["start_us"], event["duration_us"])], (lane - height / 2, height), color=colour,
                    linewidth=0 if part else 0.8, zorder=2 if part else 3, label=None if kind in kinds else kind,
                )  # fmt: skip
                kinds.add(kind)
    busy = {label: _covered([event for event in events if event["where"] == "gpu"]) / spans[label] for label, events in calls.items()}
    shares = ", ".join(f"{label} {busy[label]:.0%} of {spans[label]:,.0f} µs" for label in calls)
    figure.suptitle(f"GPU busy: {shares}", fontsize=11, x=0.01, ha="left")
    places = [lane for place in range(len(calls)) for lane in (-2.3 * place, -2.3 * place - 1)]
    axes.set_yticks(places, [f"{label}, {where}" for label in calls for where in ("CPU", "GPU")], fontsize=8)
    axes.set(xlabel="microseconds since the call began", xlim=(0, 1.02 * max(spans.values())))
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    return figure


def break_even(points):
    """The context from which on the speed-up is at least 1, or None where the longest one is still below it.

    points: [(tokens, speed-up)]. Between two contexts the speed-up is taken as a straight line over log2(tokens). Where nothing is below 1,
    that is the shortest context measured.
    """
    points = sorted(points)
    below = [n for n, (_, times) in enumerate(points) if times < 1]
    if not below:
        return points[0][0]
    if below[-1] == len(points) - 1:
        return None
    (left, low), (right, high) = points[below[-1] : below[-1] + 2]
    return left * (right / left) ** ((1 - low) / (high - low))


def _thousands(tokens):
    return f"{tokens / 1024:.3g}k"


def speed_ups(rows, caption, *, tokens=None, reported=()):
    """Speed-up of the step over SDPA (its flash backend on a GPU) against the context, one line a batch, and from where on each is ahead.

    rows: of one head shape, as ``bench.step`` makes them. tokens: the context that the title speaks of (default: the longest).
    reported: [{batch, tokens, times}] that somebody else published, drawn hollow in the colour of their batch.
    """
    lines = {}
    for row in rows:
        if row["arm"] == "pageskip step":
            lines.setdefault(row["batch"], []).append((row["tokens"], row["speed_up"]))
    lines = {batch: sorted(points) for batch, points in sorted(lines.items())}
    contexts = sorted({n for points in lines.values() for n, _ in points})
    tokens = tokens or contexts[-1]
    baseline = "SDPA flash" if any(row["arm"] == "SDPA flash" for row in rows) else "SDPA"
    there = [f"{dict(points)[tokens]:.2f}x at batch {batch}" for batch, points in lines.items() if tokens in dict(points)]
    figure, axes = _blank(f"{tokens:,} tokens: {', '.join(there) or 'not measured'}", caption, height=3.6)
    for (batch, points), colour, marker in zip(lines.items(), ("#4d4d4d", "#E69F00", "#0072B2", "#009E73"), "os^v"):  # diamonds are others' points
        even = break_even(points)
        ahead = "never ahead" if even is None else "ahead everywhere" if even == points[0][0] else f"ahead from {_thousands(even)} on"
        axes.plot(*zip(*points), marker=marker, markersize=4, color=colour, label=f"batch {batch}: {ahead}")
        if tokens in dict(points):
            axes.plot(tokens, dict(points)[tokens], "o", markersize=10, fillstyle="none", color=colour)
        if even not in (None, points[0][0]):
            axes.plot(even, 1, "|", color=colour, markersize=16, markeredgewidth=2)
        told = [(one["tokens"], one["times"]) for one in reported if one["batch"] == batch]
        if told:
            axes.plot(*zip(*told), "D", color=colour, fillstyle="none", label=f"batch {batch}, RTX 4090, as reported")
    axes.axhline(1, color="#000000", linewidth=0.8, linestyle="--")
    axes.set(xlabel="context (tokens)", ylabel=f"speed-up over {baseline}", xscale="log", yscale="log")
    axes.set_xticks(contexts, [_thousands(n) for n in contexts])
    heights = [times for points in lines.values() for _, times in points] + [one["times"] for one in reported if one["batch"] in lines]
    ticks = [2.0**n for n in range(-6, 8) if min(heights) / 1.5 <= 2.0**n <= 1.5 * max(heights)]
    axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return figure
