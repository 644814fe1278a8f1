"""`dense_decode` against fp64 attention: edges, padding, strides, splits, groups, head dims, and what it writes where."""

import itertools

import pytest
import torch

from pageskip_lib import decode_workspace, dense, dense_decode, merge, runtime
from pageskip_lib.checks import HEAD_DIMS

from helpers import (
    Guarded, Unlaunchable, assert_is_attention, attention_errors, each_backend, each_backend_and_dtype, far_apart, int32,
    make_qkv, poisoned_workspace, same_bits,
)  # fmt: skip

INF, NAN = float("inf"), float("nan")
EDGE_LENGTHS = [0, 1, 63, 64, 65, 130]  # of a 130-token cache: one tile is 64 tokens (cases A10, D4)


def attend(q, k, v, **options):
    return dense_decode(q, k, v, return_lse=True, **options)


@each_backend_and_dtype
def test_every_edge_length_in_one_batch(backend, dtype, device):
    """Cases A10 and D4: each row has its own length, from empty to full."""
    q, k, v = make_qkv(6, 4, 2, 130, 64, dtype=dtype, device=device)
    lengths = int32(EDGE_LENGTHS, device)
    assert_is_attention(attend(q, k, v, lengths=lengths, splits=2, backend=backend), q, k, v, lengths=lengths)


@each_backend_and_dtype
def test_empty_row_is_zero_and_minus_infinity(backend, dtype, device):
    """Case A1: every split of a row is empty, whatever the number of splits; the other row is untouched."""
    q, k, v = make_qkv(2, 4, 2, 70, 64, dtype=dtype, device=device)
    alone = attend(q[1:], k[1:], v[1:], splits=3, backend=backend)
    out, lse = attend(q, k, v, lengths=int32([0, 70], device), splits=3, backend=backend)
    assert (out[0] == 0).all() and (lse[0] == -INF).all()
    assert same_bits(out[1:], alone[0]) and same_bits(lse[1:], alone[1])


@each_backend_and_dtype
@pytest.mark.parametrize("splits", [1, 8])
def test_one_token_returns_its_value_exactly(backend, dtype, splits, device):
    """Case A10: with one token the softmax is 1, so the result is V[0] bit for bit."""
    q, k, v = make_qkv(1, 4, 2, 65, 64, dtype=dtype, device=device)
    out, lse = attend(q, k, v, lengths=int32([1], device), splits=splits, backend=backend)
    assert same_bits(out, v[:, :, 0].repeat_interleave(2, dim=1))
    assert_is_attention((out, lse), q, k, v, lengths=[1])


@each_backend
@pytest.mark.parametrize("length", [1, 17, 63, 64, 65, 130])
def test_lse_is_the_natural_logarithm(backend, length, device):
    """Case I6: lse is torch.logsumexp of the scaled scores, not a log2."""
    q, k, v = make_qkv(1, 2, 1, 130, 64, device=device)
    _, lse = attend(q, k, v, lengths=int32([length], device), backend=backend)
    scores = (q.double() @ k[:, 0, :length].double().transpose(1, 2)) * 64**-0.5
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), rtol=2**-22, atol=attention_errors(q, k, v, 64**-0.5)[1])


@pytest.mark.parametrize("poison", [NAN, 1e30, INF])
def test_scratch_is_never_read_before_it_is_written(poison, device):
    """Case A2: splits past a row's length must not leave what an earlier call left in the scratch."""
    q, k, v = make_qkv(2, 2, 1, 256, 64, device=device)
    lengths = int32([65, 0], device)
    expected = attend(q, k, v, lengths=lengths, splits=6, backend="triton")
    found = attend(q, k, v, lengths=lengths, splits=6, backend="triton", workspace=poisoned_workspace(q, 6, poison))
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])
    assert_is_attention(found, q, k, v, lengths=lengths)


@each_backend_and_dtype
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("length", [1, 65])
def test_garbage_past_the_length_changes_no_bit(backend, dtype, garbage, length, device):
    """Case A8: 0 * NaN is NaN, so padded values must be masked on load and not only in the scores."""
    q, k, v = make_qkv(1, 2, 1, 130, 64, dtype=dtype, device=device)
    lengths = int32([length], device)
    k[:, :, length:], v[:, :, length:] = 0.0, 0.0
    clean = attend(q, k, v, lengths=lengths, splits=2, backend=backend)
    k[:, :, length:], v[:, :, length:] = garbage, garbage
    dirty = attend(q, k, v, lengths=lengths, splits=2, backend=backend)
    assert same_bits(dirty[0], clean[0]) and same_bits(dirty[1], clean[1])


@each_backend_and_dtype
@pytest.mark.parametrize("length", [1, 16, 65])
def test_zero_query_gives_the_plain_mean(backend, dtype, length, device):
    """Case D1: equal scores weigh every valid token alike; padding of the last tile must not take part."""
    _, k, v = make_qkv(1, 2, 2, 130, 64, dtype=dtype, device=device)
    q = torch.zeros(1, 2, 64, dtype=dtype, device=device)
    out, lse = attend(q, k, v, lengths=int32([length], device), splits=2, backend=backend)
    # Weights are exactly 1, so only the fp32 sum and the final rounding are left.
    error = (torch.finfo(dtype).eps + length * 2**-23) * float(v.abs().max())
    torch.testing.assert_close(out.double(), v[:, :, :length].double().mean(2), rtol=0, atol=error)
    torch.testing.assert_close(lse, torch.full_like(lse, length).log(), rtol=2**-22, atol=2**-22)


@each_backend
def test_scores_far_apart_and_very_large(backend, device):
    """The running maximum grows from tile to tile and falls back: neither overflow nor a lost tile."""
    q, k, v = make_qkv(1, 2, 1, 192, 64, device=device)
    for tile, size in enumerate((-30.0, 200.0, 30.0)):
        k[:, :, tile * 64 : (tile + 1) * 64] = q[:, :1, None] * size / 8
    assert_is_attention(attend(q, k, v, splits=1, backend=backend), q, k, v)


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 6, 7, 8, 32])
def test_result_does_not_depend_on_the_number_of_splits(splits, device):
    """Case D3: also with more splits than tiles."""
    q, k, v = make_qkv(3, 2, 1, 300, 64, device=device)
    lengths = int32([300, 129, 64], device)
    assert_is_attention(attend(q, k, v, lengths=lengths, splits=splits, backend="triton"), q, k, v, lengths=lengths)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_row_alone_equals_row_in_a_batch(backend, dtype, device):
    """Cases D4 and D10: with equal splits and no more rows than SMs a row's bits do not depend on its neighbours."""
    q, k, v = make_qkv(4, 2, 1, 130, 64, dtype=dtype, device=device)
    lengths = int32([130, 0, 65, 1], device)
    out, lse = attend(q, k, v, lengths=lengths, splits=3, backend=backend)
    for row in range(4):
        one = slice(row, row + 1)
        alone = attend(q[one], k[one], v[one], lengths=lengths[one], splits=3, backend=backend)
        assert same_bits(out[one], alone[0]) and same_bits(lse[one], alone[1]), f"row {row}"


@each_backend
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 24])
def test_any_group(backend, group, device, monkeypatch):
    """Cases C1, C2 and C5: groups padded to a power of two of at least 16 neither alias a neighbour nor write past the end."""
    guarded = Guarded()
    monkeypatch.setattr(dense, "empty_result", guarded.empty_result)
    kv_heads = 2 if group < 12 else 1
    q, k, v = make_qkv(1, group * kv_heads, kv_heads, 66, 64, device=device)
    workspace = guarded.workspace(q, 2)
    for splits in (1, 2):  # with one, the kernel writes the result itself
        assert_is_attention(attend(q, k, v, splits=splits, workspace=workspace, backend=backend), q, k, v)
    assert guarded.intact()


@each_backend_and_dtype
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim(backend, dtype, dim, device, monkeypatch):
    """Case C6: head dims that are no power of two are padded inside; the default scale uses the true one (case H8)."""
    guarded = Guarded()
    monkeypatch.setattr(dense, "empty_result", guarded.empty_result)
    q, k, v = make_qkv(1, 4, 2, 66, dim, dtype=dtype, device=device)
    workspace = guarded.workspace(q, 2)
    for splits in (1, 2):
        assert_is_attention(attend(q, k, v, splits=splits, workspace=workspace, backend=backend), q, k, v, scale=dim**-0.5)
    assert guarded.intact()


@each_backend
@pytest.mark.parametrize("scale", [0.3, 1.0, 0.0, -0.2])
def test_own_scale(backend, scale, device):
    """Case H8: a scale that is given is used, zero and negative ones too."""
    q, k, v = make_qkv(1, 2, 1, 66, 64, device=device)
    assert_is_attention(attend(q, k, v, scale=scale, backend=backend), q, k, v, scale=scale)


def test_default_backend_and_result(device):
    """`auto` is PyTorch on the CPU and Triton on CUDA; without `return_lse` the output comes alone."""
    q, k, v = make_qkv(1, 2, 1, 66, 64, device=device)
    expected = dense_decode(q, k, v, backend="triton" if device == "cuda" else "torch")
    assert same_bits(dense_decode(q, k, v), expected)


# --- strides ---------------------------------------------------------------------------------------------------------


def token_major(x):
    """The same values as x [B, Hkv, T, D], in memory as [B, T, Hkv, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside_a_larger_cache(x):
    """The same values as x, as a slice of a larger tensor that holds NaN around it."""
    larger = x.new_full([n + extra for n, extra in zip(x.shape, (1, 2, 9, 16))], NAN)
    view = larger[1:, 1:-1, 4 : 4 + x.shape[2], 8 : 8 + x.shape[3]]
    view.copy_(x)
    return view


@each_backend
@pytest.mark.parametrize("layout", [token_major, inside_a_larger_cache])
def test_strided_caches(backend, layout, device):
    q, k, v = make_qkv(2, 4, 2, 70, 64, device=device)
    expected = attend(q, k, v, splits=2, backend=backend)
    for keys, values in ((layout(k), v), (k, layout(v)), (layout(k), layout(v))):
        found = attend(q, keys, values, splits=2, backend=backend)
        assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
def test_fused_key_value_buffer(backend, device):
    """k and v as the two halves of one buffer."""
    q, k, v = make_qkv(2, 4, 2, 70, 64, device=device)
    both = torch.cat([k, v], dim=-1)
    assert same_bits(dense_decode(q, both[..., :64], both[..., 64:], backend=backend), dense_decode(q, k, v, backend=backend))


@each_backend
@pytest.mark.parametrize("layout", ["slice", "transposed", "expanded"])
def test_strided_queries(backend, layout, device):
    """Cases B4 and D8: q's strides are followed, and the result is right whatever they are."""
    q, k, v = make_qkv(3, 4, 2, 70, 64, device=device)
    if layout == "slice":
        larger = torch.full((4, 6, 80), NAN, device=device)
        larger[1:, 1:5, 8:72] = q
        strided = larger[1:, 1:5, 8:72]
    elif layout == "transposed":
        strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        strided = q[:, :1].expand(3, 4, 64)
    assert strided.stride() != q.stride()
    expected = attend(strided.contiguous(), k, v, splits=2, backend=backend)
    found = attend(strided, k, v, splits=2, backend=backend)
    assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
def test_strided_lengths(backend, device):
    """lengths as every other entry of a tensor, and as one entry expanded over the batch: followed, or refused."""
    q, k, v = make_qkv(2, 2, 1, 70, 64, device=device)
    for strided in (int32([5, 70, 9, 70], device)[::2], int32([7], device).expand(2)):
        expected = attend(q, k, v, lengths=strided.contiguous(), splits=1, backend=backend)
        try:
            found = attend(q, k, v, lengths=strided, splits=1, backend=backend)
        except ValueError as refusal:
            assert "lengths" in str(refusal)
        else:
            assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


# --- nothing to do ---------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("batch, tokens", [(0, 70), (2, 0), (0, 0)])
def test_nothing_to_attend_launches_nothing(backend, batch, tokens, device, monkeypatch):
    """Case A7: B = 0 and T = 0 give the empty result without a launch on an empty grid."""
    monkeypatch.setattr(dense, "_dense_kernel", Unlaunchable())
    monkeypatch.setattr(merge, "_merge_kernel", Unlaunchable())
    q, k, v = make_qkv(batch, 4, 2, tokens, 64, device=device)
    out, lse = attend(q, k, v, backend=backend)
    assert out.shape == (batch, 4, 64) and (out == 0).all()
    assert lse.shape == (batch, 4) and (lse == -INF).all()


@each_backend
def test_all_lengths_zero(backend, device):
    """Case A7: every row of the batch is empty, though the cache has room."""
    q, k, v = make_qkv(2, 4, 2, 70, 64, device=device)
    out, lse = attend(q, k, v, lengths=int32([0, 0], device), backend=backend)
    assert (out == 0).all() and (lse == -INF).all()


# --- splits and scratch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [1, 4, 16, 132])
@pytest.mark.parametrize("tokens", [1, 64, 65, 8192, 2**22])
@pytest.mark.parametrize("rows", [1, 7, 512 * 8])
@pytest.mark.parametrize("per_sm", [1, 2])
def test_choose_splits_stays_in_bounds(rows, tokens, sms, per_sm):
    """Case B7: positive, and never more splits than tiles, at any size (Dao-AILab/flash-attention#2662)."""
    splits = dense.choose_splits(rows, tokens, sms, per_sm, 64)
    assert 1 <= splits <= -(-tokens // 64) and splits <= 4096


@pytest.mark.parametrize("rows, per_sm, splits", [(2, 1, 66), (8, 1, 16), (16, 1, 8), (64, 1, 2), (256, 2, 1), (24, 2, 11), (96, 2, 4)])
def test_every_sm_gets_nearly_the_same_number_of_programs(rows, per_sm, splits):
    assert dense.choose_splits(rows, 65536, 132, per_sm, 128) == splits
    programs = rows * splits
    assert programs / (132 * -(-programs // 132)) >= 0.94 and programs >= 0.9 * per_sm * 132


def test_short_caches_are_split_less():
    """132 rows of 8 tiles: splitting costs more starts than it saves. 96 rows of 16: one program is too few for an SM. 2 rows: a tile for each."""
    assert dense.choose_splits(132, 1024, 132, 1, 128) == 1
    assert dense.choose_splits(96, 2048, 132, 2, 128) == 4
    assert dense.choose_splits(2, 1024, 132, 1, 128) == 8


@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("group", [1, 24, 128])
def test_launches_have_a_stage_whatever_the_group(group):
    """128 query heads of 256 fp32 numbers fill a consumer card's shared memory by themselves."""
    card = runtime.Card("", sms=100, l2_bytes=0, shared_bytes=99 * 1024, dependent_launch=False)
    shape = dense.launch_shape(torch.empty(1, group, 256), torch.empty(1, 1, 64, 256), card, 64)
    assert 1 <= shape["num_stages"] <= 3 and shape["TILE"] == 16


def test_more_rows_than_sms_get_two_programs_to_an_sm():
    """Nothing is split then; two smaller programs hide each other's start and end."""
    card = runtime.Card("", sms=132, l2_bytes=0, shared_bytes=227 * 1024, dependent_launch=True)
    for rows, tile in ((132, 128), (256, 64)):
        q, k = torch.empty(rows, 4, 128, dtype=torch.float16), torch.empty(1, 1, 1, 128, dtype=torch.float16).expand(rows, 1, 4096, 128)
        shape = dense.launch_shape(q, k, card, 4096)
        assert shape["TILE"] == tile and dense.splits_for(k, card, shape, 4096) == 1


def test_a_workspace_holds_the_result_until_the_next_call(device):
    q, k, v = make_qkv(2, 4, 2, 300, 64, device=device)
    workspace = decode_workspace(q, k)
    first, first_lse = attend(q, k, v, workspace=workspace, backend="triton")
    assert first.data_ptr() == workspace.out.data_ptr() and first_lse.data_ptr() == workspace.lse.data_ptr()
    expected = attend(q, k, v, backend="triton")
    assert same_bits(first, expected[0]) and same_bits(first_lse, expected[1])
    second = dense_decode(-q, k, v, workspace=workspace, backend="triton")
    assert same_bits(second, dense_decode(-q, k, v, backend="triton")) and same_bits(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_a_call_with_a_workspace_allocates_nothing(splits, device):
    q, k, v = make_qkv(2, 4, 2, 3000, 64, device=device)
    workspace = decode_workspace(q, k)
    counted = []
    for _ in range(3):
        dense_decode(q, k, v, workspace=workspace, splits=splits, return_lse=True)
        counted.append(torch.cuda.memory_stats()["allocation.all.allocated"])
    assert counted[1] == counted[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_partials_are_fp32(dtype, device, monkeypatch):
    """Case C8: halves would be rounded once per split."""
    seen = []

    def launch_merge(outs, lses, out, lse):
        seen.append((outs.clone(), lses.clone()))
        return real(outs, lses, out, lse)

    real = merge.launch_merge
    monkeypatch.setattr(merge, "launch_merge", launch_merge)
    q, k, v = make_qkv(1, 2, 1, 130, 64, dtype=dtype, device=device)
    one, three = (attend(q, k, v, splits=splits, backend="triton") for splits in (1, 3))
    ((outs, lses),) = seen  # one split leaves nothing to merge
    assert outs.dtype == lses.dtype == torch.float32
    assert not torch.equal(outs, outs.half().float()), "the partials were rounded to half on the way"
    assert_is_attention(one, q, k, v)
    assert_is_attention(three, q, k, v)


@each_backend
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "token"])
def test_offsets_past_2_to_31(backend, axis, device, tmp_path):
    """Cases B1 and B2: sequences, heads or tokens whose offset passes 2^31 elements, though each stride fits 32 bits."""
    q, k, v = make_qkv(3, 3, 3, 5, 64, dtype=torch.float16, device=device)
    expected = attend(q, k, v, splits=1, backend=backend)
    for keys, values in ((far_apart(k, axis, tmp_path), v), (k, far_apart(v, axis, tmp_path))):
        found = attend(q, keys, values, splits=1, backend=backend)
        assert same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


@each_backend
@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "head"])
def test_query_offsets_past_2_to_31(backend, axis, device, tmp_path):
    """Case B4: the same for the queries."""
    q, k, v = make_qkv(3, 3, 1, 20, 64, dtype=torch.float16, device=device)
    far = far_apart(q, axis, tmp_path)
    assert same_bits(dense_decode(far, k, v, backend=backend), dense_decode(q, k, v, backend=backend))


@pytest.mark.gpu
def test_cache_of_more_than_2_to_31_elements(device):
    """Case B2: 33 sequences of 65,536 tokens, 8 KV heads and D = 128; the last one's bits are those of a cache half the size."""
    q, k, v = make_qkv(33, 32, 8, 1, 128, dtype=torch.float16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    k, v = (torch.empty(33, 8, 65536, 128, dtype=torch.float16, device=device).normal_(generator=generator) for _ in range(2))
    assert k.numel() > 2**31
    out = dense_decode(q, k, v, splits=4)
    assert same_bits(out[-17:], dense_decode(q[-17:], k[-17:].clone(), v[-17:].clone(), splits=4))
    # The roundings (2^-11) of 65,536 weights average out: out itself is about 2^-7 here, and errors stay as far below it.
    torch.testing.assert_close(out[-1:], dense_decode(q[-1:], k[-1:], v[-1:], backend="torch"), rtol=2**-9, atol=2**-15)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_long_ragged_batch_on_the_gpu(dtype, device):
    """Case D4 at real lengths, and case D10: 31 and 33 sequences give the bits of one."""
    lengths = int32([1, 63, 64, 65, 4095, 0, 8192] + [777] * 26, device)
    q, k, v = make_qkv(33, 8, 2, 8192, 128, dtype=dtype, device=device)
    some = slice(0, 7)
    result = attend(q[some], k[some], v[some], lengths=lengths[some], splits=16)
    assert_is_attention(result, q[some], k[some], v[some], lengths=lengths[some])
    for batch in (31, 33):
        out = dense_decode(q[:batch], k[:batch], v[:batch], lengths=lengths[:batch], splits=16)
        assert same_bits(out[some], result[0])


@pytest.mark.gpu
def test_lengths_beyond_the_cache_are_clamped_on_the_gpu(device):
    """A GPU's lengths are not read by the host, so the kernel keeps inside the cache by itself."""
    q, k, v = make_qkv(2, 4, 2, 100, 64, dtype=torch.float16, device=device)
    assert same_bits(dense_decode(q, k, v, lengths=int32([10**9, -5], device)), dense_decode(q, k, v, lengths=int32([100, 0], device)))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [128, 512])
def test_many_splits_on_the_gpu(splits, device):
    """Most of them empty, and the merge has to hold them all."""
    q, k, v = make_qkv(1, 2, 1, 5000, 128, dtype=torch.float16, device=device)
    assert_is_attention(attend(q, k, v, splits=splits), q, k, v)


def test_a_workspace_fits_every_shorter_call(monkeypatch):
    """Whatever part of the cache a later call reads, a prefix or a page list, it makes no more splits than there is scratch for."""
    for sms, shared, batch, kv_heads, dim in itertools.product((46, 82, 132, 170), (99 * 1024, 227 * 1024), (1, 3, 8, 64), (1, 2, 8), (64, 128)):
        card = runtime.Card("", sms=sms, l2_bytes=0, shared_bytes=shared, dependent_launch=True)
        monkeypatch.setattr(dense, "card", lambda device, card=card: card)
        q, k = (torch.empty(batch, *rest, dim, dtype=torch.float16, device="meta") for rest in ((6 * kv_heads,), (kv_heads, 65536)))
        most = dense.decode_workspace(q, k).splits
        for tokens in (1, 100, 700, 2900, 3000, 12345, 20000, 50000, 65536):
            assert dense.splits_for(k, card, dense.launch_shape(q, k, card, tokens), tokens) <= most
