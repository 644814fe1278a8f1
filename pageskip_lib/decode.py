"""The whole decode step of one attention layer: append the token, score the pages, select, attend; eager or in one CUDA graph.

What changes from step to step (lengths, summaries, page lists) stays on the device, and no shape and no launch depends on it.
So a step that was captured once can be replayed at every length that the cache has room for. With 8-bit bounds it is four launches: append
and score, select, attend, merge. A step that reads everything is two: attend, and append and merge. On a GPU that can launch a kernel before
the one it depends on has ended, all but the first are launched so: each is set up while its forerunner runs, and then waits for its end.
"""

import torch

from .bounds8 import PART, ScoreLaunch, quantized, score_row8
from .cache import CacheFull
from .checks import check_attention, check_lengths, check_page_size, check_scale, check_tensor, page_count, shape_of
from .dense import decode_workspace, dense_decode, launch_dense
from .merge import merge_blocks, merge_row
from .runtime import card, resolve_backend, tl, triton
from .scores import page_scores
from .selection import Budget, empty_list, launch_select, select_pages
from .sparse import sparse_decode
from .summaries import PageSummary, extend_summary, extend_summary_torch, summarize_pages


@triton.jit
def append_token(
    sequence, k_new_ptr, v_new_ptr, k_ptr, v_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, after_ptr,
    k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, kv_heads, pages,
    KIND: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BESIDE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Append one sequence's token for all KV heads, and write its new length to after_ptr.

    BESIDE: an attention kernel puts the token into the cache, and only the summary is left to do. WAIT: it still needs the old length.
    kmin to channel: as in ``extend_summary``.
    """
    # One program for all KV heads of a sequence: it reads the length, and nobody else may see it half changed.
    batch = sequence.to(tl.int64)
    position = tl.load(lengths_ptr + batch)
    head = tl.arange(0, BLOCK_H).to(tl.int64)
    heads, dims = head[:, None], tl.arange(0, BLOCK_D)[None, :]
    there = (heads < kv_heads) & (dims < D) & (position < tokens)
    given = (batch * kv_heads + heads) * D + dims
    key = tl.load(k_new_ptr + given, mask=there, other=0.0)
    at = position.to(tl.int64)
    if not BESIDE:
        value = tl.load(v_new_ptr + given, mask=there, other=0.0)
        tl.store(k_ptr + batch * k_batch + heads * k_head + at * k_token + dims, key, mask=there)
        tl.store(v_ptr + batch * v_batch + heads * v_head + at * v_token + dims, value, mask=there)
    extend_summary(
        key, batch, head, dims, (head < kv_heads) & (position < tokens), position, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr,
        kv_heads, pages, KIND, PAGE, D,
    )  # fmt: skip
    if WAIT:
        tl.extra.cuda.gdc_wait()
    tl.store(after_ptr + batch, tl.minimum(position + 1, tokens))


@triton.jit
def _append_kernel(
    k_new_ptr, v_new_ptr, k_ptr, v_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, after_ptr,
    k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, kv_heads, pages,
    KIND: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # the scores may be set up now; they wait for the end of this kernel
    append_token(
        tl.program_id(0), k_new_ptr, v_new_ptr, k_ptr, v_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, after_ptr,
        k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, kv_heads, pages,
        KIND, PAGE, D, BLOCK_H, BLOCK_D, False, False,
    )  # fmt: skip


@triton.jit
def _append_and_score_kernel(
    k_new_ptr, v_new_ptr, k_ptr, v_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, after_ptr,
    k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, kv_heads, pages,
    q_ptr, s_low_ptr, s_high_ptr, s_scale_ptr, s_channel_ptr, s_lengths_ptr, scores_ptr, q_batch, q_head,
    low_batch, low_head, low_entry, high_batch, high_head, high_entry, scale_batch, scale_head, scale_entry, s_kv_heads, entries, s_pages,
    sequences,
    KIND: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr, BOUND: tl.constexpr, PER_PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some programs append while the others score: the only score that sees it is that of the newest page, and that page is always read."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1) - sequences
    if row < 0:
        if tl.program_id(0) == 0:
            append_token(
                tl.program_id(1), k_new_ptr, v_new_ptr, k_ptr, v_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, after_ptr,
                k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, kv_heads, pages,
                KIND, PAGE, D, BLOCK_H, BLOCK_D, False, False,
            )  # fmt: skip
    else:
        score_row8(
            row, 0, q_ptr, s_low_ptr, s_high_ptr, s_scale_ptr, s_channel_ptr, s_lengths_ptr, scores_ptr, q_batch, q_head,
            low_batch, low_head, low_entry, high_batch, high_head, high_entry, scale_batch, scale_head, scale_entry, s_kv_heads, entries, s_pages,
            GROUP, BOUND, PER_PAGE, G, D, HEADS, BLOCK_D, BLOCK_N,
        )  # fmt: skip


@triton.jit
def _append_and_merge_kernel(
    k_new_ptr, v_new_ptr, k_ptr, v_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr, lengths_ptr, after_ptr,
    k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, kv_heads, pages,
    outs, lses, out, lse, rows, splits, sequences,
    KIND: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, MERGE_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Some programs bring summaries and lengths up to date while attention still runs; the others merge what it found."""
    row = tl.program_id(0) - sequences
    if row >= 0:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()  # launched early: the partial results are complete only from here on
        merge_row(row, outs, lses, out, lse, rows, splits, D, BLOCK_S, MERGE_D)
    elif tl.program_id(1) == 0:
        append_token(
            tl.program_id(0), k_new_ptr, v_new_ptr, k_ptr, v_ptr, kmin_ptr, kmax_ptr, low_ptr, high_ptr, scale_ptr, channel_ptr,
            lengths_ptr, after_ptr, k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, kv_heads, pages,
            KIND, PAGE, D, BLOCK_H, BLOCK_D, True, DEPENDENT,
        )  # fmt: skip


def _append_torch(k_new, v_new, k, v, summary, exact, lengths):
    """PyTorch path of the append, on the device as well."""
    row, position = torch.arange(len(lengths), device=lengths.device), lengths.long()
    k[row, :, position], v[row, :, position] = k_new, v_new
    extend_summary_torch(k_new, row, position, summary, exact)
    lengths += 1


def merging_warps(block_h, block_d):
    """Warps of a program that merges or appends: one is soonest done with a merge, but must hold a token of all KV heads."""
    return max(1, min(8, block_h * block_d // 512))


def break_even(k, budget, page_size, card):
    """Tokens up to which a step over k [B, Hkv, T, D] had better read everything: to score and to select takes time of its own.

    Measured on an H200 in three head shapes at batch 1, 8 and 32, a step that selects takes as long as exact attention over 1.2 times the
    tokens that it reads, and what memory can deliver in 5 us on top. Of a card that does not tell its bandwidth, and of a CPU, only what fits
    the budget counts.
    """
    token_bytes = 2 * k.shape[0] * k.shape[1] * k.shape[3] * k.element_size()
    fits = budget.pages * page_size
    if not card.bandwidth:
        return fits
    return int(1.2 * fits + 5e-6 * card.bandwidth / token_bytes)


class DecodeStep:
    """One layer's decode step over a KV cache with room to grow.

    k, v: [B, Hkv, T, D], any outer strides; T is the capacity. lengths: [B] int32 on their device, the tokens that are valid now.
    k, v and lengths are the caller's and are written to. budget: a ``Budget`` of pages for each KV head, one local page at least. heads: Hq.
    kind: of the summaries, "minmax8" or "minmax". page_size, group, scale: as in ``page_scores``, ``select_pages`` and ``sparse_decode``.

    A call appends one token to every sequence and attends with the new token included, within the budget. While the longest sequence
    is at most ``dense_up_to`` tokens (``break_even``), where choosing costs more than it saves, the step attends to all of it and
    chooses nothing (``dense_decode``); the host counts the tokens, so a captured step has two graphs and replays the right one.
    ``out`` is overwritten by the next call.
    """

    def __init__(self, k, v, lengths, budget, *, heads, page_size=64, kind="minmax8", group="max", scale=None, backend="auto"):
        check_tensor("k", k, "B, Hkv, T, D")
        check_page_size(page_size)
        if not isinstance(budget, Budget):
            raise TypeError(f"budget must be a Budget, got {type(budget).__name__}.")
        if budget.local < 1:
            raise ValueError("budget.local must be at least 1: the page of the token that is appended is always read.")
        if kind not in ("minmax8", "minmax"):
            raise ValueError(f"kind must be 'minmax8' or 'minmax', which an append can keep current, got {kind!r}.")
        batch, kv_heads, tokens, dim = k.shape
        self.q = k.new_zeros(batch, heads, dim)
        check_attention(self.q, k, v)
        self.k, self.v = k, v
        self.lengths = check_lengths(lengths, batch, tokens, k.device)
        self.k_new, self.v_new = (k.new_zeros(batch, kv_heads, dim) for _ in range(2))
        self.budget, self.page_size, self.kind, self.group, self.scale = budget, page_size, kind, group, scale
        self.backend = resolve_backend(backend, k)
        self.dense_up_to = min(tokens, break_even(k, budget, page_size, card(k.device)))
        self.workspace = decode_workspace(self.q, k)
        self.after = torch.empty_like(self.lengths)  # the lengths that a step makes, while others still need the old ones
        self.summary, self._graphs = None, {}
        self.set_lengths(self.lengths)

    @property
    def selects(self):
        """Will the next call choose pages?"""
        return self.k.shape[2] - self.room + 1 > self.dense_up_to

    def _summarized(self):
        """(summary, exact kmin and kmax that the next append starts from) of the cache as it is."""
        summary = summarize_pages(self.k, self.page_size, lengths=self.lengths, backend=self.backend)
        exact = summary.kmin, summary.kmax
        if self.kind == "minmax":
            return summary, exact
        coded = PageSummary("minmax8", self.page_size, self.lengths, **quantized(*exact))
        row, newest = torch.arange(len(self.lengths), device=self.k.device), (self.lengths.long() - 1).clamp(min=0) // self.page_size
        return coded, tuple(bound[row, :, newest] for bound in exact)

    def set_lengths(self, lengths):
        """Make lengths [B] the valid tokens of each sequence, shorter or longer than before, and summarise the cache anew."""
        lengths = check_lengths(lengths, len(self.lengths), self.k.shape[2], self.k.device)
        longest = int(lengths.max()) if len(lengths) else 0  # the one time that the host waits for a length
        self.lengths.copy_(lengths)
        summary, exact = self._summarized()
        if self.summary is None:
            self.summary, self.exact = summary, exact
        else:  # a graph knows the arrays by their addresses
            for kept, fresh in zip(self._state()[1:], (*summary.fields.values(), *exact)):
                kept.copy_(fresh)
        self.room = self.k.shape[2] - longest

    def _state(self):
        """What a step changes beside the cache."""
        return [self.lengths, *self.summary.fields.values(), *self.exact]

    def _run(self, selects=None):
        """One step on what q, k_new and v_new hold."""
        selects = self.selects if selects is None else selects
        same = dict(lengths=self.lengths, scale=self.scale, workspace=self.workspace, backend=self.backend)
        if not selects and self.backend == "triton":
            return self._attend_and_append()
        if selects and self.backend == "triton" and self.kind == "minmax8" and self.group in ("max", "sum") and self.q.shape[1] <= PART * self.k.shape[1]:
            pages = self._append_and_select()
            return sparse_decode(self.q, self.k, self.v, pages, page_size=self.page_size, **same)
        if self.backend == "torch":
            _append_torch(self.k_new, self.v_new, self.k, self.v, self.summary, self.exact, self.lengths)
        else:
            arguments, options = self._appending(self.lengths)
            _append_kernel[(len(self.lengths),)](*arguments, **options, BLOCK_D=triton.next_power_of_2(self.k.shape[3]))
        if not selects:
            return dense_decode(self.q, self.k[:, :, : self.dense_up_to], self.v[:, :, : self.dense_up_to], **same)
        scores = page_scores(self.q, self.summary, group=self.group, backend=self.backend)
        pages = select_pages(scores, self.budget, self.lengths, self.page_size, backend=self.backend)
        return sparse_decode(self.q, self.k, self.v, pages, page_size=self.page_size, **same)

    def _appending(self, after):
        """(arguments, options) of an append that writes the new lengths to ``after``."""
        _, kv_heads, tokens, dim = self.k.shape
        fields = self.summary.fields if self.kind == "minmax8" else {}
        arguments = (
            self.k_new, self.v_new, self.k, self.v, *self.exact, *(fields.get(name) for name in ("kmin", "kmax", "scale", "channel")),
            self.lengths, after, *self.k.stride()[:3], *self.v.stride()[:3], tokens, kv_heads, self.summary.kmin.shape[2],
        )  # fmt: skip
        options = dict(KIND=self.kind, PAGE=self.page_size, D=dim, BLOCK_H=triton.next_power_of_2(kv_heads))
        return arguments, options | dict(DEPENDENT=card(self.k.device).dependent_launch)

    def _attend_and_append(self):
        """Attention over everything, the new token included, which is counted and summarised in the launch that merges."""
        k, v = self.k[:, :, : self.dense_up_to], self.v[:, :, : self.dense_up_to]
        scale = check_scale(self.scale, k.shape[3])
        workspace, splits = launch_dense(self.q, k, v, self.lengths, scale, None, self.workspace, self.k_new, self.v_new)
        arguments, options = self._appending(self.lengths)
        batch, heads, dim = self.q.shape
        rows = batch * heads
        programs = batch + (rows if splits > 1 else 0)  # one split has written the result itself
        block_s, merge_d = merge_blocks(splits)
        block_d = triton.next_power_of_2(dim)
        _append_and_merge_kernel[(programs, triton.cdiv(dim, merge_d))](
            *arguments, *workspace.partials(splits), workspace.out, workspace.lse, rows, splits, batch, **options,
            BLOCK_D=block_d, BLOCK_S=block_s, MERGE_D=merge_d, num_warps=merging_warps(options["BLOCK_H"], block_d),
            **(dict(launch_pdl=True) if options["DEPENDENT"] else {}),
        )  # fmt: skip
        return workspace.out

    def _append_and_select(self):
        """Append and score in one launch, select in the next: nobody waits for the append."""
        arguments, options = self._appending(self.after)
        launch, batch = ScoreLaunch(self.q, self.summary, self.group), len(self.lengths)
        blocks, rows, _ = launch.grid
        _append_and_score_kernel[(blocks, batch + rows)](*arguments, *launch.arguments, batch, **options | launch.options)
        pages = empty_list(launch.scores, self.budget)
        # Whoever scored has read the old lengths, so from here on the new ones may take their place.
        launch_select(launch.scores, self.budget, self.after, self.page_size, pages, copy_lengths=self.lengths)
        return pages

    def capture(self):
        """Capture the step in CUDA graphs, which later calls replay; returns self. The cache and its lengths stay as they are."""
        if not self.k.is_cuda:
            raise RuntimeError(f"A CUDA graph needs tensors on a CUDA GPU, and these are on {self.k.device}.")
        kept = [tensor.clone() for tensor in self._state()]
        stream = torch.cuda.Stream()
        for selects in (False, True):
            if selects and self.dense_up_to == self.k.shape[2]:
                continue  # never to be replayed
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(selects)  # compiles what there is to compile; the token that it appends lies past the length again in a moment
                for tensor, before in zip(self._state(), kept):
                    tensor.copy_(before)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self._run(selects)
            self._graphs[selects] = graph, out
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
        selects = self.selects
        self.room -= 1
        if not self._graphs:
            return self._run(selects)
        graph, out = self._graphs[selects]
        graph.replay()
        return out
