"""Summaries beside somebody else's blocks: what a slot says is what its page holds now, whatever it held before."""

import pytest
import torch
from helpers import each_backend, int32, make_qkv, randn, same_bits

from pageskip_lib import page_scores, summarize_pages
from pageskip_lib.block_summaries import BlockSummaries

KINDS = [("minmax", 16), ("minmax", 8), ("minmax8", 16), ("minmax8", 8), ("mean_radius", 16)]
HELD = int32([16, 5, 1, 9])


def pool(pages, kv_heads, dim, device, seed=0, dtype=torch.float32):
    """A pool as engines lay it out, token by token, with other layers' pages between: [pages, Hkv, 16, D]."""
    return randn(2 * pages, 16, kv_heads, dim, seed=seed, dtype=dtype, device=device)[::2].transpose(1, 2)


def of(pages, page, held, kind, bound_size, channel=None):
    """The fields that the pages have, each as a sequence of its own."""
    fields = summarize_pages(pages[page].contiguous(), 16, lengths=held, kind="minmax" if channel is not None else kind, bound_size=bound_size).fields
    if channel is None:
        return fields
    from pageskip_lib.bounds8 import encode

    return dict(zip(("kmin", "kmax", "scale"), encode(*fields.values(), channel)))


@each_backend
@pytest.mark.parametrize("kind, bound_size", KINDS)
@pytest.mark.parametrize("dim", [64, 80])
def test_a_slot_is_its_pages_summary_and_nothing_else(kind, bound_size, dim, backend, device):
    pages, held = pool(8, 2, dim, device), HELD.to(device)
    page, slot = torch.tensor([[3, 0, 7, 2], [1, 5, 0, 4]], device=device)
    summaries = BlockSummaries(6, 16, kind, bound_size, backend)
    summaries.update(pages, page, slot, held.flip(0))  # by PyTorch, and it sizes the channels
    others = {name: field.clone() for name, field in summaries.fields.items()}
    pages[page[:3]] = pool(3, 2, dim, device, seed=1)  # other tokens, more of them or fewer
    summaries.update(pages, page[:3], slot[:3], held[:3])
    made = of(pages, page[:3], held[:3], kind, bound_size, summaries.channel)
    for name, field in summaries.fields.items():
        assert same_bits(field[slot[:3]], made[name])
        assert same_bits(field[4], others[name][4]) and not field[2:4].any(), "slots that nobody wrote to"


@each_backend
@pytest.mark.parametrize("kind, bound_size", KINDS)
def test_rows_score_as_if_their_pages_lay_in_order(kind, bound_size, backend, device):
    q, keys, _ = make_qkv(2, 6, 2, 64, 64, device=device)
    lengths, slots = int32([64, 37], device), torch.tensor([[7, 2, 5, 0], [1, 6, 3, 0]], device=device)  # a slot past a length may be anybody's
    pages, place = pool(8, 2, 64, device), torch.arange(4, device=device)
    summaries = BlockSummaries(8, 16, kind, bound_size, backend)
    for row in (0, 1):
        pages[place] = keys[row].unflatten(1, (4, 16)).transpose(0, 1)
        held = (lengths[row] - 16 * place).clamp(0, 16).int()
        some = held > 0
        summaries.update(pages, place[some], slots[row][some], held[some])
    found = page_scores(q, summaries.of_rows(slots, lengths, kind=kind, bound_size=bound_size), backend=backend)
    if kind != "minmax8":
        assert torch.equal(found, page_scores(q, summarize_pages(keys, 16, lengths=lengths, kind=kind, bound_size=bound_size), backend=backend))
        return
    # Its channels are sized by other keys: not the same codes, but never below the exact bound, and near it.
    exact = page_scores(q, summarize_pages(keys, 16, lengths=lengths, bound_size=bound_size))
    some = exact > float("-inf")
    assert torch.equal(some, found > float("-inf"))
    assert (found[some] >= exact[some] - 1e-4).all() and (found[some] - exact[some]).max() < 0.1 * exact.max()


def test_only_what_is_kept_can_be_had(device):
    summaries = BlockSummaries(4, 16, "minmax8")
    with pytest.raises(ValueError, match="'minmax8' with bound_size 16.*not 'minmax' with 16"):
        summaries.of_rows(torch.zeros(1, 1, dtype=torch.long), int32([3]))
    with pytest.raises(ValueError, match="not 'minmax8' with 8"):
        summaries.of_rows(torch.zeros(1, 1, dtype=torch.long), int32([3]), kind="minmax8", bound_size=8)
