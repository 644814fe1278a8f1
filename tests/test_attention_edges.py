"""Known failures of other decode kernels, as small tests of both of ours; the threads they come from are named where there is one."""

import os
import subprocess
import sys

import pytest
import torch

from pageskip_lib import (
    Budget, PageList, Workspace, decode_workspace, dense, dense_decode, merge_partials, page_scores, reference, runtime, select_pages,
    sparse, sparse_decode, summarize_pages,
)  # fmt: skip

from helpers import (
    assert_is_attention, attention_errors, dtypes_for, each_backend, each_backend_and_dtype, int32, make_qkv, name_of, randn, same_bits,
)  # fmt: skip

INF, NAN = float("inf"), float("nan")
needs_triton = pytest.mark.skipif(runtime.kernel_problem(runtime.default_device()) is not None, reason="kernels cannot run here")
each_kernel = pytest.mark.parametrize("kernel", ["dense", "sparse"])


def attend(kernel, q, k, v, *, lengths=None, page_size=16, **options):
    """(out, lse) of the dense kernel, or of the sparse one with every page of the cache listed."""
    if kernel == "dense":
        return dense_decode(q, k, v, lengths=lengths, return_lse=True, **options)
    pages = PageList.from_rows([[range(-(-k.shape[2] // page_size))] * k.shape[1]] * k.shape[0], q.device)
    return sparse_decode(q, k, v, pages, page_size=page_size, lengths=lengths, return_lse=True, **options)


def same(found, expected):
    return same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


# --- lengths, splits and scratch ----------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("splits", range(1, 9))
@pytest.mark.parametrize("rows", [2, 12])
def test_lengths_around_the_edges_of_a_tile(rows, splits, device):
    """Case A10: one token, and both sides of every tile's end, whatever tile the launch rules choose for so many rows."""
    q, k, v = make_qkv(rows, 1, 1, 1, 64, dtype=torch.float16, device=device)
    tile = dense.launch_shape(q, k, runtime.card(q.device), 257)["TILE"]
    edges = [1, tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1]
    for lengths in [edges[i : i + rows] for i in range(0, 6, rows)]:
        lengths = int32((lengths * rows)[:rows], device)
        q, k, v = make_qkv(rows, 1, 1, 257, 64, dtype=torch.float16, device=device)
        assert_is_attention(attend("dense", q, k, v, lengths=lengths, splits=splits, backend="triton"), q, k, v, lengths=lengths)


@needs_triton
@pytest.mark.parametrize("splits", [1, 2, 5, 13, 32])
def test_forty_random_lengths_whatever_the_splits(splits, device):
    """Case D3: where the planner and the kernel disagree about a split's size, any number but one is wrong (flashinfer-ai/flashinfer#728)."""
    lengths = torch.randint(0, 301, (40,), generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(device)
    q, k, v = make_qkv(40, 1, 1, 300, 64, device=device)
    assert_is_attention(attend("dense", q, k, v, lengths=lengths, splits=splits, backend="triton"), q, k, v, lengths=lengths)


@needs_triton
@each_kernel
def test_a_short_call_after_a_long_one_in_the_same_workspace(kernel, device):
    """Case A2: the long call fills every split's scratch, and the short one leaves most of it alone (vllm-project/vllm#47188, #56932)."""
    q, k, v = make_qkv(1, 2, 1, 700, 64, device=device)
    workspace = Workspace(q, 64)
    attend(kernel, q, 50 * k, 50 * v, workspace=workspace, backend="triton")
    for length in (65, 1, 0):
        lengths = int32([length], device)
        found = attend(kernel, q, k, v, lengths=lengths, workspace=workspace, backend="triton")
        assert same(found, attend(kernel, q, k, v, lengths=lengths, backend="triton")), f"length {length}"
        assert_is_attention(found, q, k, v, lengths=lengths)


@each_backend
def test_merging_the_result_of_an_empty_cache_changes_nothing(backend, device):
    """Case A5: what a call returns for no tokens is the neutral element of the merge, made by the kernels themselves."""
    q, k, v = make_qkv(1, 4, 2, 70, 64, device=device)
    some = dense_decode(q, k, v, backend=backend, return_lse=True)
    for none in (
        dense_decode(q, k[:, :, :0], v[:, :, :0], backend=backend, return_lse=True),
        dense_decode(q, k, v, lengths=int32([0], device), backend=backend, return_lse=True),
        sparse_decode(q, k, v, PageList.from_rows([[[], []]], device), page_size=16, backend=backend, return_lse=True),
    ):
        for parts in ((some, none), (none, some)):
            assert same(merge_partials(*(torch.stack(each) for each in zip(*parts)), backend=backend), some)


@needs_triton
@pytest.mark.parametrize("batch, tokens", [(0, 70), (2, 0), (0, 0)])
def test_a_workspace_for_nothing(batch, tokens, device):
    """Case A7: the rule for splits divides by the rows, and there may be none (Dao-AILab/flash-attention#2503, #2515)."""
    q, k, v = make_qkv(batch, 4, 2, tokens, 64, device=device)
    workspace = decode_workspace(q, k)
    assert workspace.splits >= 1 and (dense_decode(q, k, v, workspace=workspace, backend="triton") == 0).all()


@each_backend
def test_nothing_selected_is_nothing_attended(backend, device):
    """Case A6: rows whose every score is -inf, from the summary to the result (flashinfer-ai/flashinfer#1178, #1050)."""
    q, k, v = make_qkv(2, 4, 2, 70, 64, device=device)
    lengths = int32([0, 33], device)
    scores = page_scores(q, summarize_pages(k, 16, lengths=lengths, backend=backend), group="softmax_sum", backend=backend)
    pages = select_pages(scores, Budget(2, sink=0, local=0), lengths, 16, backend=backend)
    assert (pages.counts[0] == 0).all() and (pages.pages[0] == -1).all() and (pages.counts[1] == 2).all()
    out, lse = sparse_decode(q, k, v, pages, page_size=16, lengths=lengths, backend=backend, return_lse=True)
    assert (out[0] == 0).all() and (lse[0] == -INF).all()
    assert_is_attention((out, lse), q, k, v, lengths=lengths, pages=pages, page_size=16)


# --- padding -----------------------------------------------------------------------------------------------------------


@each_backend_and_dtype
@each_kernel
@pytest.mark.parametrize("dim", [80, 96, 192])
def test_poison_beside_every_head(kernel, backend, dtype, dim, device):
    """Cases A8 and C6: the padding of a head dim reaches into what lies beside it in memory; here that is NaN, for q, k and v."""
    q, k, v = make_qkv(2, 6, 2, 35, dim, dtype=dtype, device=device)
    lengths = int32([35, 18], device)
    clean = attend(kernel, q, k, v, lengths=lengths, backend=backend)
    beside = [torch.full((*x.shape[:-1], 256), NAN, dtype=dtype, device=device) for x in (q, k, v)]
    for wide, x in zip(beside, (q, k, v)):
        wide[..., :dim] = x
    dirty = attend(kernel, *(wide[..., :dim] for wide in beside), lengths=lengths, backend=backend)
    assert same(dirty, clean)


@each_backend
@each_kernel
@pytest.mark.parametrize("poisoned", [0, 1])
def test_a_group_does_not_leak_into_the_next(kernel, backend, poisoned, device):
    """Case C2: padded heads lie on the next KV head's queries, and its keys beside ours; they may hold anything (vllm-project/vllm#40792)."""
    q, k, v = make_qkv(1, 14, 2, 35, 64, device=device)
    clean = attend(kernel, q, k, v, backend=backend)
    sevens = [slice(0, 7), slice(7, 14)]
    q[:, sevens[poisoned]], k[:, poisoned], v[:, poisoned] = NAN, NAN, NAN
    found, kept = attend(kernel, q, k, v, backend=backend), sevens[1 - poisoned]
    assert same([part[:, kept] for part in found], [part[:, kept] for part in clean])


@each_backend
@each_kernel
@pytest.mark.parametrize("group", [17, 48, 128])
def test_large_groups(kernel, backend, group, device):
    """Case C1: beyond 16 heads the group is padded to 32, 64 and 128, with its own launch options."""
    q, k, v = make_qkv(1, 2 * group, 2, 35, 64, dtype=torch.float16, device=device)
    assert_is_attention(attend(kernel, q, k, v, backend=backend), q, k, v)


class Recorded:
    """Takes the place of a kernel: notes the grid, and launches nothing."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.grids.append(grid)


@needs_triton
@each_kernel
def test_a_larger_group_is_not_more_programs(kernel, device, monkeypatch):
    """Case C4: looping over query heads outermost would read the cache once for each of them (meta-pytorch/MSLK#372)."""
    recorded = Recorded()
    monkeypatch.setattr(dense, "_dense_kernel", recorded)
    monkeypatch.setattr(sparse, "_sparse_kernel", recorded)
    for group in (1, 8):
        attend(kernel, *make_qkv(2, 2 * group, 2, 500, 64, dtype=torch.float16, device=device), backend="triton")
    assert len(recorded.grids) == 2 and recorded.grids[0] == recorded.grids[1]


# --- numbers -----------------------------------------------------------------------------------------------------------


@each_backend
@each_kernel
def test_fp32_scores_keep_all_their_bits(kernel, backend, device):
    """Case I3: two keys 2^-12 apart weigh e to 1; tf32 keeps 10 bits of a key and would weigh them alike (triton-lang/triton#5895)."""
    q = torch.ones(1, 2, 64, device=device)
    k, v = torch.ones(1, 1, 2, 64, device=device), torch.zeros(1, 1, 2, 64, device=device)
    k[:, :, 1] += 2**-12
    v[:, :, 1] = 1.0
    out, _ = attend(kernel, q, k, v, scale=64.0, backend=backend)
    torch.testing.assert_close(out, torch.full_like(out, 1 / (1 + torch.tensor(-1.0).exp().item())), rtol=2**-10, atol=0)


@each_backend
def test_fp32_page_scores_keep_all_their_bits(backend, device):
    """Case I3 for the bound: the page with the larger key wins by 64 * 2^-12."""
    k = torch.ones(1, 1, 32, 64, device=device)
    k[:, :, 16:] += 2**-12
    scores = page_scores(torch.ones(1, 1, 64, device=device), summarize_pages(k, 16, backend=backend), backend=backend)
    assert scores.flatten().tolist() == [64.0, 64.0 + 2**-6]


@needs_triton
@pytest.mark.parametrize("dtype", dtypes_for("triton"), ids=name_of)
def test_sixteen_splits_round_like_one(dtype, device):
    """Case C8: partial results in the inputs' dtype would be rounded once a split (flashinfer-ai/flashinfer#5107)."""
    half = randn(2, 2, 256, 64, seed=1) / 64
    v = torch.cat([half + 1, half.flip(2) - 1], dim=2).to(dtype).to(device)  # partial results are near 1 and -1, the result near 0
    q, k = torch.zeros(2, 4, 64, dtype=dtype, device=device), torch.zeros_like(v)  # every weight is exactly 1: only sums can differ
    one, many = (dense_decode(q, k, v, splits=splits, backend="triton").float() for splits in (1, 16))
    # One step of the dtype, where fp32 sums in another order (a random walk, four deviations of it) fall on either side of a border.
    sums = 4 * 512**0.5 * 2**-24
    assert ((one - many).abs() <= torch.finfo(dtype).eps * torch.maximum(one.abs(), many.abs()) + sums).all()


# --- on the GPU only ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_headline_shape_with_one_sequence_more(device):
    """Cases B1 and B2: 33 x 65,536 x 8 x 128 passes 2^31 elements, as [B, Hkv, T, D] and as [B, T, Hkv, D] (vllm-project/vllm#47671, #50427)."""
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    batch, tokens, kv_heads = 33, 65536, 8
    q = randn(batch, 2 * kv_heads, 128, dtype=torch.float16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    k, v = (torch.empty(batch * tokens * kv_heads * 128, dtype=torch.float16, device=device).normal_(generator=generator) for _ in range(2))
    assert k.numel() > 2**31
    rows = [[sorted({0, 7 + h, 513, 1023 - h, 1023}) for h in range(kv_heads)]]
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    for layout in ("heads first", "tokens first"):
        if layout == "heads first":
            keys, values = (x.view(batch, kv_heads, tokens, 128) for x in (k, v))
        else:
            keys, values = (x.view(batch, tokens, kv_heads, 128).transpose(1, 2) for x in (k, v))
        pages = PageList.from_rows(rows * batch, device)
        last = PageList.from_rows(rows, device)
        found = sparse_decode(q, keys, values, pages, page_size=64, lengths=lengths, return_lse=True)
        low = [x[-1:].contiguous() for x in (keys, values)]
        assert_is_attention((found[0][-1:], found[1][-1:]), q[-1:], *low, pages=last, page_size=64)
        # Alone it gets a wider tile, so the bits may differ; an output is about 2^-7 here.
        torch.testing.assert_close(dense_decode(q, keys, values)[-1:], dense_decode(q[-1:], *low), rtol=2**-9, atol=2**-15)
        summary, alone = summarize_pages(keys, 64), summarize_pages(low[0], 64)
        assert same_bits(summary.kmax[-1:], alone.kmax) and same_bits(summary.kmin[-1:], alone.kmin)
        assert same_bits(page_scores(q, summary)[-1:], page_scores(q[-1:], alone))


@pytest.mark.gpu
def test_keys_and_values_in_one_buffer_past_2_to_31(device):
    """Case B1: with k beside v in one buffer the border comes at half the batch."""
    if torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("needs 6 GB of free GPU memory")
    both = torch.zeros(17, 65536, 8, 256, dtype=torch.float16, device=device)
    assert both.numel() > 2**31
    q, k, v = make_qkv(1, 16, 8, 65536, 128, dtype=torch.float16, device=device)
    both[-1, :, :, :128], both[-1, :, :, 128:] = k[0].transpose(0, 1), v[0].transpose(0, 1)
    keys, values = both[..., :128].transpose(1, 2), both[..., 128:].transpose(1, 2)
    found = dense_decode(q.expand(17, -1, -1), keys, values)
    torch.testing.assert_close(found[-1:], dense_decode(q, k, v), rtol=2**-9, atol=2**-15)
    assert (found[:-1] == 0).all()


OVERFLOW = """
import torch
from pageskip_lib import Budget, DecodeStep, PageList, dense_decode, page_scores, select_pages, sparse_decode, summarize_pages
buffer = torch.zeros(2**31 + 2**23, dtype=torch.float16, device="cuda")
k = buffer.as_strided((3, 3, 200, 64), (2**30, 2**21, 64, 1)).normal_()
q = torch.randn(3, 6, 64, dtype=torch.float16, device="cuda")
pages = PageList.from_rows([[[0, 5, 12]] * 3] * 3, "cuda")
near = k.contiguous()
extremes = torch.tensor([-0.0, 0.0, 1.0, -1.0, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 1e-45], device="cuda")
lengths = torch.tensor([199, 100, 3], dtype=torch.int32, device="cuda")
steps = [DecodeStep(keys, near.clone(), lengths.clone(), Budget(3), heads=6, page_size=16) for keys in (k, near)]
rows = [extremes.repeat(3, 3, 10), torch.full((3, 3, 40), float("-inf"), device="cuda"), torch.zeros(3, 3, 32768, device="cuda")]
for far, close in (
    (dense_decode(q, k, k, splits=3), dense_decode(q, near, near, splits=3)),
    (sparse_decode(q, k, k, pages, page_size=16), sparse_decode(q, near, near, pages, page_size=16)),
    (page_scores(q, summarize_pages(k, 16)), page_scores(q, summarize_pages(near, 16))),
    *([select_pages(row, Budget(5), None, 16, backend=backend).pages for backend in ("triton", "torch")] for row in rows),
    [step(q, q[:, :3], q[:, 3:]) for step in steps],  # the last one: it writes into k
):
    assert torch.equal(far, close)
torch.cuda.synchronize()
print("no overflow")
"""


@pytest.mark.gpu
def test_no_sum_or_product_overflows(tmp_path):
    """Case B6: with TRITON_DEBUG every 32-bit sum and product asserts that it fits; offsets past 2^31 must trip none."""
    env = os.environ | {"TRITON_DEBUG": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", OVERFLOW], env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0 and "no overflow" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.gpu
def test_calls_on_many_streams(device):
    """Case D8: each call's scratch must live until its kernels have run (Dao-AILab/flash-attention#1085)."""
    inputs = [make_qkv(1, 8, 2, 8192, 128, dtype=torch.float16, device=device, seed=seed) for seed in range(8)]
    expected = [dense_decode(*each, splits=32) for each in inputs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in inputs], [[] for _ in inputs]
    for _ in range(20):
        for stream, results, each in zip(streams, found, inputs):
            with torch.cuda.stream(stream):
                results.append(dense_decode(*each, splits=32))
    torch.cuda.synchronize()
    assert all(same_bits(result, right) for results, right in zip(found, expected) for result in results)


@pytest.mark.gpu
@each_kernel
def test_one_graph_for_short_and_long(kernel, device):
    """Case D9: captured at one length, replayed at 100, 60,000 and 100 tokens; the first and the third are the same bits."""
    q, k, v = make_qkv(1, 8, 2, 65536, 128, dtype=torch.float16, device=device)
    lengths, workspace = int32([1], device), decode_workspace(q, k)
    pages = PageList.from_rows([[range(1024)] * 2], device)

    def call():
        if kernel == "dense":
            return dense_decode(q, k, v, lengths=lengths, workspace=workspace, return_lse=True)
        return sparse_decode(q, k, v, pages, page_size=64, lengths=lengths, workspace=workspace, return_lse=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    results = []
    for length in (100, 60000, 100):
        lengths.fill_(length)
        graph.replay()
        results.append([part.clone() for part in result])
        true_out, true_lse = reference.attention(q, k, v, lengths=[length])
        out_error, lse_error = attention_errors(q.cpu(), k[:, :, :length].cpu(), v[:, :, :length].cpu(), 128**-0.5)
        torch.testing.assert_close(results[-1][0].cpu().double(), true_out, rtol=0, atol=out_error)
        torch.testing.assert_close(results[-1][1].cpu().double(), true_lse, rtol=2**-22, atol=lse_error)
    assert same(results[0], results[2]) and not same(results[0], results[1])
