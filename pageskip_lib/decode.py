"""The whole decode step of one attention layer: append the token, score the pages, select, attend; eager or in one CUDA graph.

What changes from step to step (lengths, summaries, page lists) stays on the device, and no shape and no launch depends on it.
So a step that was captured once can be replayed at every length that the cache has room for.
"""

import torch

from .checks import check_attention, check_lengths, check_page_size, check_tensor, page_count, shape_of
from .dense import decode_workspace, dense_decode
from .runtime import resolve_backend, tl, triton
from .scores import page_scores
from .selection import Budget, select_pages
from .sparse import sparse_decode
from .summaries import summarize_pages


class CacheFull(RuntimeError):
    """The cache has no room for another token; nothing was written."""


@triton.jit
def _append_kernel(
    k_new_ptr, v_new_ptr, k_ptr, v_ptr, kmin_ptr, kmax_ptr, lengths_ptr,
    k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, kv_heads, pages,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # One program for all KV heads of a sequence: it reads the length, and nobody else may see it half changed.
    batch = tl.program_id(0).to(tl.int64)
    position = tl.load(lengths_ptr + batch)
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    there = (heads < kv_heads) & (dims < D) & (position < tokens)
    given = (batch * kv_heads + heads) * D + dims
    key = tl.load(k_new_ptr + given, mask=there, other=0.0)
    value = tl.load(v_new_ptr + given, mask=there, other=0.0)
    at = position.to(tl.int64)
    tl.store(k_ptr + batch * k_batch + heads * k_head + at * k_token + dims, key, mask=there)
    tl.store(v_ptr + batch * v_batch + heads * v_head + at * v_token + dims, value, mask=there)
    # The first token of a page starts its summary anew, whatever the slot held before.
    merged = there & (position % PAGE != 0)
    summary = ((batch * kv_heads + heads) * pages + at // PAGE) * D + dims
    kmin = tl.load(kmin_ptr + summary, mask=merged, other=float("inf"))
    kmax = tl.load(kmax_ptr + summary, mask=merged, other=float("-inf"))
    tl.store(kmin_ptr + summary, tl.minimum(kmin, key), mask=there)
    tl.store(kmax_ptr + summary, tl.maximum(kmax, key), mask=there)
    tl.store(lengths_ptr + batch, tl.minimum(position + 1, tokens))


def _append_torch(k_new, v_new, k, v, summary, lengths):
    """PyTorch path of the append, on the device as well."""
    row, position = torch.arange(len(lengths), device=lengths.device), lengths.long()
    k[row, :, position], v[row, :, position] = k_new, v_new
    page, fresh = position // summary.page_size, (position % summary.page_size == 0)[:, None, None]
    for bound, merge in ((summary.kmin, torch.minimum), (summary.kmax, torch.maximum)):
        bound[row, :, page] = torch.where(fresh, k_new, merge(bound[row, :, page], k_new))
    lengths += 1


class DecodeStep:
    """One layer's decode step over a KV cache with room to grow.

    k, v: [B, Hkv, T, D], any outer strides; T is the capacity. lengths: [B] int32 on their device, the tokens that are valid now.
    k, v and lengths are the caller's and are written to. budget: a ``Budget`` of pages for each KV head. heads: Hq.
    page_size, group, scale: as in ``page_scores``, ``select_pages`` and ``sparse_decode``.

    A call appends one token to every sequence and attends with the new token included, within the budget. Where every page that
    the cache can ever hold fits the budget, the step attends to all of it (``dense_decode``) and selects nothing.
    ``out`` is overwritten by the next call.
    """

    def __init__(self, k, v, lengths, budget, *, heads, page_size=64, group="max", scale=None, backend="auto"):
        check_tensor("k", k, "B, Hkv, T, D")
        check_page_size(page_size)
        if not isinstance(budget, Budget):
            raise TypeError(f"budget must be a Budget, got {type(budget).__name__}.")
        batch, kv_heads, tokens, dim = k.shape
        self.q = k.new_zeros(batch, heads, dim)
        check_attention(self.q, k, v)
        self.k, self.v = k, v
        self.lengths = check_lengths(lengths, batch, tokens, k.device)
        self.k_new, self.v_new = (k.new_zeros(batch, kv_heads, dim) for _ in range(2))
        self.budget, self.page_size, self.group, self.scale = budget, page_size, group, scale
        self.backend = resolve_backend(backend, k)
        self.selects = page_count(tokens, page_size) > budget.pages
        self.workspace = decode_workspace(self.q, k)
        self._graph = None
        self.set_lengths(self.lengths)

    def set_lengths(self, lengths):
        """Make lengths [B] the valid tokens of each sequence, shorter or longer than before, and summarise the cache anew."""
        lengths = check_lengths(lengths, len(self.lengths), self.k.shape[2], self.k.device)
        longest = int(lengths.max()) if len(lengths) else 0  # the one time that the host waits for a length
        self.lengths.copy_(lengths)
        fresh = summarize_pages(self.k, self.page_size, lengths=self.lengths, backend=self.backend)
        if self._graph is None:
            self.summary = fresh
        else:  # the graph knows the arrays by their addresses
            self.summary.kmin.copy_(fresh.kmin)
            self.summary.kmax.copy_(fresh.kmax)
        self.room = self.k.shape[2] - longest

    def _run(self):
        if self.backend == "torch":
            _append_torch(self.k_new, self.v_new, self.k, self.v, self.summary, self.lengths)
        else:
            batch, kv_heads, tokens, dim = self.k.shape
            _append_kernel[(batch,)](
                self.k_new, self.v_new, self.k, self.v, self.summary.kmin, self.summary.kmax, self.lengths,
                *self.k.stride()[:3], *self.v.stride()[:3], tokens, kv_heads, self.summary.kmin.shape[2],
                PAGE=self.page_size, D=dim, BLOCK_H=triton.next_power_of_2(kv_heads), BLOCK_D=triton.next_power_of_2(dim),
            )  # fmt: skip
        same = dict(lengths=self.lengths, scale=self.scale, workspace=self.workspace, backend=self.backend)
        if not self.selects:
            return dense_decode(self.q, self.k, self.v, **same)
        scores = page_scores(self.q, self.summary, group=self.group, backend=self.backend)
        pages = select_pages(scores, self.budget, self.lengths, self.page_size)
        return sparse_decode(self.q, self.k, self.v, pages, page_size=self.page_size, **same)

    def capture(self):
        """Capture the step in one CUDA graph, which later calls replay; returns self. The cache and its lengths stay as they are."""
        if not self.k.is_cuda:
            raise RuntimeError(f"A CUDA graph needs tensors on a CUDA GPU, and these are on {self.k.device}.")
        kept = [tensor.clone() for tensor in (self.lengths, self.summary.kmin, self.summary.kmax)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()  # compiles what there is to compile; the token that it appends lies past the length again in a moment
            for tensor, before in zip((self.lengths, self.summary.kmin, self.summary.kmax), kept):
                tensor.copy_(before)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._run()
        return self

    def __call__(self, q, k_new, v_new):
        """Append k_new, v_new [B, Hkv, D], attend with q [B, Hq, D]. Returns out [B, Hq, D]. Raises CacheFull when a sequence is full."""
        if not self.room:
            raise CacheFull(f"The cache holds {self.k.shape[2]} tokens a sequence and one of them is full; nothing was appended.")
        for name, given, kept in (("q", q, self.q), ("k_new", k_new, self.k_new), ("v_new", v_new, self.v_new)):
            if not isinstance(given, torch.Tensor) or given.shape != kept.shape or given.dtype != kept.dtype:
                got = f"{shape_of(given)} {given.dtype}" if isinstance(given, torch.Tensor) else type(given).__name__
                raise ValueError(f"{name} must be a tensor of shape {shape_of(kept)} and {kept.dtype}, got {got}.")
        for given, kept in ((q, self.q), (k_new, self.k_new), (v_new, self.v_new)):
            kept.copy_(given)
        self.room -= 1
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._out
