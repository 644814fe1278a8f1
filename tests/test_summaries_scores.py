"""Page summaries are the exact range of each page's keys, and the page score bounds q.k from above, whatever the keys."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageskip_lib import page_scores, reference, scores, summaries, summarize_pages
from pageskip_lib.checks import HEAD_DIMS, PAGE_SIZES

from helpers import (
    Unlaunchable, dtypes_for, each_backend, each_backend_and_dtype, far_apart, int32, randn, same_bits, unit_roundoff,
)  # fmt: skip

INF, NAN = float("inf"), float("nan")
FEW = settings(
    max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


KINDS, BOUNDS = summaries.KINDS, ("minmax", "minmax8", "mean_radius")
each_kind = pytest.mark.parametrize("kind", KINDS)


def assert_is_summary(summary, k, lengths=None):
    """kmin and kmax hold the reference's values exactly; mean and std up to rounding; no key lies outside the radius."""
    size = summary.bound_size
    if summary.kind == "minmax8":
        return assert_is_coded(summary, reference.minmax_summary(k, size, lengths))
    assert all(field.dtype == (torch.float32 if name == "radius" else k.dtype) for name, field in summary.fields.items())
    found = {name: field.cpu().double() for name, field in summary.fields.items()}
    if summary.kind == "minmax":
        for name, true in zip(("kmin", "kmax"), reference.minmax_summary(k, size, lengths)):
            assert torch.equal(found[name], true.nan_to_num(0.0, INF, -INF))  # pages without tokens hold zeros
        return
    # An fp32 sum of `size` keys, divided, then rounded to the dtype, where the smallest numbers are 2^-24 apart in fp16.
    most = max((float(keys.abs().max()) for _, _, keys in reference._stretches(k, size, lengths)), default=0.0)
    error = size * 2**-23 * most + (2**-25 if k.dtype == torch.float16 else 2**-126)
    for name, true in zip(("mean", "std"), reference.mean_summary(k, size, lengths)):
        if name in found:
            torch.testing.assert_close(found[name], true.nan_to_num(0.0), rtol=unit_roundoff(k.dtype), atol=error)
    if summary.kind == "mean_radius":
        true = reference.farthest(k, summary.mean, size, lengths)
        assert (found["radius"] >= true).all() and (found["radius"] <= true * (1 + 2**-21) + 2**-126).all()


def assert_is_coded(summary, exact):
    """The codes' box holds the exact one and is wider by little more than a step on each side; entries without tokens hold zeros."""
    assert summary.kmin.dtype == summary.kmax.dtype == torch.int8 and summary.scale.dtype == summary.channel.dtype == torch.float32
    step = summary.scale.cpu().double()[..., None] * summary.channel.cpu().double()[:, :, None]
    for code, true, outward in zip((summary.kmin, summary.kmax), exact, (-1, 1)):
        assert code.numel() == 0 or code.abs().max() <= 127
        wider = outward * (code.cpu().double() * step - true.nan_to_num(0.0, 0.0, 0.0))
        assert (wider >= 0).all() and (wider <= 1.01 * step).all()
    exponent = torch.frexp(summary.channel)
    assert (exponent.mantissa == 0.5).all() and (summary.channel <= 1).all()  # powers of two


def assert_scores(q, k, page_size, backend, *, kind="minmax", bound_size=None, lengths=None):
    """Score = the kind's definition, and not below any q.k of the page if it is a bound, both up to the fp32 sum's rounding.

    Returns score - q.k of the best key, [B, Hq, N] in fp64, NaN for pages without tokens.
    """
    at = None if lengths is None else int32(lengths, k.device)
    summary = summarize_pages(k, page_size, lengths=at, kind=kind, bound_size=bound_size, backend=backend)
    assert_is_summary(summary, k, lengths)
    score = page_scores(q, summary, group="none", backend=backend)
    assert score.dtype == torch.float32 and score.shape == (*q.shape[:2], summary.pages)
    score, error, best = score.cpu().double(), reference.score_error(q, summary), reference.best_key(q, k, page_size, lengths)
    held = best > -INF
    assert (score[~held] == -INF).all() and score[held].isfinite().all()
    assert ((score - reference.page_score(q, summary)).abs() <= error)[held].all()
    if kind in BOUNDS:
        assert (score >= best - error)[held].all()
    return score - best


# --- summaries ---------------------------------------------------------------------------------------------------------


@each_kind
@each_backend_and_dtype
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_edge_length(backend, dtype, page_size, kind, device):
    """Case A10 for summaries: empty, one token, and both sides of a page's end."""
    tokens = 2 * page_size + 1
    k = randn(6, 2, tokens, 64, dtype=dtype, device=device)
    lengths = int32([0, 1, page_size - 1, page_size, page_size + 1, tokens], device)
    assert_is_summary(summarize_pages(k, page_size, lengths=lengths, kind=kind, backend=backend), k, lengths)


@each_kind
@each_backend
@pytest.mark.parametrize("page_size, bound_size", [(16, 8), (16, 16), (32, 8)])
def test_every_length_of_two_pages(backend, page_size, bound_size, kind, device):
    """One sequence for each length from 0 to two pages and a token: summary, score, bound, and what lies past the length."""
    lengths = list(range(2 * page_size + 2))
    q, k = randn(len(lengths), 2, 64, device=device), randn(len(lengths), 1, lengths[-1], 64, seed=1, device=device)
    for row, length in enumerate(lengths):
        k[row, :, length:] = NAN
    assert_scores(q, k, page_size, backend, kind=kind, bound_size=bound_size, lengths=lengths)


@each_kind
@each_backend_and_dtype
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_keys_past_the_length_never_enter(backend, dtype, garbage, kind, device):
    """Case A8 for summaries."""
    k = randn(1, 2, 80, 64, dtype=dtype, device=device)
    k[:, :, 33:] = garbage
    summary = summarize_pages(k, 16, lengths=int32([33], device), kind=kind, backend=backend)
    assert_is_summary(summary, k, [33])
    assert all((field[:, :, 3:] == 0).all() for name, field in summary.fields.items() if name != "channel")


@each_kind
@each_backend
def test_one_sided_pages(backend, kind, device):
    """Padding must act as no key at all: a zero in its place would widen pages of one sign, and pull their mean to it."""
    k = 1 + randn(1, 2, 33, 64, device=device).abs()
    k[:, 1] *= -1
    assert_is_summary(summarize_pages(k, 16, kind=kind, backend=backend), k)


@each_kind
@each_backend
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim(backend, dim, kind, device):
    """Case C6: the padding of a head dim is neither stored over the next page nor scored."""
    assert_scores(randn(1, 4, dim, seed=1, device=device), randn(1, 2, 40, dim, device=device), 16, backend, kind=kind)


@each_backend
def test_backends_agree_on_strided_keys(backend, device):
    k = randn(2, 2, 40, 64, device=device)
    larger = torch.full((3, 3, 50, 80), NAN, device=device)
    larger[1:, :2, 3:43, 8:72] = k
    for keys in (larger[1:, :2, 3:43, 8:72], k.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_is_summary(summarize_pages(keys, 16, backend=backend), k)


@each_backend
def test_strided_lengths(backend, device):
    """Every other entry of a tensor: followed, or refused."""
    k = randn(2, 1, 40, 64, device=device)
    strided = int32([5, 1, 40, 1], device)[::2]
    try:
        summary = summarize_pages(k, 16, lengths=strided, backend=backend)
    except ValueError as refusal:
        assert "lengths" in str(refusal)
    else:
        assert_is_summary(summary, k, [5, 40])


@each_backend
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "token"])
def test_key_offsets_past_2_to_31(backend, axis, device, tmp_path):
    """Case B1."""
    k = randn(3, 3, 5, 64, dtype=torch.float16, device=device)
    assert_is_summary(summarize_pages(far_apart(k, axis, tmp_path), 16, backend=backend), k)


@each_backend
@pytest.mark.parametrize("batch, tokens", [(0, 40), (2, 0), (0, 0)])
def test_no_pages(backend, batch, tokens, device, monkeypatch):
    """Case A7: B = 0 and T = 0, through summary and score, without a launch on an empty grid."""
    monkeypatch.setattr(summaries, "_minmax_kernel", Unlaunchable())
    monkeypatch.setattr(scores, "_score_kernel", Unlaunchable())
    q = torch.zeros(batch, 4, 64, device=device)
    for kind, group in itertools.product(KINDS, scores.GROUPS):
        summary = summarize_pages(torch.zeros(batch, 2, tokens, 64, device=device), 16, kind=kind, bound_size=8, backend=backend)
        assert all(field.shape[:3] == (batch, 2, -(-tokens // 8)) for name, field in summary.fields.items() if name != "channel")
        heads = 4 if group == "none" else 2
        assert page_scores(q, summary, group=group, backend=backend).shape == (batch, heads, -(-tokens // 16))


def test_bytes_of_a_scoring_pass():
    """Two vectors for 64 tokens are 1/32 of the keys, 1/64 of keys and values; smaller entries cost in proportion."""
    k = torch.zeros(2, 2, 256, 128, dtype=torch.float16)
    size = {(kind, bound): summarize_pages(k, 64, kind=kind, bound_size=bound).bytes for kind in KINDS for bound in (16, 64)}
    assert size["minmax", 64] == size["mean_std", 64] == 2 * 2 * 2 * 4 * 128 * 2 == k.nbytes // 32
    assert size["mean", 64] == k.nbytes // 64 and size["mean_radius", 64] == k.nbytes // 64 + 2 * 2 * 4 * 4  # an fp32 radius each
    channels = dict.fromkeys(KINDS, 0) | dict(minmax8=2 * 2 * 128 * 4)
    assert size["minmax8", 64] == size["minmax", 64] // 2 + 2 * 2 * 4 * 4 + channels["minmax8"]  # half of it, a scale each, and the channels
    assert all(size[kind, 16] - channels[kind] == 4 * (size[kind, 64] - channels[kind]) for kind in KINDS)


def test_summary_does_not_alias_the_cache(device):
    k = randn(1, 1, 16, 64, device=device)
    summary = summarize_pages(k, 16)
    before = summary.kmax.clone()
    k += 1
    assert same_bits(summary.kmax, before)


def test_the_references_by_hand():
    """Three keys of two dimensions, two of them on the first page of two tokens."""
    k, q = torch.tensor([[[[1.0, 4.0], [3.0, -4.0], [-2.0, 1.0]]]]), torch.tensor([[[1.0, -2.0]]])
    assert reference.best_key(q, k, 2).tolist() == [[[11.0, -4.0]]]
    assert reference.best_key(q, k, 2, [2]).tolist() == [[[11.0, -INF]]]
    mean, std = reference.mean_summary(k, 2)
    assert mean.tolist() == [[[[2.0, 0.0], [-2.0, 1.0]]]] and std.tolist() == [[[[1.0, 4.0], [0.0, 0.0]]]]
    radius = reference.farthest(k, mean, 2)
    assert radius.tolist() == [[[pytest.approx(17**0.5), 0.0]]]
    kmin, kmax = torch.tensor([[[[1.0, -4.0], [-2.0, 1.0]]]]), torch.tensor([[[[3.0, 4.0], [-2.0, 1.0]]]])
    fields = dict(kmin=kmin, kmax=kmax, mean=mean, std=std, radius=radius)
    expected = dict(minmax=[11.0, -4.0], mean_radius=[2 + 85**0.5, -4.0], mean_std=[2 + 3 * 9, -4.0], mean=[2.0, -4.0])
    magnitudes = dict(minmax=[11.0, 4.0], mean_radius=[2 + 85**0.5, 4.0], mean_std=[2 + 3 * 9, 4.0], mean=[2.0, 4.0])
    for kind in expected:  # 16 tokens an entry here; only the lengths of the pages depend on it
        held = {name: fields[name] for name in summaries.FIELDS[kind]}
        summary = summaries.PageSummary(kind, 16, int32([17]), **held)
        assert reference.page_score(q, summary).tolist() == [[pytest.approx(expected[kind])]]
        assert reference.score_error(q, summary).tolist() == [[pytest.approx([2 * 2**-23 * x for x in magnitudes[kind]])]]
        best_entry = summaries.PageSummary(kind, 16, int32([9]), **held, bound_size=8)
        assert reference.page_score(q, best_entry).tolist() == [[[pytest.approx(expected[kind][0])]]]
    halves = dict(kmin=(2 * kmin).to(torch.int8), kmax=(2 * kmax).to(torch.int8), scale=torch.tensor([[[1.0, 0.5]]]), channel=torch.tensor([[[0.5, 0.5]]]))
    coded = summaries.PageSummary("minmax8", 16, int32([17]), **halves)  # whose second entry stands for half of what its codes say
    assert reference.page_score(q, coded).tolist() == [[[11.0, -2.0]]]
    lost = [2 * (2**-23 * total + 128 / (2**14 - 1) * scale) for total, scale in ((11, 1), (2, 0.5))]  # the query's largest part is 2 * 0.5
    assert reference.score_error(q, coded).tolist() == [[pytest.approx(lost)]]


# --- the bound ---------------------------------------------------------------------------------------------------------


@each_kind
@each_backend_and_dtype
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_scores_on_random_keys(backend, dtype, page_size, kind, device):
    """Case C10: also with a large common offset, where a rounded centre and half-width would fall below the maximum."""
    q, k = randn(1, 4, 64, dtype=dtype, device=device), randn(1, 2, 2 * page_size + 5, 64, seed=1, dtype=dtype, device=device)
    for bound_size in (8, 16, 32, 64, 128):
        if bound_size <= page_size:
            assert_scores(q, k, page_size, backend, kind=kind, bound_size=bound_size)
    assert_scores(q.abs(), k + 100, page_size, backend, kind=kind)


def adversarial(shape, q, k):
    """Keys [1, 1, T, D] made to break a bound, out of random ones."""
    if shape == "constant":
        return k[:, :, :1].expand_as(k)
    if shape == "two values":
        return k.sign()
    if shape == "signed zeros":
        return torch.zeros_like(k).copysign(k)
    if shape == "alternating":
        return k[:, :, :1] * (1 - 2 * (torch.arange(k.shape[2], device=k.device) % 2))[:, None]
    if shape == "offset":
        return k + 100
    k = k.clone()
    if shape == "one outlier":
        k[:, :, 17:18, 5] *= 1000
    if shape == "outlier channel":
        k[..., 5] = k[..., 5] * 10 + 1000
    if shape == "copies of q":
        k[:, :, ::7] = q[:, :1, None]
    return k


SHAPES = ("random", "constant", "two values", "signed zeros", "alternating", "offset", "one outlier", "outlier channel", "copies of q")


@each_kind
@each_backend
@given(data=st.data(), magnitude=st.sampled_from([1e-40, 2.0**-24, 2.0**-14, 1e-3, 1.0, 30.0, 1004.0, 60000.0]), shape=st.sampled_from(SHAPES))
@settings(FEW, max_examples=30)
def test_no_keys_break_a_bound(backend, kind, device, data, magnitude, shape):
    """Case C9 and its kin: ties, constant pages, negative zeros, outliers, subnormal and huge magnitudes; any length, page and bound size."""
    seed, length = data.draw(st.integers(0, 10**6), "seed"), data.draw(st.integers(0, 140), "length")
    page_size = data.draw(st.sampled_from(PAGE_SIZES), "page_size")
    bound_size = data.draw(st.sampled_from([size for size in (8, *PAGE_SIZES) if size <= page_size]), "bound_size")
    dtype = data.draw(st.sampled_from(dtypes_for(backend)), "dtype")
    q, k = randn(1, 3, 64, seed=seed, device=device), randn(1, 1, 140, 64, seed=seed + 1, device=device)
    q, k = (q.sign() if shape == "two values" else q) * min(magnitude, 3e4), adversarial(shape, q, k) * magnitude
    limit = 65504.0 if dtype == torch.float16 else 1e30
    q, k = (x.clamp(-limit, limit).to(dtype) for x in (q, k))
    assert_scores(q, k, page_size, backend, kind=kind, bound_size=bound_size, lengths=[length])


@each_backend
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES))
@FEW
def test_finer_bounds_are_never_looser(backend, device, seed, shape):
    """minmax: the box of a page holds the boxes of its parts."""
    q, k = randn(1, 3, 64, seed=seed, device=device), randn(1, 1, 140, 64, seed=seed + 1, device=device)
    k = adversarial(shape, q, k)
    coarse = error = None
    for bound_size in (128, 64, 32, 16, 8):
        summary = summarize_pages(k, 128, bound_size=bound_size, backend=backend)
        fine, fine_error = page_scores(q, summary, group="none", backend=backend).cpu().double(), reference.score_error(q, summary)
        if coarse is not None:
            assert (fine <= coarse + fine_error + error).all()
            assert shape != "random" or (fine[..., 0] < coarse[..., 0]).all()
        coarse, error = fine, fine_error


@each_backend
def test_finer_radii_can_be_looser(backend, device):
    """mean_radius: the ball of a page need not hold the balls of its parts, whose centres lie elsewhere."""
    k = torch.zeros(1, 1, 16, 64, device=device)
    k[..., 0] = torch.tensor([1.0] * 7 + [-1.0] * 9)
    q = torch.zeros(1, 1, 64, device=device)
    q[..., 0] = 1
    coarse, fine = (
        page_scores(q, summarize_pages(k, 16, kind="mean_radius", bound_size=size, backend=backend), backend=backend).item() for size in (16, 8)
    )
    assert coarse == pytest.approx(1.0) and fine == pytest.approx(2.5)


@each_backend
@pytest.mark.parametrize("kind", ["mean", "mean_std"])
def test_estimates_can_fall_below_the_best_key(backend, kind, device):
    """One key far from fifteen others: it lies more than three standard deviations out."""
    k = torch.zeros(1, 1, 16, 64, device=device)
    k[:, :, 3, 0] = 100
    q = torch.ones(1, 1, 64, device=device)
    assert assert_scores(q, k, 16, backend, kind=kind).item() < -20


@each_backend
@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("q_size, k_size", [(1, 1e-25), (1e-25, 1), (1, 1e25), (1e25, 1)])
def test_squares_neither_vanish_nor_overflow(backend, kind, q_size, k_size, device):
    """A radius and a norm are roots of sums of squares, which fp32 could not hold here."""
    q, k = q_size * randn(1, 2, 64, device=device), k_size * randn(1, 1, 40, 64, seed=1, device=device)
    assert_scores(q, k, 16, backend, kind=kind)


@each_kind
@each_backend
def test_largest_fp16_keys_stay_finite(backend, kind, device):
    """Case C9: kmin + kmax, the sum of a page and the products overflow fp16, the fp32 score does not."""
    k = torch.full((1, 1, 16, 64), 60000.0, dtype=torch.float16, device=device)
    q = torch.full((1, 1, 64), 60000.0, dtype=torch.float16, device=device)
    coarse = 0.02 if kind == "minmax8" else 64 * 2**-23  # a step of 1/127 outward, and what its kernel adds for the query
    assert assert_scores(q, k, 16, backend, kind=kind).item() == pytest.approx(0, abs=64 * 60000**2 * coarse)
    k[:, :, ::2] *= -1
    expected = dict(minmax=1, minmax8=1, mean_radius=1, mean_std=3, mean=0)[kind] * 64 * 60000**2
    score = page_scores(q, summarize_pages(k, 16, kind=kind, backend=backend), backend=backend)
    assert score.item() == pytest.approx(expected, rel=coarse)


@each_kind
@each_backend_and_dtype
def test_wide_heads_near_30_are_summed_in_fp32(backend, dtype, kind, device):
    """Case C12: 256 products of 900 pass fp16's 65504."""
    q, k = (torch.full(shape, 30.0, dtype=dtype, device=device) for shape in ((1, 1, 256), (1, 1, 16, 256)))
    score = page_scores(q, summarize_pages(k, 16, kind=kind, backend=backend), backend=backend)
    if kind == "minmax8":
        assert 256 * 900 <= score.item() <= 1.02 * 256 * 900
    else:
        assert score.item() == 256 * 900  # every partial sum is a whole number below 2^24, so nothing is rounded


@each_backend_and_dtype
def test_a_needle_just_above_the_rest_is_seen(backend, dtype, device):
    """Case C11: 64 pages tie but for one that scores 0.4 % more, which a half-precision score would lose in bf16."""
    q, k = (torch.ones(shape, dtype=dtype, device=device) for shape in ((1, 1, 64), (1, 1, 64 * 16, 64)))
    k[:, :, 41 * 16 + 3, :16] += 2**-6
    score = page_scores(q, summarize_pages(k, 16, backend=backend), backend=backend)
    assert score.argmax().item() == 41 and (score == 64.0).sum() == 63


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_both_identities_equal_the_definition(dtype):
    """q.mid + |q|.half is the same number; in fp64 to 2^-50 of the sum of magnitudes."""
    q, k = randn(2, 4, 64, dtype=dtype), randn(2, 2, 48, 64, seed=1, dtype=dtype)
    kmin, kmax = reference.minmax_summary(k, 16)
    definition, centre = reference.page_bound(q, kmin, kmax), reference.page_bound_center(q, kmin, kmax)
    torch.testing.assert_close(definition, centre, rtol=0, atol=2**-50 * 64 * 16)


# --- heads and lengths -------------------------------------------------------------------------------------------------


def grouped(bounds, kv_heads, group):
    """What each way of grouping means, from per-head bounds [B, Hq, N] in fp64."""
    bounds = bounds.unflatten(1, (kv_heads, -1))
    if group == "softmax_sum":
        return torch.softmax(bounds * 64**-0.5, -1).sum(2)
    return {"max": lambda: bounds.amax(2), "sum": lambda: bounds.sum(2), "none": lambda: bounds.flatten(1, 2)}[group]()


@each_backend
@pytest.mark.parametrize("group", scores.GROUPS)
@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 24])
@pytest.mark.parametrize("kind, bound_size", [("minmax", 16), ("minmax", 8), ("mean_radius", 8), ("mean_std", 16), ("mean", 8)])
def test_groups(backend, group, heads_per_kv, kind, bound_size, device):
    """Cases C1, C2, G11 and G12: how the heads of a group agree; padded heads have no vote."""
    q, k = randn(1, 2 * heads_per_kv, 64, device=device), randn(1, 2, 100, 64, seed=1, device=device)
    q[:, 0] *= 10  # one head ten times as loud
    k, q = (k - 1, q.abs()) if heads_per_kv == 3 else (k, q)  # every bound of this one may be below 0, the padding's score
    summary = summarize_pages(k, 16, kind=kind, bound_size=bound_size, backend=backend)
    score = page_scores(q, summary, group=group, backend=backend)
    error = float(reference.score_error(q, summary).max()) * heads_per_kv
    expected = grouped(reference.page_score(q, summary), 2, group)
    torch.testing.assert_close(score.cpu().double(), expected, rtol=0, atol=error)


@each_backend
def test_padding_heads_do_not_win_when_all_scores_are_negative(backend, device):
    """Case C2: three heads padded to sixteen; a padded head's bound is 0, above every real one here."""
    q, k = torch.ones(1, 3, 64, device=device), -torch.ones(1, 1, 32, 64, device=device)
    summary = summarize_pages(k, 16, backend=backend)
    assert page_scores(q, summary, group="max", backend=backend).tolist() == [[[-64.0, -64.0]]]


@each_kind
@each_backend
@pytest.mark.parametrize("group", scores.GROUPS)
def test_pages_past_the_length_are_minus_infinity(backend, group, kind, device):
    """Cases A6 and G9: masked by the length and not by value, an empty row included, and never NaN."""
    q, k = randn(4, 4, 64, device=device), randn(4, 2, 70, 64, seed=1, device=device)
    lengths = [0, 1, 33, 70]
    summary = summarize_pages(k, 16, lengths=int32(lengths, device), kind=kind, bound_size=8, backend=backend)
    score = page_scores(q, summary, group=group, backend=backend)
    for row, length in enumerate(lengths):
        held = -(-length // 16)
        assert score[row, :, :held].isfinite().all() and (score[row, :, held:] == -INF).all()


@each_kind
@each_backend
@pytest.mark.parametrize("bound_size", [8, 16])
@pytest.mark.parametrize("filler", [NAN, INF])
def test_summaries_of_untouched_pages_are_not_read(backend, filler, bound_size, kind, device):
    """Case G9: entries past the length may hold anything, also the second half of a page that is half full."""
    q, k = randn(1, 2, 64, device=device), randn(1, 1, 80, 64, seed=1, device=device)
    summary = summarize_pages(k, 16, lengths=int32([24], device), kind=kind, bound_size=bound_size, backend=backend)
    expected = page_scores(q, summary, backend=backend)
    for name, field in summary.fields.items():
        if name != "channel":
            field[:, :, -(-24 // bound_size) :] = filler if field.is_floating_point() else -77
    found = page_scores(q, summary, backend=backend)
    assert same_bits(found, expected)


@each_kind
@each_backend
def test_zero_query_scores_zero(backend, kind, device):
    """0 * inf and 0 / 0 have no place in the score: a zero query scores every page 0."""
    summary = summarize_pages(randn(1, 1, 40, 64, device=device), 16, kind=kind, backend=backend)
    assert (page_scores(torch.zeros(1, 2, 64, device=device), summary, backend=backend) == 0).all()


@each_kind
@each_backend
@pytest.mark.parametrize("bound_size", [8, 16])
def test_more_pages_than_one_block(backend, kind, bound_size, device):
    """One program scores 64 entries; the last block is partly filled, and with two entries a page the last page is."""
    q, k = randn(1, 2, 64, device=device), randn(1, 1, 16 * 130 + 3, 64, seed=1, device=device)
    assert_scores(q, k, 16, backend, kind=kind, bound_size=bound_size)


@each_kind
@each_backend
@pytest.mark.parametrize("heads, dim, entries", [(6, 128, 64), (6, 256, 32), (24, 256, 16)])
def test_programs_of_fewer_entries(backend, heads, dim, entries, kind, device):
    """Wide fp32 heads leave room for fewer entries, down to one page of 16."""
    assert scores.entries_per_program(max(16, heads // 24 * 32), dim * 4) == entries
    q, k = randn(1, heads, dim, device=device), randn(1, 1, 128 * 3 + 9, dim, seed=1, device=device)
    assert_scores(q, k, 128, backend, kind=kind, bound_size=8)


@each_kind
@each_backend
def test_strided_query_and_summary(backend, kind, device):
    """q as a slice, the summary as the used part of a larger one, its two fields laid out differently."""
    q, k = randn(2, 4, 64, device=device), randn(2, 2, 70, 64, seed=1, device=device)
    summary = summarize_pages(k, 16, kind=kind, backend=backend)
    expected = page_scores(q, summary, backend=backend)
    larger = torch.full((2, 9, 80), NAN, device=device)
    larger[:, 3:7, 8:72] = q
    view = summarize_pages(k, 16, kind=kind, backend=backend)
    for room, (name, field) in enumerate(summary.fields.items(), start=1):
        used = (slice(2), slice(2), slice(64 if name == "channel" else 5))
        wider = field.new_full((2, 2 + room, used[2].stop + room, *field.shape[3:]), NAN if field.is_floating_point() else -77)
        wider[used] = field
        setattr(view, name, wider[used])
    error = float(reference.score_error(q, summary).max())
    for query in (larger[:, 3:7, 8:72], q.transpose(0, 1).contiguous().transpose(0, 1)):
        found = page_scores(query, view, backend=backend)
        # For other strides PyTorch may multiply, and the compiler may add up the query's norm, in another order.
        assert same_bits(found, expected) if backend == "triton" and kind != "mean_radius" else ((found - expected).abs() <= 2 * error).all()


@each_backend
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "page"])
def test_summary_offsets_past_2_to_31(backend, axis, device, tmp_path):
    """Case B1 for the score's reads."""
    q, k = randn(3, 3, 64, dtype=torch.float16, device=device), randn(3, 3, 40, 64, seed=1, dtype=torch.float16, device=device)
    summary = summarize_pages(k, 16, backend=backend)
    far = [far_apart(part, axis, tmp_path) for part in (summary.kmin, summary.kmax)]
    found = page_scores(q, type(summary)("minmax", 16, summary.lengths, *far), backend=backend)
    near = page_scores(q, summary, backend=backend)
    # PyTorch's matrix product may take another algorithm for other strides: 128 products in fp32.
    assert same_bits(found, near) if backend == "triton" else torch.allclose(found, near, rtol=128 * 2**-24, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_many_pages_on_the_gpu(dtype, device):
    """Case G14: 2,048 pages, many heads; each score against fp64, so silent zeros cannot hide."""
    q, k = randn(2, 32, 128, dtype=dtype, device=device), randn(2, 8, 32768, 128, seed=1, dtype=dtype, device=device)
    assert_scores(q, k, 16, "triton")
