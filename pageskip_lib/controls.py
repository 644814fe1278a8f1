"""Figures and widgets in a notebook: one way to show a picture, one way to put controls around a drawing function."""

import io
import struct
import zlib
from html import escape

import ipywidgets
import PIL.Image
import traitlets
from IPython.display import Image, display

from .bench import records


def title_of(figure):
    """The finding that a figure states in its title."""
    return figure.get_suptitle()


def png(figure):
    """The figure as PNG bytes, in the 16 colours that cover it best (rare ones too): a quarter of the size, and notebooks stay small."""
    full = io.BytesIO()
    figure.savefig(full, format="png")
    few = PIL.Image.open(full).convert("RGB").quantize(16, method=PIL.Image.Quantize.MAXCOVERAGE, dither=PIL.Image.Dither.NONE)
    # Written out here, because Pillow's own compressor leaves a sixth more: 4 bits a pixel, every line after a zero (no filter).
    lines, stride = few.tobytes("raw", "P;4"), (few.width + 1) // 2
    pixels = b"".join(b"\0" + lines[at : at + stride] for at in range(0, len(lines), stride))
    header = struct.pack(">IIBBBBB", few.width, few.height, 4, 3, 0, 0, 0)
    parts = {b"IHDR": header, b"PLTE": bytes(few.getpalette()), b"IDAT": zlib.compress(pixels, 9), b"IEND": b""}
    chunks = (struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts.items())
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def show(figure):
    """The figure as a notebook picture, its finding as the alternative text; print the finding too, which a test can compare."""
    print(title_of(figure))
    return Image(data=png(figure), alt=title_of(figure))


def show_others(kind, draw):
    """Show draw(name, record) -> Figure for each machine beside the H200 that has a record of this kind.

    Where there is none, a sentence says how to make one; where a record lacks what the figure needs, as one of a small card may, another says so.
    """
    found = records.others(kind)
    if not found:
        print(f"No other machine has recorded {kind!r} yet: `python -m pageskip_lib.bench all --record NAME` records yours.")
    for name, run in found.items():
        try:
            figure = draw(name, run)
        except Exception as error:  # whatever a record lacks, the notebook goes on
            print(f"{name}: not drawn, its record has less than this figure needs ({type(error).__name__}: {error})")
            continue
        missing = len(run["settings"].get("left_out", []))
        print(name + (f" (its memory had no room for {missing} point{'s' * (missing > 1)})" if missing else ""), end=": ")
        display(show(figure))


class _Picture(ipywidgets.Image):
    """An image whose ``tooltip`` screen readers read in place of the alternative text that ipywidgets has no room for."""

    description = traitlets.Unicode("").tag(sync=True)  # without one, a browser fails to show an image that has a tooltip


def _box(draw, controls, *more):
    """(a box with ``.controls``, ``.picture`` and ``.finding``, redraw): redraw() puts draw's picture, or its error in words, into the box."""
    picture, finding = _Picture(format="png", layout=ipywidgets.Layout(max_width="648px")), ipywidgets.HTML()
    for control in controls.values():
        if hasattr(control, "continuous_update"):
            control.continuous_update = False
    row = ipywidgets.HBox([*controls.values(), *more], layout=ipywidgets.Layout(flex_flow="row wrap"))  # four sliders need two lines
    box = ipywidgets.VBox([row, finding, picture])
    box.controls, box.picture, box.finding = controls, picture, finding

    def redraw(change=None):
        finding.value = "drawing..."
        try:
            figure = draw(**{name: control.value for name, control in controls.items()})
        except Exception as error:  # whatever it is, the reader must see it
            finding.value = f"<b>{escape(type(error).__name__)}</b>: {escape(str(error))}"
            return
        picture.value = png(figure)
        picture.tooltip = title_of(figure)
        finding.value = escape(title_of(figure))

    return box, redraw


def explore(draw, **controls):
    """Controls around draw(**values) -> Figure: the picture is drawn again whenever a control's value changes.

    controls: {parameter of draw: ipywidgets control}. Returns a box with ``.controls``, ``.picture`` and ``.finding``. An error
    in draw is shown below the controls instead of being lost in the browser's log.
    """
    box, redraw = _box(draw, controls)
    for control in controls.values():
        control.observe(redraw, names="value")
    redraw()
    return box


def on_click(draw, label, **controls):
    """As ``explore``, for what takes long: draw(report=report, **values) runs when the button is clicked, and report(share) moves the bar.

    label: the button's text. share: of the work that is done, 0 to 1. The box has ``.button`` and ``.bar`` too; it starts without a picture.
    """
    button, bar = ipywidgets.Button(description=label), ipywidgets.FloatProgress(min=0, max=1)

    def report(share):
        bar.value = share

    def reported(**values):
        return draw(report=report, **values)

    box, redraw = _box(reported, controls, button, bar)
    box.button, box.bar = button, bar

    def run(_):
        button.disabled = True  # a second click would wait its turn and do it all again
        bar.value = 0
        redraw()
        button.disabled = False

    button.on_click(run)
    return box
