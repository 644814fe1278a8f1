"""Page summaries beside a pool of blocks that belongs to somebody else: a slot for each page of the pool, whoever holds it.

Whatever is written, the pages written to are summarised anew, from their first token to their newest. That reads a page where one key would do, but
nothing is carried over: a page that is freed and given away needs no notice, and one that several requests share is summarised once.
"""

from .bounds8 import channel_sizes, encode, encode_tile
from .runtime import resolve_backend, tl, triton
from .summaries import FIELDS, PageSummary, summarize_pages


@triton.jit
def _summarize_written_kernel(
    page_ptr, slot_ptr, held_ptr, k_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, k_page, k_head, k_token, kv_heads, entries,
    KIND: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One entry of one page of one KV head: its bounds, as they are or in 8 bits."""
    written, head, entry = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    page, slot = tl.load(page_ptr + written).to(tl.int64), tl.load(slot_ptr + written).to(tl.int64)
    held = tl.load(held_ptr + written)
    dims = tl.arange(0, BLOCK_D)
    own = dims < D
    kmin, kmax = tl.full([BLOCK_D], float("inf"), tl.float32), tl.full([BLOCK_D], float("-inf"), tl.float32)
    for start in range(entry * SIZE, tl.minimum((entry + 1) * SIZE, held), 8):  # few keys at a time, for few registers
        token = start + tl.arange(0, 8)
        at = k_ptr + page * k_page + head * k_head + token[:, None] * k_token + dims[None, :]
        valid = (token < held)[:, None] & own[None, :]
        kmin = tl.minimum(kmin, tl.min(tl.load(at, mask=valid, other=float("inf")).to(tl.float32), axis=0))
        kmax = tl.maximum(kmax, tl.max(tl.load(at, mask=valid, other=float("-inf")).to(tl.float32), axis=0))
    some = own & (entry * SIZE < held)
    kmin, kmax = tl.where(some, kmin, 0.0), tl.where(some, kmax, 0.0)
    row = (slot * kv_heads + head) * entries + entry
    if KIND == "minmax8":
        channel = tl.load(channel_ptr + head * D + dims, mask=own, other=1.0)
        low, high, scale = encode_tile(kmin[None, :], kmax[None, :], channel[None, :])
        to = row * D + dims[None, :]
        tl.store(low_ptr + to, low, mask=own[None, :])
        tl.store(high_ptr + to, high, mask=own[None, :])
        tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    else:
        tl.store(kmin_ptr + row * D + dims, kmin, mask=own)
        tl.store(kmax_ptr + row * D + dims, kmax, mask=own)


class BlockSummaries:
    """Summaries of one layer's pages in ``slots`` slots. page_size, kind, bound_size: as ``summarize_pages`` takes them.

    fields: {name: [slots, Hkv, S, ...]}, S entries a page. The channels of minmax8, [1, Hkv, D], are sized once, by the first keys that are
    written, and shared by everybody: they make a bound tighter or looser, never wrong.
    """

    def __init__(self, slots, page_size, kind="minmax8", bound_size=None, backend="auto"):
        self.slots, self.page_size, self.kind, self.backend = slots, page_size, kind, backend
        self.bound_size = bound_size or page_size
        self.fields, self.channel = {}, None

    def update(self, pages, page, slot, held):
        """Summarise anew the pages that were written to. pages: the pool [pages, Hkv, P, D], any outer strides.

        page, slot: [n] int64, each page's place in the pool and its slot, no slot twice. held: [n] int32, the tokens from its first to its newest.
        """
        bounds = self.kind in ("minmax", "minmax8")
        if self.fields and bounds and resolve_backend(self.backend, pages) == "triton":
            self._launch(pages, page, slot, held)
            return
        kind = "minmax" if bounds else self.kind
        made = summarize_pages(pages[page], self.page_size, lengths=held, kind=kind, bound_size=self.bound_size, backend=self.backend).fields
        if self.kind == "minmax8":
            if self.channel is None:
                self.channel = channel_sizes(*(bound.transpose(0, 1).flatten(1, 2)[None] for bound in made.values()))
            made = dict(zip(("kmin", "kmax", "scale"), encode(*made.values(), self.channel)))
        for name, field in made.items():
            if name not in self.fields:
                self.fields[name] = field.new_zeros(self.slots, *field.shape[1:])
            self.fields[name][slot] = field

    def _launch(self, pages, page, slot, held):
        kv_heads, dim = pages.shape[1], pages.shape[3]
        coded = self.kind == "minmax8"
        exact = [None, None] if coded else [self.fields[name] for name in FIELDS["minmax"]]
        codes = [self.fields[name] for name in ("kmin", "kmax", "scale")] if coded else [None] * 3
        entries = self.page_size // self.bound_size
        _summarize_written_kernel[(len(page), kv_heads, entries)](
            page, slot, held, pages, *exact, *codes, self.channel, *pages.stride()[:3], kv_heads, entries,
            KIND=self.kind, SIZE=self.bound_size, D=dim, BLOCK_D=triton.next_power_of_2(dim),
        )  # fmt: skip

    def of_rows(self, slots, lengths, kind="minmax", bound_size=None):
        """The ``PageSummary`` of sequences whose pages have these slots [B, N] and that hold so many tokens, lengths [B] int32: a copy.

        Raises ValueError for another kind or bound size than what is kept.
        """
        if (kind, bound_size or self.page_size) != (self.kind, self.bound_size):
            kept, wanted = f"{self.kind!r} with bound_size {self.bound_size}", f"{kind!r} with {bound_size or self.page_size}"
            raise ValueError(f"The summaries kept are of kind {kept}, as the policy's attributes say, not {wanted}.")
        fields = {name: field[slots].transpose(1, 2).flatten(2, 3) for name, field in self.fields.items()}
        if kind == "minmax8":
            fields["channel"] = self.channel.expand(len(slots), -1, -1)
        return PageSummary(kind, self.page_size, lengths, **fields, bound_size=self.bound_size)
