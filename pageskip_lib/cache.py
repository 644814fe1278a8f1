"""A paged KV cache: sequences take pages from one pool as they grow, and an append keeps the page summaries current.

Paging is PagedAttention's (Kwon et al., SOSP 2023, arXiv 2309.06180): a sequence's tokens lie in pages of one pool, wherever there was room, and
its row of the page table says where. Rows may share pages; a shared page is copied before it is written to. Which page goes where is decided
on the host, which counts tokens along and so never waits for the device; lengths, table and summaries live on the device.
"""

from collections import Counter

import torch

from .bounds8 import channel_sizes, encode
from .checks import DTYPES, HEAD_DIMS, check_page_size, check_tensor, page_count, shape_of
from .runtime import card, resolve_backend, tl, triton
from .summaries import FIELDS, PageSummary, extend_summary, extend_summary_torch, summarize_pages


class CacheFull(RuntimeError):
    """The cache has no room for what was to be appended; nothing was written."""


@triton.jit
def _append_paged_kernel(
    rows_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, table_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr,
    kv_heads, pages,
    KIND: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Append one row's token for all KV heads: to the page that its table names, to its summary, to its length."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # the scores may be set up now; they wait for the end of this kernel
    given = tl.program_id(0).to(tl.int64)
    row = given
    if rows_ptr is not None:
        row = tl.load(rows_ptr + given).to(tl.int64)
    position = tl.load(lengths_ptr + row)
    page = tl.load(table_ptr + row * pages + position // PAGE).to(tl.int64)
    head = tl.arange(0, BLOCK_H).to(tl.int64)
    heads, dims = head[:, None], tl.arange(0, BLOCK_D)[None, :]
    there = (heads < kv_heads) & (dims < D)
    key = tl.load(k_new_ptr + (given * kv_heads + heads) * D + dims, mask=there, other=0.0)
    value = tl.load(v_new_ptr + (given * kv_heads + heads) * D + dims, mask=there, other=0.0)
    at = ((page * kv_heads + heads) * PAGE + position % PAGE) * D + dims
    tl.store(k_ptr + at, key, mask=there)
    tl.store(v_ptr + at, value, mask=there)
    extend_summary(
        key, row, head, dims, head < kv_heads, position, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr,
        kv_heads, pages, KIND, PAGE, D,
    )  # fmt: skip
    tl.store(lengths_ptr + row, position + 1)


class PagedKVCache:
    """Keys and values of up to ``rows`` sequences, B of them, in one pool of pages.

    pool_pages: pages that all rows share. kv_heads, dim: Hkv and D, one of ``HEAD_DIMS``. page_size: P tokens, 16, 32, 64 or 128.
    row_pages: N, the most pages that one row can hold. dtype: fp16, bf16 or fp32. kind: of the summaries, "minmax8" or "minmax".

    k, v: [pool_pages, Hkv, P, D], so that one page of one KV head is contiguous. table: [B, N] int32, the pool page of each of a row's
    pages, -1 for none. lengths: [B] int32. summary: a ``PageSummary`` of the rows, kept current by every call. All of them on the device and
    written in place, so they may be kept. ``host_lengths`` are the same lengths as the host counts them, ``free_pages`` what is left.

    For attention give k, v, ``lengths=lengths`` and ``table=table`` to ``dense_decode`` or ``sparse_decode``.
    """

    def __init__(self, pool_pages, kv_heads, dim, *, rows, row_pages, dtype, device, page_size=64, kind="minmax8", backend="auto"):
        for name, count in (("pool_pages", pool_pages), ("kv_heads", kv_heads), ("rows", rows), ("row_pages", row_pages)):
            if type(count) is not int or count < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more, got {count!r}.")
        if dim not in HEAD_DIMS:
            raise ValueError(f"The head dim must be one of {HEAD_DIMS}, got {dim!r}.")
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float16, bfloat16 or float32, got {dtype!r}.")
        if kind not in ("minmax8", "minmax"):
            raise ValueError(f"kind must be 'minmax8' or 'minmax', which an append can keep current, got {kind!r}.")
        check_page_size(page_size)
        self.k, self.v = (torch.empty(pool_pages, kv_heads, page_size, dim, dtype=dtype, device=device) for _ in range(2))
        self.page_size, self.backend = page_size, resolve_backend(backend, self.k)
        self.table = torch.full((rows, row_pages), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        # In the order of a row's pages, not of the pool: a score reads every entry of a row and streams them so, and a page that is
        # freed or shared takes no summary with it. A row that shares pages pays with a copy of their summaries, 1/32 of the keys.
        coded = kind == "minmax8"
        fields = {name: torch.zeros(rows, kv_heads, row_pages, dim, dtype=torch.int8 if coded else dtype, device=device) for name in FIELDS["minmax"]}
        self._exact = tuple(fields.values())  # what an append starts from: of minmax8 the exact bounds of the page being filled
        if coded:
            fields |= dict(scale=torch.zeros(rows, kv_heads, row_pages, device=device), channel=torch.ones(rows, kv_heads, dim, device=device))
            self._exact = tuple(torch.zeros(rows, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
        self.summary = PageSummary(kind, page_size, self.lengths, **fields)
        self.host_lengths = [0] * rows
        self._pages = [[] for _ in range(rows)]  # the table, as the host knows it
        self._owners = [0] * pool_pages  # rows that hold the page
        self._free = list(range(pool_pages))[::-1]

    @property
    def free_pages(self):
        return len(self._free)

    def append(self, k_new, v_new, *, rows=None):
        """Append tokens to ``rows``, a list of A row numbers (default all, in order); the others are left alone.

        k_new, v_new: [A, Hkv, D], one token for each row by one kernel, or [A, Hkv, n, D], n tokens for each. Raises CacheFull when a row or the
        pool has no room for all of them, ValueError or TypeError for what does not fit; nothing is changed then.

        The channels of minmax8 are sized whenever all of a row is summarised at once: by the first n tokens. They are 1 until then.
        """
        listed = self._checked_rows(rows)
        self._check_tokens(k_new, v_new, len(listed))
        if not k_new.numel():
            return
        one = k_new.dim() == 3
        tokens = 1 if one else k_new.shape[2]
        self._claim(listed, tokens)
        if one and self.backend == "triton":
            self._launch_append(k_new.contiguous(), v_new.contiguous(), None if rows is None else self._to_device(listed, torch.int32))
        else:
            row = self._to_device(listed, torch.int64)
            start = self.lengths[row].long()
            token = start[:, None] + torch.arange(tokens, device=start.device)
            page, slot = self.table[row[:, None], token // self.page_size].long(), token % self.page_size
            for pool, given in ((self.k, k_new), (self.v, v_new)):
                pool[page, :, slot] = given[:, None] if one else given.transpose(1, 2)
            self.lengths[row] += tokens
            if one:
                extend_summary_torch(k_new, row, start, self.summary, self._exact)
        for row in listed:
            before, self.host_lengths[row] = self.host_lengths[row], self.host_lengths[row] + tokens
            if not one:
                self._summarize(row, before // self.page_size)

    def truncate(self, lengths):
        """Keep the first tokens of each row: ``lengths``, one int on the host for each row. Pages that no row needs any more become free."""
        lengths = list(lengths)
        if len(lengths) != len(self._pages) or any(type(length) is not int for length in lengths):
            raise ValueError(f"lengths must be {len(self._pages)} ints, one for each row, got {lengths}.")
        if any(not 0 <= length <= held for length, held in zip(lengths, self.host_lengths)):
            raise ValueError(f"lengths must lie between 0 and what the rows hold, {self.host_lengths}, got {lengths}.")
        for row, length in enumerate(lengths):
            self._cut(row, length)

    def free(self, row):
        """Empty a row. Its pages become free, but for those that another row shares."""
        self._cut(*self._checked_rows([row]), 0)

    def fork(self, source, target):
        """Make the empty row ``target`` a copy of ``source`` that shares its pages; whoever writes to a shared page gets a copy of it first."""
        source, target = self._checked_rows([source, target])
        if self._pages[target]:
            raise ValueError(f"target must be an empty row, but row {target} holds {self.host_lengths[target]} tokens; free it first.")
        for page in self._pages[source]:
            self._owners[page] += 1
        self._pages[target], self.host_lengths[target] = list(self._pages[source]), self.host_lengths[source]
        for tensor in (self.table, self.lengths, *self.summary.fields.values(), *self._exact):
            tensor[target] = tensor[source]

    def view(self):
        """(k, v), each [B, Hkv, N * P, D] and contiguous: a copy of every row's tokens in order. Past a length lies anything."""
        pages = self.table.long().clamp(min=0)
        return tuple(pool[pages].transpose(1, 2).flatten(2, 3) for pool in (self.k, self.v))

    def _checked_rows(self, rows):
        count = len(self._pages)
        rows = list(range(count) if rows is None else rows)
        if any(type(row) is not int or not 0 <= row < count for row in rows) or len(set(rows)) < len(rows):
            raise ValueError(f"Rows must be different ints from 0 to {count - 1}, got {rows}.")
        return rows

    def _check_tokens(self, k_new, v_new, count):
        _, kv_heads, _, dim = self.k.shape
        for name, given in (("k_new", k_new), ("v_new", v_new)):
            many = isinstance(given, torch.Tensor) and given.dim() == 4
            check_tensor(name, given, "A, Hkv, n, D" if many else "A, Hkv, D")
            if given.shape != ((count, kv_heads, given.shape[2], dim) if many else (count, kv_heads, dim)):
                raise ValueError(f"{name} must have shape [{count}, {kv_heads}, {dim}] or [{count}, {kv_heads}, n, {dim}], got {shape_of(given)}.")
            if given.dtype != self.k.dtype:
                raise TypeError(f"{name} must have the cache's dtype {self.k.dtype}, got {given.dtype}.")
            if given.device != self.k.device:
                raise ValueError(f"{name} must be on the cache's device {self.k.device}, got {given.device}.")
        if v_new.shape != k_new.shape:
            raise ValueError(f"v_new must have k_new's shape {shape_of(k_new)}, got {shape_of(v_new)}.")

    def _claim(self, rows, tokens):
        """Give each row the pages that so many tokens more will be written to, all of them its own; or raise CacheFull and change nothing."""
        size, row_pages = self.page_size, self.table.shape[1]
        after = {row: page_count(self.host_lengths[row] + tokens, size) for row in rows}
        copying, writers = [], Counter()
        for row in rows:
            if after[row] > row_pages:
                held = self.host_lengths[row]
                raise CacheFull(f"Row {row} holds {held} of at most {row_pages * size} tokens, no room for {tokens} more; nothing was appended.")
            if self.host_lengths[row] % size:
                last = self._pages[row][-1]
                writers[last] += 1
                if writers[last] < self._owners[last]:  # the last of its owners need not copy it
                    copying.append(row)
        needed = len(copying) + sum(pages - len(self._pages[row]) for row, pages in after.items())
        if needed > len(self._free):
            raise CacheFull(f"The pool has {len(self._free)} free pages of {len(self._owners)} and this takes {needed}; nothing was appended.")
        changed = []  # (place in the table, page)
        for row in copying:
            old, new = self._pages[row].pop(), self._take(row, changed)
            self._owners[old] -= 1
            self.k[new], self.v[new] = self.k[old], self.v[old]
        for row, pages in after.items():
            while len(self._pages[row]) < pages:
                self._take(row, changed)
        if changed:
            place, page = self._to_device(list(zip(*changed)), torch.int32)
            self.table.view(-1)[place] = page

    def _take(self, row, changed):
        """Make a free page the row's next one."""
        page = self._free.pop()
        self._owners[page] = 1
        changed.append((row * self.table.shape[1] + len(self._pages[row]), page))
        self._pages[row].append(page)
        return page

    def _cut(self, row, length):
        if length == self.host_lengths[row]:
            return
        kept = page_count(length, self.page_size)
        for page in self._pages[row][kept:]:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
        del self._pages[row][kept:]
        self.host_lengths[row] = length
        self.table[row, kept:] = -1
        self.lengths[row : row + 1] = length  # a slice is filled on the GPU; for a single element PyTorch would wait
        self._summarize(row, length // self.page_size)

    def _summarize(self, row, first):
        """Summarise a row's pages anew from page ``first`` on."""
        held = len(self._pages[row])
        keys = self.k[self.table[row, first:held].long()].transpose(0, 1).flatten(1, 2)[None]
        length = torch.full((1,), self.host_lengths[row] - first * self.page_size, dtype=torch.int32, device=keys.device)
        bounds = summarize_pages(keys, self.page_size, lengths=length, backend=self.backend).fields.values()
        made = dict(zip(FIELDS["minmax"], bounds))
        if self.summary.kind == "minmax8":
            if not first:
                self.summary.channel[row] = channel_sizes(*bounds)[0]
            if held > first:
                for exact, bound in zip(self._exact, bounds):
                    exact[row] = bound[0, :, -1]
            made = dict(zip(("kmin", "kmax", "scale"), encode(*bounds, self.summary.channel[row : row + 1])))
        for name, field in made.items():
            getattr(self.summary, name)[row, :, first:held] = field[0]

    def _launch_append(self, k_new, v_new, rows):
        _, kv_heads, page_size, dim = self.k.shape
        early, summary = card(self.k.device).dependent_launch, self.summary
        codes = [summary.fields.get(name) for name in ("kmin", "kmax", "scale", "channel")] if summary.kind == "minmax8" else [None] * 4
        _append_paged_kernel[(len(k_new),)](
            rows, k_new, v_new, self.k, self.v, self.table, *self._exact, *codes, self.lengths, kv_heads, self.table.shape[1],
            KIND=summary.kind, PAGE=page_size, D=dim, BLOCK_H=triton.next_power_of_2(kv_heads), BLOCK_D=triton.next_power_of_2(dim), DEPENDENT=early,
        )  # fmt: skip

    def _to_device(self, values, dtype):
        """A tensor of ints. From pinned memory, so that the host does not wait for the copy."""
        values = torch.tensor(values, dtype=dtype)
        return values.pin_memory().to(self.k.device, non_blocking=True) if self.k.is_cuda else values
