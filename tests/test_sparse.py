"""`sparse_decode` against fp64 attention over the listed pages, and bit for bit against `dense_decode` over all of them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageskip_lib import Budget, PageList, dense_decode, merge, select_pages, sparse, sparse_decode
from pageskip_lib.checks import HEAD_DIMS, PAGE_SIZES

from helpers import (
    Guarded, Unlaunchable, assert_is_attention, each_backend, each_backend_and_dtype, far_apart, int32, make_qkv,
    poisoned_workspace, randn, same_bits,
)  # fmt: skip

INF, NAN = float("inf"), float("nan")
FEW = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def attend(q, k, v, pages, page_size, **options):
    return sparse_decode(q, k, v, pages, page_size=page_size, return_lse=True, **options)


def every_page(batch, kv_heads, lengths, page_size, device):
    """All the pages that hold tokens, listed tightly: as many columns as the longest row needs."""
    return PageList.from_rows([[range(-(-int(length) // page_size))] * kv_heads for length in lengths], device)


@each_backend_and_dtype
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_lists_of_every_kind_in_one_batch(backend, dtype, page_size, device):
    """Case D4: ragged lengths and lists that differ by row and KV head: none, first, last, a gap, all."""
    tokens = 4 * page_size + 1
    q, k, v = make_qkv(4, 4, 2, tokens, 64, dtype=dtype, device=device)
    lengths = int32([0, page_size - 1, 2 * page_size + 1, tokens], device)
    pages = PageList.from_rows([[[], []], [[0], []], [[2], [0, 2]], [[0, 2, 4], range(5)]], device)
    result = attend(q, k, v, pages, page_size, lengths=lengths, backend=backend)
    assert_is_attention(result, q, k, v, lengths=lengths, pages=pages, page_size=page_size)


@each_backend
@given(data=st.data())
@FEW
def test_random_lists_equal_the_reference(backend, device, data):
    """Case D4, at random: lengths, page size, group, head dim and lists."""
    page_size = data.draw(st.sampled_from((16, 32, 64)), "page_size")
    tokens = data.draw(st.integers(1, 150), "tokens")
    batch, kv_heads, group = (data.draw(st.integers(1, most), name) for most, name in ((2, "B"), (2, "Hkv"), (3, "G")))
    lengths = [data.draw(st.integers(0, tokens), "length") for _ in range(batch)]
    in_cache = -(-tokens // page_size)
    one_list = st.lists(st.integers(0, in_cache - 1), max_size=in_cache, unique=True)  # also pages past the length
    rows = [[data.draw(one_list, "pages") for _ in range(kv_heads)] for _ in range(batch)]
    q, k, v = make_qkv(batch, group * kv_heads, kv_heads, tokens, 64, device=device)
    pages = PageList.from_rows(rows, device)
    result = attend(q, k, v, pages, page_size, lengths=int32(lengths, device), backend=backend)
    assert_is_attention(result, q, k, v, lengths=lengths, pages=pages, page_size=page_size)


# --- a list of all pages is dense attention, bit for bit ---------------------------------------------------------------


@each_backend_and_dtype
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_all_pages_equal_dense_bit_for_bit(backend, dtype, page_size, device):
    """Case F4: with N <= K nothing is left out, and one tile order makes it the same sum."""
    q, k, v = make_qkv(3, 4, 2, 200, 64, dtype=dtype, device=device)
    lengths = int32([200, 65, 0], device)
    scores = randn(3, 2, -(-200 // page_size), device=device)
    pages = select_pages(scores, Budget(16), lengths, page_size)
    found = attend(q, k, v, pages, page_size, lengths=lengths, backend=backend)
    expected = dense_decode(q, k, v, lengths=lengths, backend=backend, return_lse=True)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
@given(page_size=st.sampled_from(PAGE_SIZES), tokens=st.integers(1, 260), data=st.data())
@FEW
def test_all_pages_equal_dense_at_random(backend, device, page_size, tokens, data):
    """The same with a list no wider than its pages: then dense decode of as many tokens deals them out alike."""
    length = data.draw(st.integers(0, tokens), "length")
    q, k, v = make_qkv(1, 2, 1, tokens, 64, device=device)
    lengths = int32([length], device)
    pages = every_page(1, 1, lengths, page_size, device)
    found = attend(q, k, v, pages, page_size, lengths=lengths, backend=backend)
    room = min(tokens, page_size * pages.pages.shape[2])
    expected = dense_decode(q, k[:, :, :room], v[:, :, :room], lengths=lengths, backend=backend, return_lse=True)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
@pytest.mark.parametrize("how", ["from_rows", "select_pages"])
def test_all_pages_of_a_long_cache_equal_dense(backend, how, device):
    """Case F4: 250 tokens of a cache with room for 1,024: dense decode of the 256 that the list has room for gives the same bits."""
    q, k, v = make_qkv(1, 8, 1, 1024, 64, device=device)
    lengths = int32([250], device)
    if how == "from_rows":
        pages = every_page(1, 1, lengths, 16, device)
    else:
        pages = select_pages(randn(1, 1, 64, device=device), Budget(16), lengths, 16)
    found = attend(q, k, v, pages, 16, lengths=lengths, backend=backend)
    expected = dense_decode(q, k[:, :, :256], v[:, :, :256], lengths=lengths, backend=backend, return_lse=True)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
def test_splits_share_out_what_the_pages_hold(backend, device):
    """Case D3: two pages of 128 with 129 tokens in them are 3 tiles, as in dense attention, and not 4."""
    q, k, v = make_qkv(1, 3, 3, 129, 64, device=device)
    pages = every_page(1, 3, [129], 128, device)
    found, expected = attend(q, k, v, pages, 128, backend=backend), dense_decode(q, k, v, backend=backend, return_lse=True)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("length", ["1", "P-1", "P", "P+1", "T"])
def test_page_edges(backend, page_size, length, device):
    """Case A10: the last page holds one token, all but one, or all of them; nothing past it is seen."""
    tokens = 2 * page_size + 2
    count = {"1": 1, "P-1": page_size - 1, "P": page_size, "P+1": page_size + 1, "T": tokens}[length]
    q, k, v = make_qkv(1, 2, 1, tokens, 64, device=device)
    k[:, :, count:], v[:, :, count:] = NAN, NAN
    lengths = int32([count], device)
    last = PageList.from_rows([[[(count - 1) // page_size]]], device)
    for pages in (last, every_page(1, 1, lengths, page_size, device)):
        result = attend(q, k, v, pages, page_size, lengths=lengths, backend=backend)
        assert_is_attention(result, q, k, v, lengths=lengths, pages=pages, page_size=page_size)


# --- padding -----------------------------------------------------------------------------------------------------------


@each_backend
def test_invalid_first_entries_do_not_poison_the_softmax(backend, device):
    """Case A3: a whole tile of -1 comes before the first valid page."""
    q, k, v = make_qkv(1, 2, 1, 130, 64, device=device)
    pages = PageList(int32([[[-1] * 8 + [0, 3]]], device), int32([[10]], device))
    result = attend(q, k, v, pages, 16, backend=backend)
    assert_is_attention(result, q, k, v, pages=pages, page_size=16)
    assert same_bits(result[0].isfinite(), torch.ones_like(q, dtype=torch.bool))


@each_backend
def test_pages_wholly_past_the_length_count_for_nothing(backend, device):
    """Case A3: listed, but the row is too short for them; first, last and alone in their row."""
    q, k, v = make_qkv(3, 2, 1, 130, 64, device=device)
    k[:, :, 20:], v[:, :, 20:] = NAN, NAN
    lengths = int32([20, 20, 0], device)
    pages = PageList.from_rows([[[0, 1, 4, 5, 6, 7]], [[5]], [[0]]], device)
    out, lse = attend(q, k, v, pages, 16, lengths=lengths, backend=backend)
    assert_is_attention((out, lse), q, k, v, lengths=lengths, pages=pages, page_size=16)
    assert (out[1:] == 0).all() and (lse[1:] == -INF).all()


@each_backend
def test_entries_past_the_count_are_not_read(backend, device):
    """The list's tail may hold anything, page numbers too."""
    q, k, v = make_qkv(1, 4, 2, 130, 64, device=device)
    junk = PageList(int32([[[1, 5, 6, 7], [0, 3, 4, 8]]], device), int32([[1, 2]], device))
    clean = PageList.from_rows([[[1], [0, 3]]], device)
    found, expected = (attend(q, k, v, pages, 16, backend=backend) for pages in (junk, clean))
    assert_is_attention(found, q, k, v, pages=clean, page_size=16)
    assert_is_attention(expected, q, k, v, pages=clean, page_size=16)


@each_backend_and_dtype
@pytest.mark.parametrize("garbage", [NAN, INF])
def test_unlisted_tokens_change_no_bit(backend, dtype, garbage, device):
    """Case A8: neither pages that are not listed nor the rest of the last page are read into the result."""
    q, k, v = make_qkv(1, 2, 1, 90, 64, dtype=dtype, device=device)
    lengths, pages = int32([81], device), PageList.from_rows([[[0, 3, 5]]], device)
    listed = torch.zeros(90, dtype=torch.bool)
    listed[0:16] = listed[48:64] = listed[80:81] = True
    results = []
    for filler in (0.0, garbage):
        k[:, :, ~listed], v[:, :, ~listed] = filler, filler
        results.append(attend(q, k, v, pages, 16, lengths=lengths, backend=backend))
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])
    assert_is_attention(results[1], q, k, v, lengths=lengths, pages=pages, page_size=16)


@each_backend
@pytest.mark.parametrize("length", [16, 17])
def test_zero_query_gives_the_mean_of_the_listed_tokens(backend, length, device):
    """Case D1: padding of the tile and of the last page must not enter the mean."""
    _, k, v = make_qkv(1, 2, 1, 80, 64, device=device)
    pages, lengths = PageList.from_rows([[[(length - 1) // 16]]], device), int32([length], device)
    out, lse = attend(torch.zeros(1, 2, 64, device=device), k, v, pages, 16, lengths=lengths, backend=backend)
    first = (length - 1) // 16 * 16
    mean = v[:, :, first:length].double().mean(2).expand(1, 2, 64)
    torch.testing.assert_close(out.double(), mean, rtol=0, atol=length * 2**-23 * float(v.abs().max()))
    torch.testing.assert_close(lse, torch.full_like(lse, length - first).log(), rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("poison", [NAN, 1e30, INF])
def test_scratch_is_never_read_before_it_is_written(poison, device, monkeypatch):
    """Case A2: rows with short lists leave most splits of a batch empty."""
    q, k, v = make_qkv(3, 2, 1, 256, 64, device=device)
    pages = PageList.from_rows([[range(16)], [[3]], [[]]], device)
    monkeypatch.setattr(sparse, "splits_for", lambda *shape: 6)
    expected = attend(q, k, v, pages, 16, backend="triton")
    found = attend(q, k, v, pages, 16, backend="triton", workspace=poisoned_workspace(q, 6, poison))
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])
    assert_is_attention(found, q, k, v, pages=pages, page_size=16)


# --- shapes ------------------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 24])
def test_any_group(backend, group, device, monkeypatch):
    """Cases C1, C2 and C5: padding heads neither alias the next KV head's list nor write outside the result."""
    guarded = Guarded()
    monkeypatch.setattr(sparse, "empty_result", guarded.empty_result)
    kv_heads = 2 if group < 12 else 1
    q, k, v = make_qkv(1, group * kv_heads, kv_heads, 66, 64, device=device)
    pages = PageList.from_rows([[[0, 4], [1, 2]][:kv_heads]], device)
    workspace = guarded.workspace(q, 8)
    assert_is_attention(attend(q, k, v, pages, 16, workspace=workspace, backend=backend), q, k, v, pages=pages, page_size=16)
    assert guarded.intact()


@each_backend
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim_and_page_size(backend, page_size, dim, device):
    """Cases C6 and C7: tiles of keys and of values cover the same pages at every width."""
    tokens = 2 * page_size + 3
    q, k, v = make_qkv(1, 2, 1, tokens, dim, dtype=torch.float16, device=device)
    pages = PageList.from_rows([[[0, 2]]], device)
    assert_is_attention(attend(q, k, v, pages, page_size, backend=backend), q, k, v, pages=pages, page_size=page_size)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
def test_result_does_not_depend_on_the_number_of_splits(splits, device, monkeypatch):
    """Case D3: lists that the splits cut unevenly."""
    q, k, v = make_qkv(1, 4, 2, 300, 64, device=device)
    pages = PageList.from_rows([[[0, 1, 4, 7, 9, 11, 12, 17, 18], [0, 5, 6, 10, 18]]], device)
    monkeypatch.setattr(sparse, "splits_for", lambda *shape: splits)
    assert_is_attention(attend(q, k, v, pages, 16, backend="triton"), q, k, v, pages=pages, page_size=16)


@each_backend
def test_row_alone_equals_row_in_a_batch(backend, device, monkeypatch):
    """Cases D4 and D10: with equal splits a row's bits do not depend on its neighbours, nor on how wide their lists are."""
    monkeypatch.setattr(sparse, "splits_for", lambda *shape: 2)
    q, k, v = make_qkv(3, 2, 1, 150, 64, device=device)
    lengths = int32([150, 17, 0], device)
    pages = PageList.from_rows([[[0, 2, 3, 5, 8, 9]], [[0, 1]], [[]]], device)
    out, lse = attend(q, k, v, pages, 16, lengths=lengths, backend=backend)
    for row in range(3):
        one = slice(row, row + 1)
        own = PageList(pages.pages[one], pages.counts[one])
        alone = attend(q[one], k[one], v[one], own, 16, lengths=lengths[one], backend=backend)
        assert same_bits(out[one], alone[0]) and same_bits(lse[one], alone[1]), f"row {row}"


@each_backend
def test_strided_inputs(backend, device):
    """k and v as transposed views of [B, T, Hkv, D], q as a slice, the list as a slice of a wider one."""
    q, k, v = make_qkv(2, 4, 2, 70, 64, device=device)
    pages = PageList.from_rows([[[0, 4], [1]], [[2, 3], [0, 1]]], device)
    expected = attend(q, k, v, pages, 16, backend=backend)
    keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    larger = torch.full((2, 7, 64), NAN, device=device)
    larger[:, 2:6] = q
    wide = torch.nn.functional.pad(pages.pages, (1, 3), value=0)
    wide_counts = torch.nn.functional.pad(pages.counts, (1, 1), value=9)
    strided = PageList(wide[..., 1:3], wide_counts[:, 1:3])
    found = attend(larger[:, 2:6], keys, values, strided, 16, backend=backend)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
def test_transposed_query(backend, device):
    """Case D8: q laid out as [Hq, B, D]."""
    q, k, v = make_qkv(3, 4, 2, 70, 64, device=device)
    pages = PageList.from_rows([[[0, 4], [1]]] * 3, device)
    transposed = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert same_bits(attend(transposed, k, v, pages, 16, backend=backend)[0], attend(q, k, v, pages, 16, backend=backend)[0])


@each_backend
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "token"])
def test_offsets_past_2_to_31(backend, axis, device, tmp_path):
    """Case B1: page number times page stride passes 2^31 elements (vllm-project/vllm#47671)."""
    q, k, v = make_qkv(3, 3, 3, 33, 64, dtype=torch.float16, device=device)
    pages = PageList.from_rows([[[0, 2], [2], [1, 2]]] * 3, device)
    expected = attend(q, k, v, pages, 16, backend=backend)
    for keys, values in ((far_apart(k, axis, tmp_path), v), (k, far_apart(v, axis, tmp_path))):
        found = attend(q, keys, values, pages, 16, backend=backend)
        assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
@pytest.mark.parametrize("batch, tokens, columns", [(0, 70, 2), (2, 0, 0), (2, 70, 0)])
def test_nothing_to_attend_launches_nothing(backend, batch, tokens, columns, device, monkeypatch):
    """Case A7: B = 0, T = 0, and lists without a column."""
    monkeypatch.setattr(sparse, "_sparse_kernel", Unlaunchable())
    monkeypatch.setattr(merge, "_merge_kernel", Unlaunchable())
    q, k, v = make_qkv(batch, 4, 2, tokens, 64, device=device)
    pages = PageList(torch.zeros(batch, 2, columns, dtype=torch.int32, device=device), torch.zeros(batch, 2, dtype=torch.int32, device=device))
    out, lse = attend(q, k, v, pages, 16, backend=backend)
    assert out.shape == q.shape and (out == 0).all() and (lse == -INF).all()


@each_backend
def test_all_lists_empty(backend, device):
    """Case A6: a selection that found nothing."""
    q, k, v = make_qkv(2, 4, 2, 70, 64, device=device)
    empty = PageList(int32([[[-1, -1]] * 2] * 2, device), int32([[0, 0]] * 2, device))
    out, lse = attend(q, k, v, empty, 16, backend=backend)
    assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_long_caches_on_the_gpu(dtype, dim, device):
    """Random lists of 16,384 tokens in every dtype and head dim."""
    q, k, v = make_qkv(2, 8, 2, 16384, dim, dtype=dtype, device=device)
    lengths = int32([16384, 9001], device)
    pages = select_pages(randn(2, 2, 256, device=device), Budget(32), lengths, 64)
    assert_is_attention(attend(q, k, v, pages, 64, lengths=lengths), q, k, v, lengths=lengths, pages=pages, page_size=64)
    everything = select_pages(randn(2, 2, 256, device=device), Budget(256), lengths, 64)
    found, expected = attend(q, k, v, everything, 64, lengths=lengths), dense_decode(q, k, v, lengths=lengths, return_lse=True)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])
