"""Attention through a page table: the same bits as over the pages in order, wherever the pages lie."""

import pytest
import torch

from pageskip_lib import (
    Budget, PagedKVCache, PageList, decode_workspace, dense, dense_decode, page_scores, select_pages, sparse, sparse_decode, summarize_pages,
)  # fmt: skip

from helpers import (
    Unlaunchable, assert_is_attention, each_backend, each_backend_and_dtype, far_apart, int32, make_qkv, poisoned_workspace, randn,
    same_bits,
)  # fmt: skip

NAN = float("nan")


def paged(k, v, page_size, lengths, *, spare=3, seed=0):
    """(k pool, v pool, table) that hold k, v [B, Hkv, N * P, D] in shuffled pages. NaN past the lengths and in spare pages, -1 for pages unused."""
    batch, kv_heads, tokens, dim = k.shape
    pages = tokens // page_size
    order = torch.randperm(batch * pages + spare, generator=torch.Generator().manual_seed(seed))[: batch * pages].view(batch, pages)
    valid = torch.arange(tokens, device=k.device) < lengths[:, None]
    pools = []
    for x in (k, v):
        pool = x.new_full((batch * pages + spare, kv_heads, page_size, dim), NAN)
        known = x.masked_fill(~valid[:, None, :, None], NAN)
        pool[order.flatten()] = known.unflatten(2, (pages, page_size)).transpose(1, 2).flatten(0, 1)
        pools.append(pool)
    table = order.to(torch.int32).to(k.device)
    return *pools, table.masked_fill(torch.arange(pages, device=k.device) * page_size >= lengths[:, None], -1)


def pages_of(lengths, kv_heads, page_size, device):
    """A list for each KV head of each sequence: every other page and the last one."""
    held = [-(-length // page_size) for length in lengths.tolist()]
    return PageList.from_rows([[{*range(head % 2, pages, 2), *range(pages)[-1:]} for head in range(kv_heads)] for pages in held], device)


@each_backend_and_dtype
@pytest.mark.parametrize("page_size, dim", [(16, 64), (16, 192), (32, 80), (64, 96), (128, 64)])
def test_a_shuffled_table_gives_the_bits_of_the_pages_in_order(backend, dtype, page_size, dim, device):
    """Case D5: pages smaller and larger than a tile, empty rows, ends inside a page, heads in groups of 3 (flashinfer-ai/flashinfer#1976)."""
    q, k, v = make_qkv(4, 6, 2, 3 * 128, dim, dtype=dtype, device=device)
    lengths = int32([3 * 128, 0, 1, 2 * page_size + 5], device)
    k_pool, v_pool, table = paged(k, v, page_size, lengths)
    same = dict(lengths=lengths, backend=backend, return_lse=True)
    found, flat = dense_decode(q, k_pool, v_pool, table=table, **same), dense_decode(q, k, v, **same)
    assert all(same_bits(a, b) for a, b in zip(found, flat))
    assert_is_attention(found, q, k, v, lengths=lengths)
    pages = pages_of(lengths, 2, page_size, device)
    for listed in (pages, select_pages(torch.zeros(4, 2, 384 // page_size, device=device), Budget(384 // page_size), lengths, page_size)):
        found = sparse_decode(q, k_pool, v_pool, listed, page_size=page_size, table=table, **same)
        flat = sparse_decode(q, k, v, listed, page_size=page_size, **same)
        assert all(same_bits(a, b) for a, b in zip(found, flat))
        assert_is_attention(found, q, k, v, lengths=lengths, pages=listed, page_size=page_size)


@each_backend
def test_splits_workspace_and_whole_tables(backend, device):
    """Any split count, no lengths, scratch full of NaN: every tile finds its page, the first of a split and the last."""
    q, k, v = make_qkv(2, 2, 1, 640, 64, device=device)
    full = int32([640, 640], device)
    k_pool, v_pool, table = paged(k, v, 32, full)
    for splits in (1, 2, 3, 7, None):
        workspace = poisoned_workspace(q, decode_workspace(q, k_pool, table=table).splits if splits is None else splits, NAN)
        found = dense_decode(q, k_pool, v_pool, table=table, splits=splits, workspace=workspace, backend=backend)
        assert same_bits(found, dense_decode(q, k, v, splits=splits, backend=backend))
    assert decode_workspace(q, k_pool, table=table).splits == decode_workspace(q, k).splits
    pages = pages_of(full, 1, 32, device)
    found = sparse_decode(q, k_pool, v_pool, pages, page_size=32, table=table, backend=backend)
    assert same_bits(found, sparse_decode(q, k, v, pages, page_size=32, backend=backend))


@each_backend
def test_sequences_that_share_pages(backend, device):
    """Case D5: two sequences begin with the same two pages; a pool in another layout, [pages, P, Hkv, D]."""
    q, k, v = make_qkv(2, 4, 2, 96, 64, device=device)
    k[1, :, :32], v[1, :, :32] = k[0, :, :32], v[0, :, :32]
    lengths = int32([90, 50], device)
    k_pool, v_pool, table = paged(k, v, 16, lengths)
    k_pool[table[1, :2].long()], v_pool[table[1, :2].long()] = NAN, NAN
    table[1, :2] = table[0, :2]
    k_pool, v_pool = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_pool, v_pool))
    pages = PageList.from_rows([[[0, 2, 5], [1, 4]], [[0, 1], [1, 3]]], device)
    same = dict(lengths=lengths, backend=backend, return_lse=True)
    assert_is_attention(dense_decode(q, k_pool, v_pool, table=table, **same), q, k, v, lengths=lengths)
    found = sparse_decode(q, k_pool, v_pool, pages, page_size=16, table=table, **same)
    assert_is_attention(found, q, k, v, lengths=lengths, pages=pages, page_size=16)


@each_backend
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["page", "head", "token"])
def test_pool_offsets_past_2_to_31(backend, axis, device, tmp_path):
    """Case B1: a page number times the stride of a page passes 2^31 elements (vllm-project/vllm#47671)."""
    q, k, v = make_qkv(1, 3, 3, 48, 64, dtype=torch.float16, device=device)
    lengths = int32([41], device)
    k_pool, v_pool, table = paged(k, v, 16, lengths, spare=0)
    far = [far_apart(x.nan_to_num(), axis, tmp_path) for x in (k_pool, v_pool)]
    assert same_bits(dense_decode(q, *far, table=table, lengths=lengths, backend=backend), dense_decode(q, k, v, lengths=lengths, backend=backend))
    pages = pages_of(lengths, 3, 16, device)
    found = sparse_decode(q, *far, pages, page_size=16, lengths=lengths, table=table, backend=backend)
    assert same_bits(found, sparse_decode(q, k, v, pages, page_size=16, lengths=lengths, backend=backend))


@each_backend_and_dtype
@pytest.mark.parametrize("kind", ["minmax8", "minmax"])
def test_a_whole_step_over_the_paged_cache(backend, dtype, kind, device):
    """Cases D5, G3, G6 and K2: append, score, select, attend, the lengths from the device; equal to the same calls over the pages in order."""
    cache = PagedKVCache(60, 2, 64, rows=3, row_pages=20, page_size=16, dtype=dtype, device=device, kind=kind, backend=backend)
    cache._free = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    cache.k.fill_(NAN), cache.v.fill_(NAN)
    given = lambda *shape, seed: [randn(*shape, seed=seed + n, dtype=dtype, device=device) for n in (0, 1)]  # noqa: E731
    cache.append(*given(1, 2, 250, 64, seed=0), rows=[0])
    cache.fork(0, 2)
    cache.append(*given(1, 2, 15, 64, seed=2), rows=[1])
    for step in range(4):
        cache.append(*given(3, 2, 64, seed=10 * step))
        q = randn(3, 6, 64, seed=10 * step + 5, dtype=dtype, device=device)
        pages = select_pages(page_scores(q, cache.summary, backend=backend), Budget(5), cache.lengths, 16, backend=backend)
        newest = [(length - 1) // 16 for length in cache.host_lengths]
        assert all(newest[row] in head for row, heads in enumerate(pages.pages.tolist()) for head in heads)
        k, v = cache.view()
        same = dict(lengths=cache.lengths, backend=backend, return_lse=True)
        found = sparse_decode(q, cache.k, cache.v, pages, page_size=16, table=cache.table, **same)
        assert_is_attention(found, q, k, v, lengths=cache.lengths, pages=pages, page_size=16)
        assert all(same_bits(a, b) for a, b in zip(found, sparse_decode(q, k, v, pages, page_size=16, **same)))
        found = dense_decode(q, cache.k, cache.v, table=cache.table, **same)
        assert all(same_bits(a, b) for a, b in zip(found, dense_decode(q, k, v, **same)))
        if kind == "minmax":  # no other choice than a summary of the pages in order would make
            rebuilt = page_scores(q, summarize_pages(k, 16, lengths=cache.lengths), backend=backend)
            assert torch.equal(pages.pages, select_pages(rebuilt, Budget(5), cache.lengths, 16, backend=backend).pages)


def test_bad_tables_are_refused_before_a_launch(device, monkeypatch):
    monkeypatch.setattr(dense, "_dense_kernel", Unlaunchable())
    monkeypatch.setattr(sparse, "_sparse_kernel", Unlaunchable())
    q, k, v = make_qkv(2, 2, 1, 64, 64, device=device)
    lengths = int32([40, 20], device)
    k_pool, v_pool, table = paged(k, v, 16, lengths)
    pages = pages_of(lengths, 1, 16, device)
    wrong = [
        (dict(table=table.tolist()), "table must be a torch tensor"), (dict(table=table.long()), "table must be int32"),
        (dict(table=table[:1]), "table must have one row for each of the 2 sequences"), (dict(table=table[0]), r"table must have shape \[B, N\]"),
        (dict(table=table.t().contiguous().t()), "table must be contiguous"), (dict(k=k_pool[:, :, :15], v=v_pool[:, :, :15]), "at least one page"),
        (dict(k=k_pool[:0], v=v_pool[:0]), "at least one page"), (dict(q=q[..., :32]), "k must have q's head dim 32"),
    ]  # fmt: skip
    if device == "cpu":  # where values can be read without waiting
        missing = table.clone()
        missing[1, 1] = -1
        wrong += [(dict(table=table + 99), "table must hold pages from 0 to 10"), (dict(table=missing), "has -1 for page 1 of sequence 1")]
    for change, message in wrong:
        given = dict(q=q, k=k_pool, v=v_pool, table=table, lengths=lengths, backend="auto") | change
        with pytest.raises((ValueError, TypeError), match=message):
            dense_decode(**given)
        with pytest.raises((ValueError, TypeError), match=message):
            sparse_decode(**given, pages=pages, page_size=16)
    with pytest.raises(ValueError, match="page_size must be the 16 tokens of the table's pages, got 32"):
        sparse_decode(q, k_pool, v_pool, pages, page_size=32, table=table, lengths=lengths)
    assert dense_decode(q[:0], k_pool, v_pool, table=table[:0]).shape == (0, 2, 64)
    assert (dense_decode(q, k_pool, v_pool, table=table[:, :0].contiguous()) == 0).all()
