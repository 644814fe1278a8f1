"""What we compare with must be right and must be what it says: PyTorch's scaled_dot_product_attention (SDPA) in decode, FlashInfer's tables."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pageskip_lib import PageList, dense_decode, reference
from pageskip_lib.bench import dense as bench
from pageskip_lib.bench import peers, step, timing

from helpers import assert_is_attention, attention_errors, each_backend, int32, make_qkv, randn

INF = float("inf")


def usual_dtype(device):
    return torch.float16 if device == "cuda" else torch.float32


def pinned(q, k, v, backend=SDPBackend.FLASH_ATTENTION, **options):
    """SDPA of q [B, Hq, D] over k, v [B, H, T, D] in one backend, and no other."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q[:, :, None], k, v, **options)[:, :, 0]


# What flash attention cannot take, here as in the threads: (dtype, D, options). Unpinned, each of them runs in the math backend.
CANNOT = {
    "cpu": {"dropout": (torch.float32, 64, dict(dropout_p=0.5)), "an odd stride": (torch.float32, 64, {})},
    "cuda": {
        "fp32": (torch.float32, 64, {}),
        "D = 512": (torch.float16, 512, {}),
        "a mask": (torch.float16, 64, dict(attn_mask=torch.zeros(1, 1, 1, 9))),
        "an odd stride": (torch.float16, 64, {}),
    },
}


@pytest.mark.filterwarnings("ignore")  # PyTorch explains its refusal in warnings
@pytest.mark.parametrize("what", ["dropout", "an odd stride", "fp32", "D = 512", "a mask"])
def test_a_pinned_backend_refuses_what_it_cannot_run(what, device):
    """Case H1: unpinned SDPA falls back to the math backend without a word (pytorch/pytorch#154363, #181528, #191085)."""
    if what not in CANNOT[device]:
        pytest.skip(f"flash attention on {device} takes this")
    dtype, dim, options = CANNOT[device][what]
    q, k, v = make_qkv(1, 4, 4, 9, dim, dtype=dtype, device=device)
    if what == "an odd stride":
        k = k.mT.contiguous().mT
    options = {name: value.to(device, dtype) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    with pytest.raises(RuntimeError, match="No available kernel|No viable backend"):
        pinned(q, k, v, **options)
    assert scaled_dot_product_attention(q[:, :, None], k, v, **options).isfinite().all()  # unpinned it runs, somewhere else


class PagedDecode:
    """FlashInfer's decode wrapper by its documentation: row r attends to the pages indices[indptr[r] : indptr[r + 1]], the last cut short."""

    made = []

    def __init__(self, workspace, layout, *, use_tensor_cores):
        assert layout == "NHD" and workspace.dtype == torch.uint8
        self.made.append(self)

    def plan(self, indptr, indices, last_page_len, heads, kv_heads, dim, page_size, *, q_data_type, kv_data_type):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32 and q_data_type == kv_data_type
        assert len(indptr) == len(last_page_len) + 1 and indptr[-1] == len(indices)
        self.rows = [indices[start:end].tolist() for start, end in zip(indptr.tolist(), indptr.tolist()[1:])]
        self.last, self.shape = last_page_len.tolist(), (page_size, kv_heads, dim)

    def run(self, q, cache):
        assert all(x.shape[1:] == self.shape for x in cache)
        outs = []
        for row, (pages, last) in enumerate(zip(self.rows, self.last)):
            tokens = (len(pages) - 1) * self.shape[0] + last
            k, v = (x[pages].flatten(0, 1)[None, :tokens].transpose(1, 2) for x in cache)
            outs.append(reference.attention(q[row : row + 1], k, v)[0].to(q.dtype))
        return torch.cat(outs)


@pytest.fixture
def flashinfer(monkeypatch):
    monkeypatch.setattr(PagedDecode, "made", [])
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=PagedDecode))
    return PagedDecode


def test_flashinfer_reads_every_page_in_random_order(flashinfer):
    """Case J5: a table in order is one that a kernel may ignore (flashinfer-ai/flashinfer#1976); the partly filled page comes last."""
    bench.check_arm(peers.Arm("FlashInfer", peers._flashinfer, tokens_first=True), (4, 2, 64), torch.float32, "cpu")
    (plan,) = flashinfer.made  # one for all inputs
    for row, pages in enumerate(plan.rows):
        assert pages != sorted(pages) and sorted(pages) == list(range(row * 16, row * 16 + 16)) and pages[-1] == row * 16 + 15
    assert plan.last == [1003 - 15 * 64] * 2
    assert peers.shuffled_pages(2, 64, "cpu").tolist() == [[0], [0]]


def test_flashinfer_reads_the_listed_pages_only(flashinfer):
    """Case J4: both kernels of the comparison walk one list; NaN in every other page would show."""
    q, kv = bench.make_sets(1, (4, 2, 64), 2, 40 * 64, torch.float32, "cpu")[0]
    k, v = bench.views(kv, tokens_first=True)
    one = step.random_pages(2, 1, 40 * 64, "cpu", seed=3).pages
    unread = torch.ones(2, 40, dtype=torch.bool).scatter_(1, one[:, 0].long(), False).repeat_interleave(64, dim=1)
    for x in (k, v):
        x.masked_fill_(unread[:, None, :, None], float("nan"))
    (call,) = peers.flashinfer_over(one[:, 0], [(q, k, v)], scratch=16)
    truth, _ = reference.attention(q, k, v, pages=PageList(one.repeat(1, 2, 1), torch.full((2, 2), 32, dtype=torch.int32)), page_size=64)
    torch.testing.assert_close(call().double(), truth)


def assert_same_numbers(out, q, k, v, **options):
    """``out`` is attention by the reference, up to the rounding of its dtype."""
    truth, _ = reference.attention(q, k, v, **options)
    error, _ = attention_errors(q.cpu(), k.cpu(), v.cpu(), options.get("scale", q.shape[-1] ** -0.5))
    torch.testing.assert_close(out.cpu().double(), truth, rtol=0, atol=error)


@pytest.mark.parametrize("heads", [(12, 2, 128), (9, 3, 64), (4, 4, 64)])
def test_packed_groups_equal_expanded_ones(heads, device):
    """Cases H2 and H3: enable_gqa and repeated keys are the same numbers; only the first reads each key once."""
    query_heads, kv_heads, dim = heads
    q, k, v = make_qkv(2, query_heads, kv_heads, 77, dim, dtype=usual_dtype(device), device=device)
    packed = peers.sdpa(q, k, v, SDPBackend.FLASH_ATTENTION)
    expanded = pinned(q, *(x.repeat_interleave(query_heads // kv_heads, dim=1) for x in (k, v)))
    assert_same_numbers(packed, q, k, v)
    assert_same_numbers(expanded, q, k, v)


def test_heads_are_grouped_as_pytorch_groups_them(device):
    """Case H3: query head h reads KV head h // G; interleaving them the other way would be another model."""
    q, k, v = make_qkv(1, 6, 2, 1, 64, dtype=usual_dtype(device), device=device)
    packed = peers.sdpa(q, k, v, SDPBackend.FLASH_ATTENTION)
    assert torch.equal(packed, v[:, :, 0].repeat_interleave(3, dim=1)) and torch.equal(packed, dense_decode(q, k, v))


def test_the_benchmark_does_not_mask_its_baseline(device, monkeypatch):
    """Case H2: a mask, even one that hides nothing, turns flash attention and packed groups off (huggingface/transformers#36584)."""
    seen = []

    def spy(*tensors, **options):
        seen.append((tensors, options))
        return scaled_dot_product_attention(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    q, k, v = make_qkv(1, 4, 2, 77, 64, dtype=usual_dtype(device), device=device)
    peers.sdpa(q, k, v, SDPBackend.FLASH_ATTENTION)
    (tensors, options), = seen
    assert options == dict(enable_gqa=True) and len(tensors) == 3 and tensors[1].shape[1] == 2


def test_causal_decode_sees_only_the_first_key(device):
    """Case H4: PyTorch aligns a causal mask at the top left, so one query sees one key (pytorch/pytorch#108108); the benchmark sets none."""
    q, k, v = make_qkv(1, 4, 4, 128, 64, dtype=usual_dtype(device), device=device)
    causal = scaled_dot_product_attention(q[:, :, None], k, v, is_causal=True)[:, :, 0]
    assert_same_numbers(causal, q, k[:, :, :1], v[:, :, :1])
    assert_same_numbers(peers.sdpa(q, k, v, SDPBackend.FLASH_ATTENTION), q, k, v)


@each_backend
def test_a_row_without_tokens_is_defined_by_hand(backend, device):
    """Case H5: backends return NaN, 0 or a mean for a row that is masked throughout (pytorch/pytorch#103963), so none is asked."""
    q, k, v = make_qkv(2, 4, 2, 9, 64, device=device)
    out, lse = reference.attention(q, k, v, lengths=[0, 9])
    assert (out[0] == 0).all() and (lse[0] == -INF).all() and out[1].isfinite().all()
    assert_is_attention(dense_decode(q, k, v, lengths=int32([0, 9], device), backend=backend, return_lse=True), q, k, v, lengths=[0, 9])


@pytest.mark.parametrize("error", [1e-2, float("nan")])
def test_a_slightly_wrong_baseline_is_not_timed(error, device):
    """Case H6: the check before timing sees an error of 0.01, not only nonsense (pytorch/pytorch#193893)."""
    wrong = peers.Arm("wrong", peers.each(lambda q, k, v: peers.sdpa(q, k, v, SDPBackend.FLASH_ATTENTION) + error))
    with pytest.raises(RuntimeError, match="wrong is off by"):
        bench.check_arm(wrong, bench.HEADS[0], usual_dtype(device), device)


@each_backend
@pytest.mark.parametrize("scale", [0.05, 1.0, 0.0])
def test_a_scale_means_the_same_on_both_sides(scale, backend, device):
    """Case H8: PyTorch's scale is ours: a factor on q.k before the softmax."""
    q, k, v = make_qkv(1, 4, 2, 77, 64, dtype=usual_dtype(device), device=device)
    ours = dense_decode(q, k, v, scale=scale, backend=backend)
    theirs = pinned(q, k, v, scale=scale, enable_gqa=True)
    for out in (ours, theirs):
        assert_same_numbers(out, q, k, v, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("backend, word", [(SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.CUDNN_ATTENTION, "cudnn")])
def test_the_kernel_that_ran_is_the_one_that_was_pinned(backend, word, device):
    """Case H1: what the profiler saw, in decode with packed groups; none of it is a matrix product of the math backend."""
    q, k, v = (randn(*shape, dtype=torch.float16, device=device) for shape in ((2, 12, 128), (2, 2, 4096, 128), (2, 2, 4096, 128)))
    names = timing.kernel_names(lambda: peers.sdpa(q, k, v, backend))
    assert any(word in name.lower() for name in names) and not any("gemm" in name.lower() for name in names), names
