"""Per-page summaries of the keys: what the page score reads instead of the keys themselves.

minmax       smallest and largest value of every key dimension over a page's tokens (Quest: Tang et al., ICML 2024, arXiv 2406.10774)
minmax8      the same in 8 bits, rounded outward, at half the bytes (bounds8.py)
mean_radius  mean key, and the distance of the farthest key from it (ArkVale: Chen et al., NeurIPS 2024)
mean_std     mean and standard deviation of every dimension (reported to rank better than minmax at the same cost: arXiv 2605.27740)
mean         mean key alone, the cheapest

``scores.page_scores`` makes an upper bound on q.k out of the first three. The last two only estimate.
"""

from dataclasses import dataclass

import torch

from .bounds8 import encode, encode_tile, quantized
from .checks import DTYPES, HEAD_DIMS, check_bound_size, check_inner_stride, check_lengths, check_page_size, check_tensor, page_count
from .runtime import resolve_backend, tl, triton

FIELDS = {
    "minmax": ("kmin", "kmax"), "minmax8": ("kmin", "kmax", "scale", "channel"), "mean_radius": ("mean", "radius"), "mean_std": ("mean", "std"), "mean": ("mean",),
}  # fmt: skip
KINDS = tuple(FIELDS)


@dataclass
class PageSummary:
    """Summaries of a cache's pages, one entry for every ``bound_size`` tokens: S = ceil(T / bound_size) entries, N = ceil(T / page_size) pages.

    kmin, kmax, mean, std: [B, Hkv, S, D] in the keys' dtype, those that the kind has (``FIELDS``), None else. radius: [B, Hkv, S] fp32.
    kmin and kmax are exact, and stay exact when tokens are appended; mean and std are rounded to the dtype. Of minmax8, kmin and kmax are
    int8, and a bound is code * scale * channel with scale [B, Hkv, S] and channel [B, Hkv, D], fp32. lengths: [B] int32, the
    tokens that the entries cover. Entries past a length hold zeros and are masked by the length, never by value.
    """

    kind: str
    page_size: int
    lengths: torch.Tensor
    kmin: torch.Tensor | None = None
    kmax: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    std: torch.Tensor | None = None
    radius: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    channel: torch.Tensor | None = None
    bound_size: int | None = None

    def __post_init__(self):
        check_kind(self.kind)
        check_page_size(self.page_size)
        self.bound_size = check_bound_size(self.bound_size, self.page_size)

    @property
    def fields(self):
        """{name: tensor} of what this kind keeps."""
        return {name: getattr(self, name) for name in FIELDS[self.kind]}

    @property
    def pages(self):
        """N, the pages that the entries cover."""
        first = getattr(self, FIELDS[self.kind][0])
        return page_count(first.shape[2], self.page_size // self.bound_size)

    @property
    def bytes(self):
        """Bytes that one scoring pass over every page reads."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.fields.values())


def check_kind(kind):
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}.")


def entry_bytes(kind, dim, element_size):
    """Bytes of one entry of a KV head: what a scoring pass reads for each ``bound_size`` tokens. element_size: of the keys, in bytes."""
    if kind == "minmax8":
        return 2 * dim + 4
    return sum(4 if name == "radius" else dim * element_size for name in FIELDS[kind])


@triton.jit
def _minmax_kernel(
    k_ptr, lengths_ptr, kmin_ptr, kmax_ptr, k_batch, k_head, k_token, tokens, kv_heads, entries,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One grid axis for everything: the others end at 65,535, which the 8-token entries of 0.5 million tokens reach.
    row = (tl.program_id(0) // entries).to(tl.int64)
    entry = tl.program_id(0) % entries
    batch, head = row // kv_heads, row % kv_heads
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), tokens)
    token = entry * SIZE + tl.arange(0, SIZE)
    dims = tl.arange(0, BLOCK_D)
    valid = (token < length)[:, None] & (dims < D)[None, :]
    at = k_ptr + batch * k_batch + head * k_head + token.to(tl.int64)[:, None] * k_token + dims[None, :]
    kmin = tl.min(tl.load(at, mask=valid, other=float("inf")), axis=0)
    kmax = tl.max(tl.load(at, mask=valid, other=float("-inf")), axis=0)
    empty = entry * SIZE >= length
    out = (row * entries + entry) * D + dims
    tl.store(kmin_ptr + out, tl.where(empty, 0.0, kmin), mask=dims < D)
    tl.store(kmax_ptr + out, tl.where(empty, 0.0, kmax), mask=dims < D)


def summarize_pages(k, page_size, *, lengths=None, kind="minmax", bound_size=None, backend="auto"):
    """Summarise every page of a key cache.

    k: [B, Hkv, T, D] (fp16, bf16 or fp32; rotary positions already applied, as cached), any outer strides.
    page_size: 16, 32, 64 or 128 tokens. lengths: [B] int32 on k's device (default T); keys past a length never enter,
    NaN included. kind: one of ``KINDS``. bound_size: tokens of one entry, a power of two from 8 to page_size (default page_size): with
    smaller ones a page's score is the largest over its entries, tighter for minmax, and costs page_size / bound_size times the bytes
    (LServe: Yang et al., arXiv 2502.14866). Sums run in fp32. Returns a ``PageSummary`` with ceil(T / bound_size) entries.
    """
    check_tensor("k", k, "B, Hkv, T, D")
    check_page_size(page_size)
    bound_size = check_bound_size(bound_size, page_size)
    if k.dtype not in DTYPES:
        raise TypeError(f"k must be float16, bfloat16 or float32, got {k.dtype}.")
    if k.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"The head dim must be one of {HEAD_DIMS}, got {k.shape[-1]}.")
    check_kind(kind)
    check_inner_stride("k", k)
    batch, kv_heads, tokens, dim = k.shape
    ragged = lengths is not None
    lengths = check_lengths(lengths, batch, tokens, k.device)
    entries = page_count(tokens, bound_size)
    # Only minmax has a kernel. The others are built by PyTorch on either backend: once for each key, while scores are made at every step.
    if resolve_backend(backend, k) == "triton" and kind in ("minmax", "minmax8"):
        fields = {name: k.new_empty(batch, kv_heads, entries, dim) for name in FIELDS["minmax"]}
        if k.numel():
            _minmax_kernel[(batch * kv_heads * entries,)](
                k, lengths, *fields.values(), *k.stride()[:3], tokens, kv_heads, entries,
                SIZE=bound_size, D=dim, BLOCK_D=triton.next_power_of_2(dim),
            )  # fmt: skip
    elif kind in ("minmax", "minmax8") and not ragged:  # no masks: whole entries, then what is left over
        whole = tokens // bound_size * bound_size
        parts = [k[:, :, :whole].unflatten(2, (whole // bound_size, bound_size))] + [k[:, :, None, whole:]] * (whole < tokens)
        fields = {name: torch.cat([extreme(part, 3) for part in parts], 2) for name, extreme in (("kmin", torch.amin), ("kmax", torch.amax))}
    else:
        padded = torch.nn.functional.pad(k, (0, 0, 0, entries * bound_size - tokens)).unflatten(2, (entries, bound_size))
        valid = torch.arange(entries * bound_size, device=k.device) < lengths.clamp(0, tokens)[:, None]
        fields = _reduced(padded, valid.view(batch, 1, entries, bound_size, 1), kind)
    if kind == "minmax8":
        fields = quantized(**fields)
    return PageSummary(kind, page_size, lengths, **fields, bound_size=bound_size)


def _reduced(keys, valid, kind):
    """The fields of ``kind`` from keys [B, Hkv, S, size, D], of which only those count that are valid [B, 1, S, size, 1]."""
    if kind in ("minmax", "minmax8"):
        kmin, kmax = keys.masked_fill(~valid, float("inf")).amin(3), keys.masked_fill(~valid, float("-inf")).amax(3)
        empty = ~valid.any(3)
        return dict(kmin=kmin.masked_fill(empty, 0.0), kmax=kmax.masked_fill(empty, 0.0))
    dtype, count = keys.dtype, valid.sum(3).clamp(min=1)
    keys = keys.float().masked_fill(~valid, 0.0)
    mean = keys.sum(3) / count
    if kind == "mean_std":
        offsets = (keys - mean[:, :, :, None]).masked_fill(~valid, 0.0)
        return dict(mean=mean.to(dtype), std=(offsets.square().sum(3) / count).sqrt().to(dtype))
    mean = mean.to(dtype)
    if kind == "mean":
        return dict(mean=mean)
    # From the mean as it is stored: the distance to the unrounded one could be too short. fp64, so that squares of large or
    # tiny offsets neither overflow nor vanish.
    offsets = (keys - mean.float()[:, :, :, None]).masked_fill(~valid, 0.0)
    farthest = torch.linalg.vector_norm(offsets, dim=-1, dtype=torch.float64).amax(3)
    # Up: an offset was rounded by 2^-24 of itself, and the conversion to fp32 rounds once more.
    above = torch.nextafter((farthest * (1 + 2**-23)).float(), torch.full((), float("inf"), device=keys.device))
    return dict(mean=mean, radius=torch.where(farthest > 0, above, 0.0))


@triton.jit
def extend_summary(
    key, sequence, head, dims, there, position, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, kv_heads, pages,
    KIND: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Part of an append: one sequence's token at ``position``, its key [H, BLOCK_D] for heads [H] that are there [H], enters its page's entry.

    kmin and kmax: of minmax the summary's own, of minmax8 the exact bounds of the page being filled, whose codes are low, high and scale.
    """
    own = there[:, None] & (dims < D)
    # The first token of a page starts its summary anew, whatever the slot held before.
    merged = own & (position % PAGE != 0)
    row = sequence * kv_heads + head
    entry = row * pages + position.to(tl.int64) // PAGE
    summary = entry[:, None] * D + dims
    exact = row[:, None] * D + dims if KIND == "minmax8" else summary
    kmin = tl.minimum(tl.load(kmin_ptr + exact, mask=merged, other=float("inf")), key)
    kmax = tl.maximum(tl.load(kmax_ptr + exact, mask=merged, other=float("-inf")), key)
    tl.store(kmin_ptr + exact, kmin, mask=own)
    tl.store(kmax_ptr + exact, kmax, mask=own)
    if KIND == "minmax8":
        channel = tl.load(channel_ptr + row[:, None] * D + dims, mask=own, other=1.0)
        low, high, scale = encode_tile(tl.where(own, kmin, 0.0), tl.where(own, kmax, 0.0), channel)
        tl.store(low_ptr + summary, low, mask=own)
        tl.store(high_ptr + summary, high, mask=own)
        tl.store(scale_ptr + entry, scale, mask=there)


def extend_summary_torch(k_new, row, position, summary, exact):
    """PyTorch path of ``extend_summary``: keys k_new [A, Hkv, D] of the sequences row [A] at position [A], int64 on the device."""
    page, fresh = position // summary.page_size, (position % summary.page_size == 0)[:, None, None]
    coded = summary.kind == "minmax8"
    for bound, merge in zip(exact, (torch.minimum, torch.maximum)):
        slot = row if coded else (row, slice(None), page)
        bound[slot] = torch.where(fresh, k_new, merge(bound[slot], k_new))
    if coded:
        codes = encode(*(bound[row][:, :, None] for bound in exact), summary.channel[row])
        for field, code in zip((summary.kmin, summary.kmax, summary.scale), codes):
            field[row, :, page] = code[:, :, 0]
