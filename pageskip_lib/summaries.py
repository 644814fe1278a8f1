"""Per-page summaries of the keys: what the page score reads instead of the keys themselves.

Kind ``minmax`` keeps the smallest and the largest value of every key dimension over a page's tokens
(Quest: Tang et al., ICML 2024, arXiv 2406.10774).
"""

from dataclasses import dataclass

import torch

from .checks import DTYPES, HEAD_DIMS, check_inner_stride, check_lengths, check_page_size, check_tensor, page_count
from .runtime import resolve_backend, tl, triton

KINDS = ("minmax",)


@dataclass
class PageSummary:
    """Summaries of a cache's pages.

    kmin, kmax: [B, Hkv, N, D] in the keys' dtype (so they are exact, and stay exact when tokens are appended).
    lengths: [B] int32, the tokens that the pages cover. Pages past a length hold zeros and are masked by the length, never by value.
    """

    kind: str
    page_size: int
    lengths: torch.Tensor
    kmin: torch.Tensor
    kmax: torch.Tensor

    @property
    def bytes(self):
        """Bytes that one scoring pass over every page reads."""
        return 2 * self.kmin.numel() * self.kmin.element_size()


@triton.jit
def _minmax_kernel(
    k_ptr, lengths_ptr, kmin_ptr, kmax_ptr, k_batch, k_head, k_token, tokens, kv_heads, pages,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64) // kv_heads
    head = tl.program_id(0).to(tl.int64) % kv_heads
    page = tl.program_id(1)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), tokens)
    token = page * PAGE + tl.arange(0, PAGE)
    dims = tl.arange(0, BLOCK_D)
    valid = (token < length)[:, None] & (dims < D)[None, :]
    at = k_ptr + batch * k_batch + head * k_head + token.to(tl.int64)[:, None] * k_token + dims[None, :]
    kmin = tl.min(tl.load(at, mask=valid, other=float("inf")), axis=0)
    kmax = tl.max(tl.load(at, mask=valid, other=float("-inf")), axis=0)
    empty = page * PAGE >= length
    out = ((batch * kv_heads + head) * pages + page) * D + dims
    tl.store(kmin_ptr + out, tl.where(empty, 0.0, kmin), mask=dims < D)
    tl.store(kmax_ptr + out, tl.where(empty, 0.0, kmax), mask=dims < D)


def summarize_pages(k, page_size, *, lengths=None, kind="minmax", backend="auto"):
    """Summarise every page of a key cache.

    k: [B, Hkv, T, D] (fp16, bf16 or fp32; rotary positions already applied, as cached), any outer strides.
    page_size: 16, 32, 64 or 128 tokens. lengths: [B] int32 on k's device (default T); keys past a length never enter,
    NaN included. Returns a ``PageSummary`` with N = ceil(T / page_size) pages.
    """
    check_tensor("k", k, "B, Hkv, T, D")
    check_page_size(page_size)
    if k.dtype not in DTYPES:
        raise TypeError(f"k must be float16, bfloat16 or float32, got {k.dtype}.")
    if k.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"The head dim must be one of {HEAD_DIMS}, got {k.shape[-1]}.")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}.")
    check_inner_stride("k", k)
    batch, kv_heads, tokens, dim = k.shape
    lengths = check_lengths(lengths, batch, tokens, k.device)
    pages = page_count(tokens, page_size)
    backend = resolve_backend(backend, k)
    kmin, kmax = (k.new_zeros(batch, kv_heads, pages, dim) for _ in range(2))
    summary = PageSummary(kind=kind, page_size=page_size, lengths=lengths, kmin=kmin, kmax=kmax)
    if not kmin.numel():
        return summary
    if backend == "triton":
        _minmax_kernel[(batch * kv_heads, pages)](
            k, lengths, kmin, kmax, *k.stride()[:3], tokens, kv_heads, pages,
            PAGE=page_size, D=dim, BLOCK_D=triton.next_power_of_2(dim),
        )  # fmt: skip
        return summary
    padding = torch.arange(pages * page_size, device=k.device) >= lengths.clamp(0, tokens)[:, None]
    padding = padding[:, None, :, None]
    padded = torch.nn.functional.pad(k, (0, 0, 0, pages * page_size - tokens))
    empty = padding.unflatten(2, (pages, page_size)).all(3)
    kmin.copy_(_reduce(padded, padding, float("inf"), pages, torch.amin).masked_fill(empty, 0.0))
    kmax.copy_(_reduce(padded, padding, float("-inf"), pages, torch.amax).masked_fill(empty, 0.0))
    return summary


def _reduce(padded, padding, neutral, pages, reduction):
    """amin or amax over each page of padded [B, Hkv, N * P, D], with padding [B, 1, N * P, 1] counting as ``neutral``."""
    return reduction(padded.masked_fill(padding, neutral).unflatten(2, (pages, -1)), dim=3)
