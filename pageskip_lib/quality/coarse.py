"""A coarse copy of every key to rank pages by: in which quarter of its box each of its numbers lies.

A box (the 8-bit bounds of ``bounds8``) says what the best key of a page could be at most, and the more tokens and dimensions it spans, the less
that has to do with the keys in it. Here the box is only the ruler: each side is cut into four equal parts, and a key's number is kept as the
part it falls into, two bits. The query meets the middles of those parts, a softmax over all tokens follows, and a page is worth the
attention that its tokens get in it: the oracle's own rule, on blurred keys. It is an estimate, not a bound.

Keys quantised channel by channel are KIVI's (arXiv 2402.02750). No kernel of this library reads such a copy: this is a reference, to be compared
with the bounds at equal bytes. The newest pages are read anyway, so a box is cut once, when it is full; until then it may grow.
"""

import torch

from ..bounds8 import quantized
from ..checks import page_count

BOX = 32  # tokens that share one
PARTS = 4  # of a side


def coarse_bytes(tokens, dim):
    """Bytes of one KV head's coarse copy: two bits a number, and for each box two 8-bit corners and a scale."""
    return page_count(tokens, BOX) * (2 * dim + 4) + tokens * dim // 4


def coarse_keys(keys):
    """The keys [B, Hkv, T, D] as their coarse copy has them, fp32."""
    tokens = keys.shape[2]
    boxed = lambda value: torch.nn.functional.pad(keys.float(), (0, 0, 0, -tokens % BOX), value=value).unflatten(2, (-1, BOX))  # noqa: E731
    codes = quantized(boxed(float("inf")).amin(3), boxed(float("-inf")).amax(3))
    unit = (codes["scale"][..., None] * codes["channel"][:, :, None])[:, :, :, None]
    low, high = (codes[name][:, :, :, None] * unit for name in ("kmin", "kmax"))
    width = (high - low) / PARTS
    part = ((boxed(0.0) - low) / width.clamp(min=torch.finfo(torch.float32).tiny)).floor().clamp(0, PARTS - 1)
    return (low + (part + 0.5) * width).flatten(2, 3)[:, :, :tokens]


def coarse_mass(q, keys, lengths, page_size, group):
    """Each page's share of the attention, told from the coarse copy: fp32 [B, Hkv, N].

    q: [B, Hq, D]; keys: [B, Hkv, T, D]; lengths: [B] int32, on their device. group: of a KV head's query heads, the "max" or the "sum".
    """
    batch, kv_heads, tokens, dim = keys.shape
    past = torch.arange(tokens, device=keys.device) >= lengths[:, None]
    keys = coarse_keys(keys.masked_fill(past[:, None, :, None], 0.0))
    scores = q.float().view(batch, kv_heads, -1, dim) @ keys.mT * dim**-0.5
    weights = torch.softmax(scores.masked_fill(past[:, None, None], float("-inf")), dim=-1).nan_to_num(0.0)
    shares = torch.nn.functional.pad(weights, (0, -tokens % page_size)).unflatten(3, (-1, page_size)).sum(-1)
    return shares.amax(2) if group == "max" else shares.sum(2)
