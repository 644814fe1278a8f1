"""Page summaries are the exact range of each page's keys, and the page score bounds q.k from above, whatever the keys."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageskip_lib import page_scores, reference, scores, summaries, summarize_pages
from pageskip_lib.checks import HEAD_DIMS, PAGE_SIZES

from helpers import (
    Unlaunchable, dtypes_for, each_backend, each_backend_and_dtype, far_apart, int32, randn, same_bits,
)  # fmt: skip

INF, NAN = float("inf"), float("nan")
FEW = settings(
    max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def assert_is_summary(summary, k, lengths=None):
    """kmin and kmax hold the reference's values exactly: taking a minimum rounds nothing."""
    for found, true in zip((summary.kmin, summary.kmax), reference.minmax_summary(k, summary.page_size, lengths)):
        assert found.dtype == k.dtype and found.shape == true.shape
        assert torch.equal(found.cpu().double(), true.nan_to_num(0.0, INF, -INF))  # pages without tokens hold zeros


def true_maximum(q, k, page_size):
    """The largest q.k of each page, fp64 [B, Hq, N]."""
    dots = q.cpu().double()[:, :, None] @ k.cpu().double().repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    return torch.stack([page.amax(-1) for page in dots[:, :, 0].split(page_size, dim=-1)], dim=-1)


def sum_error(q, summary):
    """Error of an fp32 sum of D products, [B, Hq, N]: the worst case, D roundings of 2^-24 of the sum of magnitudes."""
    largest = torch.maximum(summary.kmin.abs(), summary.kmax.abs()).cpu().double()
    return q.shape[-1] * 2**-23 * reference.page_bound(q.abs(), -largest, largest)


def assert_bounds(q, k, page_size, backend):
    """Score = the definition of the bound, and score >= every q.k of the page, both up to the fp32 sum's rounding."""
    summary = summarize_pages(k, page_size, backend=backend)
    score = page_scores(q, summary, group="none", backend=backend)
    assert score.dtype == torch.float32 and score.isfinite().all()
    error = sum_error(q, summary)
    assert ((score.cpu().double() - reference.page_bound(q, summary.kmin, summary.kmax)).abs() <= error).all()
    assert (score.cpu().double() >= true_maximum(q, k, page_size) - error).all()


# --- summaries ---------------------------------------------------------------------------------------------------------


@each_backend_and_dtype
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_edge_length(backend, dtype, page_size, device):
    """Case A10 for summaries: empty, one token, and both sides of a page's end."""
    tokens = 2 * page_size + 1
    k = randn(6, 2, tokens, 64, dtype=dtype, device=device)
    lengths = int32([0, 1, page_size - 1, page_size, page_size + 1, tokens], device)
    assert_is_summary(summarize_pages(k, page_size, lengths=lengths, backend=backend), k, lengths)


@each_backend_and_dtype
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_keys_past_the_length_never_enter(backend, dtype, garbage, device):
    """Case A8 for summaries."""
    k = randn(1, 2, 80, 64, dtype=dtype, device=device)
    k[:, :, 33:] = garbage
    summary = summarize_pages(k, 16, lengths=int32([33], device), backend=backend)
    assert_is_summary(summary, k, [33])
    assert (summary.kmin[:, :, 3:] == 0).all() and (summary.kmax[:, :, 3:] == 0).all()


@each_backend
def test_one_sided_pages(backend, device):
    """Padding must act as no key at all: a zero in its place would widen pages of one sign."""
    k = 1 + randn(1, 2, 33, 64, device=device).abs()
    k[:, 1] *= -1
    assert_is_summary(summarize_pages(k, 16, backend=backend), k)


@each_backend
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim(backend, dim, device):
    """Case C6: the padding of a head dim is not stored over the next page."""
    k = randn(1, 2, 40, dim, device=device)
    summary = summarize_pages(k, 16, backend=backend)
    assert_is_summary(summary, k)
    q = randn(1, 4, dim, seed=1, device=device)
    assert_bounds(q, k, 16, backend)


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
    summary = summarize_pages(torch.zeros(batch, 2, tokens, 64, device=device), 16, backend=backend)
    assert summary.kmin.shape == summary.kmax.shape == (batch, 2, -(-tokens // 16), 64)
    q = torch.zeros(batch, 4, 64, device=device)
    for group in scores.GROUPS:
        heads = 4 if group == "none" else 2
        assert page_scores(q, summary, group=group, backend=backend).shape == (batch, heads, -(-tokens // 16))


def test_bytes_of_a_scoring_pass():
    """Two vectors a page: 1/32 of the keys for 64-token pages."""
    k = torch.zeros(2, 2, 256, 128, dtype=torch.float16)
    assert summarize_pages(k, 64).bytes == 2 * 2 * 2 * 4 * 128 * 2 == k.numel() * 2 // 32


def test_summary_does_not_alias_the_cache(device):
    k = randn(1, 1, 16, 64, device=device)
    summary = summarize_pages(k, 16)
    before = summary.kmax.clone()
    k += 1
    assert same_bits(summary.kmax, before)


# --- the bound ---------------------------------------------------------------------------------------------------------


@each_backend_and_dtype
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_score_is_a_bound_on_random_keys(backend, dtype, page_size, device):
    """Case C10: also with a large common offset, where a rounded centre and half-width would fall below the maximum."""
    q, k = randn(1, 4, 64, dtype=dtype, device=device), randn(1, 2, 2 * page_size + 5, 64, seed=1, dtype=dtype, device=device)
    assert_bounds(q, k, page_size, backend)
    assert_bounds(q.abs(), k + 100, page_size, backend)


@each_backend
@given(
    data=st.data(),
    magnitude=st.sampled_from([2.0**-24, 2.0**-14, 1e-3, 1.0, 30.0, 1004.0, 60000.0]),
    shape=st.sampled_from(["random", "constant", "two values", "signed zeros", "one outlier", "copies of q"]),
)
@FEW
def test_score_is_a_bound_on_adversarial_keys(backend, device, data, magnitude, shape):
    """Case C9 and its kin: ties, constant pages, negative zeros, outliers, subnormal and huge magnitudes in fp16."""
    seed = data.draw(st.integers(0, 10**6), "seed")
    dtype = data.draw(st.sampled_from(dtypes_for(backend)), "dtype")
    q, k = randn(1, 3, 64, seed=seed, device=device), randn(1, 1, 40, 64, seed=seed + 1, device=device)
    if shape == "constant":
        k = k[:, :, :1].expand_as(k)
    elif shape == "two values":
        k, q = k.sign(), q.sign()
    elif shape == "signed zeros":
        k = torch.zeros_like(k).copysign(k)
    elif shape == "one outlier":
        k[:, :, 17, 5] *= 1000
    elif shape == "copies of q":
        k[:, :, ::7] = q[:, :1, None]
    limit = 65504.0 if dtype == torch.float16 else 1e30
    assert_bounds((q * min(magnitude, 3e4)).clamp(-limit, limit).to(dtype), (k * magnitude).clamp(-limit, limit).to(dtype), 16, backend)


@each_backend
def test_largest_fp16_keys_stay_finite(backend, device):
    """Case C9: kmin + kmax and the products overflow fp16, the fp32 score does not."""
    k = torch.full((1, 1, 16, 64), 60000.0, dtype=torch.float16, device=device)
    k[:, :, ::2] *= -1
    q = torch.full((1, 1, 64), 60000.0, dtype=torch.float16, device=device)
    expected = 64 * float(q[0, 0, 0]) ** 2
    assert page_scores(q, summarize_pages(k, 16, backend=backend), backend=backend).item() == pytest.approx(expected, rel=64 * 2**-23)


@each_backend_and_dtype
def test_wide_heads_near_30_are_summed_in_fp32(backend, dtype, device):
    """Case C12: 256 products of 900 pass fp16's 65504."""
    q, k = (torch.full(shape, 30.0, dtype=dtype, device=device) for shape in ((1, 1, 256), (1, 1, 16, 256)))
    score = page_scores(q, summarize_pages(k, 16, backend=backend), backend=backend)
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
def test_groups(backend, group, heads_per_kv, device):
    """Cases C1, C2, G11 and G12: how the heads of a group agree; padded heads have no vote."""
    q, k = randn(1, 2 * heads_per_kv, 64, device=device), randn(1, 2, 100, 64, seed=1, device=device)
    q[:, 0] *= 10  # one head ten times as loud
    k, q = (k - 1, q.abs()) if heads_per_kv == 3 else (k, q)  # every bound of this one may be below 0, the padding's score
    summary = summarize_pages(k, 16, backend=backend)
    score = page_scores(q, summary, group=group, backend=backend)
    error = float(sum_error(q, summary).max()) * heads_per_kv
    expected = grouped(reference.page_bound(q, summary.kmin, summary.kmax), 2, group)
    torch.testing.assert_close(score.cpu().double(), expected, rtol=0, atol=error)


@each_backend
def test_padding_heads_do_not_win_when_all_scores_are_negative(backend, device):
    """Case C2: three heads padded to sixteen; a padded head's bound is 0, above every real one here."""
    q, k = torch.ones(1, 3, 64, device=device), -torch.ones(1, 1, 32, 64, device=device)
    summary = summarize_pages(k, 16, backend=backend)
    assert page_scores(q, summary, group="max", backend=backend).tolist() == [[[-64.0, -64.0]]]


@each_backend
@pytest.mark.parametrize("group", scores.GROUPS)
def test_pages_past_the_length_are_minus_infinity(backend, group, device):
    """Cases A6 and G9: masked by the length and not by value, an empty row included, and never NaN."""
    q, k = randn(4, 4, 64, device=device), randn(4, 2, 70, 64, seed=1, device=device)
    lengths = [0, 1, 33, 70]
    summary = summarize_pages(k, 16, lengths=int32(lengths, device), backend=backend)
    score = page_scores(q, summary, group=group, backend=backend)
    for row, length in enumerate(lengths):
        held = -(-length // 16)
        assert score[row, :, :held].isfinite().all() and (score[row, :, held:] == -INF).all()


@each_backend
@pytest.mark.parametrize("filler", [NAN, INF])
def test_summaries_of_untouched_pages_are_not_read(backend, filler, device):
    """Case G9: pages past the length may hold anything."""
    q, k = randn(1, 2, 64, device=device), randn(1, 1, 80, 64, seed=1, device=device)
    summary = summarize_pages(k, 16, lengths=int32([30], device), backend=backend)
    expected = page_scores(q, summary, backend=backend)
    summary.kmin[:, :, 2:], summary.kmax[:, :, 2:] = filler, filler
    found = page_scores(q, summary, backend=backend)
    assert same_bits(found, expected)


@each_backend
def test_zero_query_scores_zero(backend, device):
    """0 * inf has no place in the score: a zero query scores every page 0."""
    summary = summarize_pages(randn(1, 1, 40, 64, device=device), 16, backend=backend)
    assert (page_scores(torch.zeros(1, 2, 64, device=device), summary, backend=backend) == 0).all()


@each_backend
def test_more_pages_than_one_block(backend, device):
    """One program scores 64 pages; the last block is partly filled."""
    q, k = randn(1, 2, 64, device=device), randn(1, 1, 16 * 130, 64, seed=1, device=device)
    assert_bounds(q, k, 16, backend)


@each_backend
def test_strided_query_and_summary(backend, device):
    """q as a slice, the summary as the used part of a larger one."""
    q, k = randn(2, 4, 64, device=device), randn(2, 2, 70, 64, seed=1, device=device)
    summary = summarize_pages(k, 16, backend=backend)
    expected = page_scores(q, summary, backend=backend)
    larger = torch.full((2, 9, 80), NAN, device=device)
    larger[:, 3:7, 8:72] = q
    parts = [torch.nn.functional.pad(part, (0, 0, 0, 3), value=NAN)[:, :, :5] for part in (summary.kmin, summary.kmax)]
    view = type(summary)("minmax", 16, summary.lengths, *parts)
    for query in (larger[:, 3:7, 8:72], q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert same_bits(page_scores(query, view, backend=backend), expected)


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
    assert_bounds(q, k, 16, "triton")
