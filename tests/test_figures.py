"""Figures are pure functions whose titles state what the data says; recall and page mass add up."""

import pytest
import torch

from pageskip_lib import figures, reference, runtime
from pageskip_lib.controls import png, title_of
from pageskip_lib.quality.recall import mass_curve

ROWS = [
    dict(policy="full", answer=" 7491.", right=True, bytes_per_token=100e6),
    dict(policy="pageskip", answer=" 7491.", right=True, bytes_per_token=25e6),
    dict(policy="window", answer=" 1234", right=False, bytes_per_token=20e6),
]


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
    assert "pageskip finds 7491 reading 25%" in title_of(figures.needle_bars(ROWS, "7491", "x"))
    only_full = [ROWS[0], dict(ROWS[1], right=False), ROWS[2]]
    assert title_of(figures.needle_bars(only_full, "7491", "x")) == "Only full attention finds 7491 here"


def test_no_right_answer_is_said_plainly():
    assert title_of(figures.needle_bars([dict(row, right=False) for row in ROWS], "7491", "x")) == "Nobody finds 7491 here"


def test_axes_have_units_and_captions_say_where_from():
    figure = figures.needle_bars(ROWS, "7491", figures.measured_here(runtime.machine(), "a test"))
    assert "(MB)" in figure.axes[0].get_xlabel()
    assert "Measured here, now" in figure.get_supxlabel()
    recorded = figures.recorded_on(dict(name="NVIDIA H200", torch="2.11", triton="3.6"), "2026-11-30", "x")
    assert recorded == "Recorded on NVIDIA H200 (torch 2.11, Triton 3.6), 2026-11-30: x."


def test_the_needle_map_shows_every_layer_and_token():
    held = {(layer, step): (layer + step) % 4 for layer in range(2, 6) for step in range(3)}
    figure = figures.needle_map(held, 3, ["The", "\n", " "], "title", "x")
    assert figure.axes[0].images[0].get_array().shape == (4, 3)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["The", "\\n", "␣"]


def test_pictures_stay_small():
    assert len(png(figures.needle_bars(ROWS, "7491", "x"))) < 20_000


def test_titles_fit_their_figure():
    rising = [(n + 1) / 129 for n in range(129)]
    held = {(layer, step): 3 for layer in range(2, 30) for step in range(12)}
    title = "pageskip: needle's page held in 100% of the calls, answer wrong"
    for figure in (
        figures.mass_kept(dict(oracle=rising, pageskip=rising, window=rising), 0.999, "x"),
        figures.needle_bars(ROWS, "123456789012", "x"),
        figures.needle_map(held, 3, [" access"] * 12, title, "x"),
    ):
        figure.draw_without_rendering()
        drawn = next(text for text in figure.texts if text.get_text() == title_of(figure))
        assert drawn.get_window_extent().x1 <= figure.bbox.x1
