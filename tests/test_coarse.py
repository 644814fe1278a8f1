"""Coarse keys: how far from the keys they are, what they cost, and pages ranked by them."""

import pytest
import torch

from pageskip_lib import Budget, reference
from pageskip_lib.quality import coarse, grid
from pageskip_lib.quality.policies import CoarsePolicy
from pageskip_lib.quality.recall import Setting


def keys_like(batch=2, kv_heads=3, tokens=200, dim=64, dtype=torch.float32):
    """Channels of different size and place, as keys have them."""
    draws = torch.Generator().manual_seed(tokens)
    scale, shift = torch.rand(dim, generator=draws) * 4, torch.randn(dim, generator=draws) * 3
    return (torch.randn(batch, kv_heads, tokens, dim, generator=draws) * scale + shift).to(dtype)


@pytest.mark.parametrize("tokens", (1, 31, 32, 33, 200))
def test_a_coarse_number_lies_in_the_quarter_of_the_key(tokens):
    """Half a quarter of the box's side away at most, and each corner of the box is at most two 126ths of its largest key too far out."""
    keys = keys_like(tokens=tokens)
    found = coarse.coarse_keys(keys)
    assert found.shape == keys.shape and found.dtype == torch.float32
    for start in range(0, tokens, coarse.BOX):
        part = keys[:, :, start : start + coarse.BOX]
        side = (part.amax(2) - part.amin(2))[:, :, None] + 4 * part.abs().amax((2, 3))[:, :, None, None] / 126
        assert ((found[:, :, start : start + coarse.BOX] - part).abs() <= side / coarse.PARTS / 2 * 1.001).all()
    if tokens == 200:  # and it is coarse: no more than four values a channel and box
        assert all(len(found[0, 0, :32, channel].unique()) <= 4 for channel in range(8)) and (found - keys).abs().max() > 0.5


def test_two_bits_a_number_and_a_box_for_32_tokens():
    assert coarse.coarse_bytes(64, 128) == 64 * 128 // 4 + 2 * (2 * 128 + 4)
    assert coarse.coarse_bytes(65, 128) - coarse.coarse_bytes(64, 128) == 32 + 260
    setting = Setting("coarse", 64, group="sum")
    assert setting.summary_bytes(4096, 64, 2) == CoarsePolicy(Budget(9), 64).summary_bytes(4096, 64, 2) == coarse.coarse_bytes(4096, 64)
    assert setting.pages_within(1 / 8, 4096, 64, 2) == (4096 * 256 // 8 - coarse.coarse_bytes(4096, 64)) // (64 * 256)


@pytest.mark.parametrize("group", ("max", "sum"))
def test_pages_are_worth_the_attention_that_coarse_tokens_get(group):
    """By definition: the reference's softmax over the coarse keys, page by page, of each sequence alone; what lies past the length is not seen."""
    keys, lengths = keys_like(), torch.tensor([200, 77], dtype=torch.int32)
    q = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1))
    keys[1, :, 77:] = float("nan")
    found = coarse.coarse_mass(q, keys, lengths, 16, group)
    assert found.shape == (2, 3, 13)
    for row, length in enumerate(lengths.tolist()):
        whole = torch.zeros(1, 3, 200, 64)  # with what is not seen: all boxes size the channels
        whole[:, :, :length] = keys[row : row + 1, :, :length]
        each = coarse.coarse_keys(whole)[:, :, :length].repeat_interleave(2, dim=1)  # the reference averages a group: here each head is one
        shares = reference.page_mass(q[row : row + 1], each, 16).view(3, 2, -1)
        expected = shares.amax(1) if group == "max" else shares.sum(1)
        torch.testing.assert_close(found[row, :, : expected.shape[1]].double(), expected.double(), rtol=1e-4, atol=1e-6)
        assert (found[row, :, expected.shape[1] :] == 0).all()


def test_the_page_with_the_key_that_the_query_wants_comes_first():
    """One key among 512 points at the query; a page's mean says nothing of it."""
    keys = keys_like(1, 1, 512)
    q = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(2))
    keys[0, 0, 300] = q[0, 0] * 8
    policy = CoarsePolicy(Budget(4, sink=1, local=1), 16)
    assert 300 // 16 in policy.choose(5, q, keys, torch.tensor([512], dtype=torch.int32), None).pages.flatten().tolist()
    assert policy.choose(1, q, keys, None, None) is None


def test_a_length_of_zero_asks_for_nothing():
    q, keys = torch.randn(2, 3, 64), keys_like(2)
    assert (coarse.coarse_mass(q, keys, torch.tensor([0, 5], dtype=torch.int32), 16, "sum")[0] == 0).all()


def test_groups_that_it_does_not_know_are_refused():
    for make in (lambda: CoarsePolicy(Budget(9), 16, group="none"), lambda: Setting("coarse", 16), lambda: Setting("coarse", 16, group="union")):
        with pytest.raises(ValueError, match="'max' or 'sum'"):
            make()


def test_the_grid_has_it_for_both_page_sizes():
    assert {(one.page_size, one.group) for one in grid.SETTINGS if one.policy == "coarse"} == {(16, "max"), (16, "sum"), (64, "max"), (64, "sum")}
    policy = grid.policy_for(Setting("coarse", 64, group="max"), 1 / 4, 4096, 64, 2)
    assert isinstance(policy, CoarsePolicy) and (policy.group, policy.page_size) == ("max", 64)
