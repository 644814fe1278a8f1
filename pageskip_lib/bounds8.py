"""Page bounds in 8 bits: half the bytes of fp16 ones, and still never below a key.

A bound is kept as a whole number from -127 to 127, times its entry's scale, times a power of two of its channel. Channels of keys
differ in size by orders of magnitude, so one scale alone would leave the small ones nothing; powers of two are exact to divide by.
kmin is rounded down and kmax up, so that the box only grows: by one step at most, of which 127 reach the entry's largest key.

Scores need no conversion back. The query, times the channels, becomes a whole number of 15 bits, cut into two digits of 7 bits with
a sign, and the products run on the tensor cores' integers: exact, and the two digits of up to 8 heads share one tile of 16 rows.
Rounding the query moves a product by half a unit of its last digit; that much is added, so the score stays an upper bound.
"""

import torch

from .runtime import card, tl, triton

PER_PEAK = tl.constexpr(1 / 126.9)  # scale = peak / 126.9: rounding outward must not pass 127
MARGIN = tl.constexpr(2.0**-10)  # of a step: more than what dividing in fp32 can lose
SMALLEST = tl.constexpr(2.0**-110)  # scale: below it fp32 runs out of digits
DIGITS = tl.constexpr(2**14 - 1)  # the largest query: 127 * 128 + 127
PART = 32  # query heads that one program takes at most
PROGRAMS_PER_SM = 4


def channel_sizes(kmin, kmax):
    """Powers of two up to 1, fp32 [B, Hkv, D]: how large each channel's keys are beside the head's largest, from its [B, Hkv, S, D] bounds."""
    if not kmin.shape[2]:
        return torch.ones(*kmin.shape[:2], kmin.shape[3], device=kmin.device)
    largest = torch.maximum(kmin.float().abs(), kmax.float().abs()).amax(2)
    exponent = torch.frexp(largest).exponent
    below = (exponent - exponent.amax(-1, keepdim=True)).clamp(-14, 0)  # beyond 2^-14 a channel adds nothing that 8 bits could tell
    return torch.ldexp(torch.ones_like(largest), below)


def encode(kmin, kmax, channel):
    """(kmin, kmax as int8 [B, Hkv, S, D], scale fp32 [B, Hkv, S]) from finite bounds [B, Hkv, S, D] and channel [B, Hkv, D]."""
    outward = torch.stack([-kmin, kmax]).float() / channel[:, :, None]  # both bounds are then rounded up
    peak = outward.abs().amax((0, -1))
    scale = (peak * PER_PEAK.value).clamp_(min=SMALLEST.value).masked_fill_(peak == 0, 0.0)
    inverse = 1.0 / scale[..., None]  # one division an entry: this is on the way of every append
    codes = torch.ceil(outward * inverse + MARGIN.value).masked_fill_((peak == 0)[..., None], 0.0).to(torch.int8)
    return -codes[0], codes[1], scale


def quantized(kmin, kmax):
    """The fields of kind ``minmax8`` from those of ``minmax``."""
    channel = channel_sizes(kmin, kmax)
    low, high, scale = encode(kmin, kmax, channel)
    return dict(kmin=low, kmax=high, scale=scale, channel=channel)


@triton.jit
def encode_tile(kmin, kmax, channel):
    """``encode`` inside a kernel, step by step the same: bounds and channel [*, D] -> int8 codes [*, D] and fp32 scale [*]."""
    inverse = (0x7F000000 - channel.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # of a power of two: its exponent's opposite
    low, high = kmin.to(tl.float32) * inverse, kmax.to(tl.float32) * inverse
    peak = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    scale = tl.where(peak > 0, tl.maximum(peak * PER_PEAK, SMALLEST), 0.0)
    some = (scale > 0)[:, None]
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale > 0, scale, 1.0))[:, None]
    low, high = tl.floor(low * inverse - MARGIN), tl.ceil(high * inverse + MARGIN)
    return tl.where(some, low, 0.0).to(tl.int8), tl.where(some, high, 0.0).to(tl.int8), scale


@triton.jit
def score_row8(
    row, part, q_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, scores_ptr, q_batch, q_head,
    low_batch, low_head, low_entry, high_batch, high_head, high_entry, scale_batch, scale_head, scale_entry, kv_heads, entries, pages,
    GROUP: tl.constexpr, BOUND: tl.constexpr, PER_PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """This program's share, by the first axis of the grid, of the pages of KV head ``row``, for HEADS of its query heads."""
    batch, kv_head = row.to(tl.int64) // kv_heads, row.to(tl.int64) % kv_heads
    dims = tl.arange(0, BLOCK_D)
    in_head = (dims < D)[None, :]
    length = tl.load(lengths_ptr + batch)
    # Every head stands there twice: once for its upper digit, and HEADS rows below for its lower one.
    line = tl.arange(0, 2 * HEADS)
    head = part * HEADS + line % HEADS
    q = tl.load(q_ptr + batch * q_batch + (kv_head * G + head[:, None]) * q_head + dims[None, :], mask=(head < G)[:, None] & in_head, other=0.0)
    q = q.to(tl.float32) * tl.load(channel_ptr + (batch * kv_heads + kv_head) * D + dims, mask=dims < D, other=0.0)[None, :]
    peak = tl.max(tl.abs(q), axis=1)
    number = tl.floor(q / tl.where(peak == 0.0, 1.0, peak)[:, None] * DIGITS + 0.5).to(tl.int32)
    up, down = tl.maximum(number, 0), tl.minimum(number, 0)
    upper = (line < HEADS)[:, None]
    up = tl.where(upper, up >> 7, up & 127).to(tl.int8)
    down = tl.where(upper, down >> 7, down & 127).to(tl.int8)  # -5 is -1 * 128 + 123
    unit = tl.max(tl.reshape(peak, (2, HEADS)), axis=0) / DIGITS
    weight = tl.where(tl.arange(0, 2) == 0, 128, 1)[:, None, None]
    head = part * HEADS + tl.arange(0, HEADS)
    live = (head < G)[:, None]

    low_ptr += batch * low_batch + kv_head * low_head
    high_ptr += batch * high_batch + kv_head * high_head
    scale_ptr += batch * scale_batch + kv_head * scale_head
    for block in range(tl.program_id(0), tl.cdiv(pages, BLOCK_N), tl.num_programs(0)):
        entry = block * BLOCK_N * PER_PAGE + tl.arange(0, BLOCK_N * PER_PAGE)
        held = (entry * BOUND < length) & (entry < entries)
        inside = held[:, None] & in_head
        at = entry.to(tl.int64)
        high = tl.load(high_ptr + at[:, None] * high_entry + dims[None, :], mask=inside, other=0)
        low = tl.load(low_ptr + at[:, None] * low_entry + dims[None, :], mask=inside, other=0)
        scale = tl.load(scale_ptr + at * scale_entry, mask=held, other=0.0)
        total = tl.dot(up, tl.trans(high), out_dtype=tl.int32)
        total = tl.dot(down, tl.trans(low), acc=total, out_dtype=tl.int32)
        total = tl.sum(tl.reshape(total, (2, HEADS, BLOCK_N * PER_PAGE)) * weight, axis=0)
        # 64 for each dim: half a unit times the largest code.
        bound = (total + 64 * D).to(tl.float32) * (unit[:, None] * scale[None, :])
        bound = tl.where(held[None, :], bound, float("-inf"))
        if PER_PAGE > 1:
            bound = tl.max(tl.reshape(bound, (HEADS, BLOCK_N, PER_PAGE)), axis=2)
        page = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if GROUP == "none":
            out = (batch * kv_heads * G + kv_head * G + head)[:, None] * pages + page[None, :]
            tl.store(scores_ptr + out, bound, mask=live & (page < pages)[None, :])
        else:
            if GROUP == "max":
                score = tl.max(tl.where(live, bound, float("-inf")), axis=0)
            else:
                score = tl.sum(bound, axis=0)  # padding heads are zero queries and add nothing
            tl.store(scores_ptr + (batch * kv_heads + kv_head) * pages + page, score, mask=page < pages)


@triton.jit
def _score8_kernel(
    q_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, scores_ptr, q_batch, q_head,
    low_batch, low_head, low_entry, high_batch, high_head, high_entry, scale_batch, scale_head, scale_entry, kv_heads, entries, pages,
    GROUP: tl.constexpr, BOUND: tl.constexpr, PER_PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    score_row8(
        tl.program_id(1), tl.program_id(2), q_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, scores_ptr, q_batch, q_head,
        low_batch, low_head, low_entry, high_batch, high_head, high_entry, scale_batch, scale_head, scale_entry, kv_heads, entries, pages,
        GROUP, BOUND, PER_PAGE, G, D, HEADS, BLOCK_D, BLOCK_N,
    )  # fmt: skip


class ScoreLaunch:
    """Grid and arguments of a scoring launch: q [B, Hq, D], a ``PageSummary`` of kind ``minmax8``, group "max", "sum" or "none"."""

    def __init__(self, q, summary, group):
        low, high, scale, channel = summary.fields.values()
        batch, kv_heads, entries, dim = low.shape
        self.per_kv_head, pages = q.shape[1] // kv_heads, summary.pages
        heads = min(PART, max(8, triton.next_power_of_2(self.per_kv_head)))  # two digits of 8 heads are the 16 rows that tl.dot wants
        parts = triton.cdiv(self.per_kv_head, heads)
        self.group = group if parts == 1 else "none"  # what several programs see is put together afterwards
        rows, per_page = batch * kv_heads, summary.page_size // summary.bound_size
        sms = card(q.device).sms
        block = (64 if rows * triton.cdiv(entries, 64) >= sms else 32) // per_page
        blocks = triton.cdiv(pages, block)
        turns = triton.cdiv(blocks, max(1, PROGRAMS_PER_SM * sms // max(1, rows * parts)))
        self.grid = triton.cdiv(blocks, max(1, turns)), rows, parts
        self.scores = torch.empty(batch, q.shape[1] if self.group == "none" else kv_heads, pages, dtype=torch.float32, device=q.device)
        self.arguments = (
            q, low, high, scale, channel.contiguous(), summary.lengths, self.scores, q.stride(0), q.stride(1),
            *low.stride()[:3], *high.stride()[:3], *scale.stride(), kv_heads, entries, pages,
        )  # fmt: skip
        self.options = dict(
            GROUP=self.group, BOUND=summary.bound_size, PER_PAGE=per_page, G=self.per_kv_head, D=dim, HEADS=heads,
            BLOCK_D=triton.next_power_of_2(dim), BLOCK_N=block, num_stages=2,
        )  # fmt: skip


def launch_scores8(q, summary, group):
    """Scores of kind ``minmax8`` by the kernel: fp32 [B, Hkv, N], or [B, Hq, N] for group "none". Arguments as in ``page_scores``."""
    launch, early = ScoreLaunch(q, summary, group), card(q.device).dependent_launch
    if launch.scores.numel():
        _score8_kernel[launch.grid](*launch.arguments, **launch.options, DEPENDENT=early, **(dict(launch_pdl=True) if early else {}))
    if launch.group == group:
        return launch.scores
    each = launch.scores.unflatten(1, (-1, launch.per_kv_head))
    return each.amax(2) if group == "max" else each.sum(2)
