"""The figures of the living cache: a box that moves, where a token's time goes, and how far off a prediction is. As in ``figures``."""

from .figures import COLOURS, FLATTERED, _blank
from .token_time import PARTS

PART_COLOURS = dict(zip(PARTS, (COLOURS["full"], COLOURS["pageskip"], COLOURS["window"], COLOURS["random"])))
ARM_MARKERS = {"pageskip dense": ("o", COLOURS["full"]), "pageskip": ("s", COLOURS["pageskip"]), "pageskip in every layer": ("^", COLOURS["oracle"])}


def box_walk(keys, boxes, page_size, kept, caption):
    """One channel of the keys, token by token, and the box of each page that is left after a rollback.

    keys: the channel's value of every token that was appended; the first ``kept`` of them are still there. boxes: [(low, high)], one a page.
    """
    last, (low, high) = len(boxes) - 1, boxes[-1]
    title = f"{kept} of {len(keys)} tokens kept: the box of page {last} is [{low:.2f}, {high:.2f}] over {kept - last * page_size} tokens"
    figure, axes = _blank(title, caption, height=2.8)
    for page, (low, high) in enumerate(boxes):
        left, right = page * page_size - 0.5, min((page + 1) * page_size, kept) - 0.5
        axes.fill_between([left, right], low, high, color=COLOURS["pageskip"], alpha=0.25, linewidth=0)
    axes.plot(range(kept), keys[:kept], "o", color=COLOURS["full"], markersize=4, label="in the cache")
    if kept < len(keys):
        axes.plot(range(kept, len(keys)), keys[kept:], "x", color=FLATTERED, markersize=5, label="rolled back")
    for edge in range(page_size, len(keys), page_size):
        axes.axvline(edge - 0.5, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(xlabel="token", ylabel="its key's first number", xlim=(-1, len(keys)))
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    return figure


def token_bars(shapes, caption):
    """Where a token's time goes, exact above and pageskip below, as a share of the exact token's time; microseconds beside the bars.

    shapes: {label: (exact, pageskip)}, each {part of ``PARTS``: microseconds}; the title speaks of the last one.
    """
    label, (exact, skipping) = list(shapes.items())[-1]
    before, after = sum(exact.values()), sum(skipping.values())
    share = exact["attention"] / before
    title = f"{label}: {before / 1e3:,.2f} ms a token, {after / 1e3:,.2f} with pageskip, {before / after:.2f}x; attention {share:.0%} before"
    figure, axes = _blank(title, caption, height=1.2 + 0.62 * len(shapes))
    for row, (_, pair) in enumerate(reversed(shapes.items())):
        whole = sum(pair[0].values())
        for up, parts in zip((0.2, -0.2), pair):
            left = 0.0
            for part in PARTS:
                width = parts[part] / whole
                axes.barh(row + up, width, left=left, height=0.36, color=PART_COLOURS[part], label=part if (row, up) == (0, 0.2) else None)
                left += width
            axes.annotate(f"{sum(parts.values()):,.0f} µs", (left, row + up), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(shapes)), list(reversed(shapes)), fontsize=8.5)
    longest = max(sum(skipping.values()) / sum(exact.values()) for exact, skipping in shapes.values())
    axes.set(xlim=(0, 1.15 * max(1, longest)), xlabel="share of the exact token's time (above: exact, below: pageskip)")
    axes.xaxis.set_major_formatter("{x:.0%}")
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    return figure


def prediction_errors(points, caption):
    """How far each prediction lies from what was recorded; hollow marks are points that the fit has seen.

    points: dicts with label, arm, recorded and predicted (microseconds), fitted (bool).
    """
    error = {id(point): point["predicted"] / point["recorded"] - 1 for point in points}
    unseen = [abs(error[id(point)]) for point in points if not point["fitted"]]
    title = f"{len(unseen)} points that the fit has not seen: off by {max(unseen):.0%} at most, {sum(unseen) / len(unseen):.0%} on average"
    figure, axes = _blank(title, caption, height=3.0)
    labels = list(dict.fromkeys(point["label"] for point in points))[::-1]
    for arm, (marker, colour) in ARM_MARKERS.items():
        for fitted in (False, True):
            some = [point for point in points if (point["arm"], point["fitted"]) == (arm, fitted)]
            axes.plot(
                [error[id(point)] for point in some], [labels.index(point["label"]) for point in some], marker, color=colour,
                fillstyle="none" if fitted else "full", linestyle="", label=None if fitted else arm,
            )  # fmt: skip
    axes.axvline(0, color="#000000", linewidth=0.8, linestyle="--")
    wide = 1.2 * max(0.1, *map(abs, error.values()))
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.set(xlim=(-wide, wide), xlabel="predicted over recorded time of a token, less 1")
    axes.xaxis.set_major_formatter("{x:+.0%}")
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside right center")
    return figure
