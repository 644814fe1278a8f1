"""`merge_partials`: adding parts up is attention over all their tokens, in any order, empty parts included."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageskip_lib import dense_decode, merge, merge_partials

from helpers import (
    Guarded, Unlaunchable, assert_is_attention, dtypes_for, each_backend, each_backend_and_dtype, make_qkv, randn, same_bits, unit_roundoff,
)  # fmt: skip

INF, NAN = float("inf"), float("nan")
FEW = settings(
    max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def merge_in_fp64(outs, lses):
    """The definition: weights exp(lse), normalised, over the parts that hold something."""
    lses = lses.cpu().double()
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - total.masked_fill(total == -INF, 0.0))[..., None]
    return torch.where(weights > 0, outs.cpu().double(), 0.0).mul(weights).sum(0), total


def assert_merged(found, outs, lses):
    out, lse = merge_in_fp64(outs, lses)
    # exp, the division and the sum over S parts are fp32 (an ulp or two each); the result is rounded to outs' dtype once.
    relative = (len(outs) + 8) * 2**-23 + unit_roundoff(found[0].dtype)
    largest = float(torch.where(lses[..., None] > -INF, outs, 0.0).abs().max()) if outs.numel() else 0.0
    spread = 2**-23 * float(lses[lses > -INF].abs().max()) if (lses > -INF).any() else 0.0  # lse - pivot is rounded too
    torch.testing.assert_close(found[0].cpu().double(), out, rtol=0, atol=(relative + 2 * spread) * largest)
    torch.testing.assert_close(found[1].cpu().double(), lse, rtol=2**-22, atol=2**-21)


@each_backend_and_dtype
def test_parts_of_a_cache_add_up_to_the_whole(backend, dtype, device):
    """Cut anywhere: three parts of one cache merge to attention over all of it."""
    q, k, v = make_qkv(2, 4, 2, 100, 64, dtype=dtype, device=device)
    parts = [dense_decode(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 1), (1, 60), (60, 100))]
    outs, lses = (torch.stack(each) for each in zip(*parts))
    out, lse = merge_partials(outs, lses, backend=backend)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_merged((out, lse), outs, lses)
    if dtype == torch.float32:  # parts in fp16 were rounded before the merge
        assert_is_attention((out, lse), q, k, v)


@each_backend
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 17])
def test_any_number_of_parts(backend, parts, device):
    outs, lses = randn(parts, 2, 3, 80, device=device), 10 * randn(parts, 2, 3, seed=1, device=device)
    assert_merged(merge_partials(outs, lses, backend=backend), outs, lses)


@each_backend
@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_empty_part_changes_nothing(backend, garbage, where, device):
    """Case A5: an empty part is lse = -inf, and whatever its buffer holds stays out."""
    outs, lses = randn(2, 1, 2, 64, device=device), randn(2, 1, 2, seed=1, device=device)
    expected = merge_partials(outs, lses, backend=backend)
    empty_out, empty_lse = torch.full_like(outs[:1], garbage), torch.full_like(lses[:1], -INF)
    outs = torch.cat([outs[:where], empty_out, outs[where:]])
    lses = torch.cat([lses[:where], empty_lse, lses[where:]])
    found = merge_partials(outs, lses, backend=backend)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
def test_all_parts_empty(backend, garbage, device):
    """Case A1: -inf - (-inf) must not become NaN; the row beside it is not touched."""
    outs, lses = randn(3, 1, 2, 64, device=device), randn(3, 1, 2, seed=1, device=device)
    lses[:, 0, 1], outs[:, 0, 1] = -INF, garbage
    out, lse = merge_partials(outs, lses, backend=backend)
    assert (out[0, 1] == 0).all() and lse[0, 1] == -INF
    assert_merged((out[:, :1], lse[:, :1]), outs[:, :, :1], lses[:, :, :1])


@each_backend
@pytest.mark.parametrize("level", [-1e4, -200.0, 200.0, 1e4])
def test_far_away_lses_neither_overflow_nor_vanish(backend, level, device):
    """exp(200) is no fp32 number; only differences between the parts may be exponentiated."""
    outs, lses = randn(3, 1, 2, 64, device=device), randn(3, 1, 2, seed=1, device=device) + level
    assert_merged(merge_partials(outs, lses, backend=backend), outs, lses)


@each_backend
def test_one_part_is_returned_bit_for_bit(backend, device):
    outs, lses = randn(1, 2, 3, 64, device=device), randn(1, 2, 3, seed=1, device=device)
    out, lse = merge_partials(outs, lses, backend=backend)
    assert same_bits(out, outs[0]) and same_bits(lse, lses[0])


@each_backend
@given(
    lses=st.lists(st.one_of(st.just(-INF), st.floats(-60, 60, width=32)), min_size=3, max_size=6),
    cut=st.integers(1, 5),
    shift=st.integers(0, 5),
)
@FEW
def test_merging_is_associative_and_commutative(backend, device, lses, cut, shift):
    """((a b) (c d)) = (a b c d) = (b c d a), for any cut and rotation, with empty parts among them."""
    cut = min(cut, len(lses) - 1)
    lses = torch.tensor(lses, device=device)[:, None, None]
    outs = randn(len(lses), 1, 1, 64, device=device).masked_fill(lses[..., None] == -INF, NAN)
    at_once = merge_partials(outs, lses, backend=backend)
    halves = [merge_partials(outs[part], lses[part], backend=backend) for part in (slice(0, cut), slice(cut, None))]
    in_two = merge_partials(*(torch.stack(each) for each in zip(*halves)), backend=backend)
    rotated = merge_partials(outs.roll(shift, 0), lses.roll(shift, 0), backend=backend)
    for found in (at_once, in_two, rotated):
        assert_merged(found, outs, lses)


@each_backend
@pytest.mark.parametrize("shape", [(1, 0, 4), (1, 2, 0)])
def test_no_rows_launch_nothing(backend, shape, device, monkeypatch):
    """Case A7: no launch on an empty grid."""
    monkeypatch.setattr(merge, "_merge_kernel", Unlaunchable())
    out, lse = merge_partials(torch.zeros(*shape, 64, device=device), torch.zeros(shape, device=device), backend=backend)
    assert out.shape == (*shape[1:], 64) and lse.shape == shape[1:]


@each_backend
def test_strided_parts(backend, device):
    outs, lses = randn(2, 3, 4, 64, device=device), randn(2, 3, 4, seed=1, device=device)
    expected = merge_partials(outs, lses, backend=backend)
    found = merge_partials(outs.transpose(1, 2).contiguous().transpose(1, 2), lses.mT.contiguous().mT, backend=backend)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@pytest.mark.parametrize("dim", [64, 80, 96, 192])
@pytest.mark.parametrize("parts", [3, 8])
def test_merge_writes_inside_its_output(parts, dim, device):
    """Case C2: head dims and part counts that are no power of two are padded, and the padding is not stored."""
    guarded = Guarded()
    workspace = guarded.workspace(torch.empty(1, 3, dim, device=device), parts)
    outs, lses = workspace.outs, workspace.lses
    outs.copy_(randn(*outs.shape, device=device))
    lses.copy_(randn(*lses.shape, seed=1, device=device))
    assert_merged(workspace.merge(parts), outs, lses)
    assert guarded.intact()


def test_partials_are_fp32_whatever_the_query(device):
    """Case C8."""
    for dtype in dtypes_for("torch"):
        workspace = merge.Workspace(torch.zeros(2, 4, 64, dtype=dtype, device=device), 3)
        outs, lses = workspace.partials(3)
        assert outs.dtype == lses.dtype == torch.float32
        assert outs.shape == (3, 2, 4, 64) and lses.shape == (3, 2, 4)
