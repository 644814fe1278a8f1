"""Exact decode attention in two stages: splits over the KV cache, then a log-sum-exp merge.

One query token leaves no parallelism over queries, so stage one makes some: the tiles of a KV head's cache are dealt out to
splits, and one program reads one split for all the query heads that share the KV head. Stage two (merge.py) adds the splits up.
Method: flash-decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

from functools import lru_cache

import torch

from .checks import check_attention, check_lengths, check_scale, check_table_covers, page_count, spanned
from .merge import Workspace, empty_result, workspace_for
from .runtime import card, resolve_backend, tl, triton
from .tiles import LOG2_E, attend_tile, store_partial, valid_length

IN_FLIGHT = 128 * 1024  # bytes on their way into one SM; with half of it an H200 reads a long cache 15% slower
PROGRAM_TILES = 2  # to start a program and to end it costs about what two more tiles would


@triton.jit
def _dense_kernel(
    q_ptr, k_ptr, v_ptr, k_new_ptr, v_new_ptr, lengths_ptr, table_ptr, outs_ptr, lses_ptr,
    q_batch, q_head, k_batch, k_head, k_token, v_batch, v_head, v_token,
    tokens, rows, kv_heads, splits, scale_log2,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # the merge may be set up now; it waits for the end of this kernel
    # Program ids become 64-bit before they meet a stride: 32 sequences of 64k tokens and 8 KV heads reach 2^31 elements.
    split = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64) // kv_heads
    head = tl.program_id(1).to(tl.int64) % kv_heads

    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    live = group < G
    in_head = (dims < D)[None, :]
    heads = head * G + group
    q = tl.load(q_ptr + batch * q_batch + heads[:, None] * q_head + dims[None, :], mask=live[:, None] & in_head, other=0.0)

    length = valid_length(lengths_ptr, batch, tokens)
    if k_new_ptr is not None:
        # Only one program reads the newest token's tile. It puts the token there first, and no other has to wait for that.
        given = (batch * kv_heads + head) * D + dims
        key, value = tl.load(k_new_ptr + given, mask=dims < D, other=0.0), tl.load(v_new_ptr + given, mask=dims < D, other=0.0)
        if (length < tokens) & ((length // TILE) % splits == split):
            at = length.to(tl.int64)
            tl.store(k_ptr + batch * k_batch + head * k_head + at * k_token + dims, key, mask=dims < D)
            tl.store(v_ptr + batch * v_batch + head * v_head + at * v_token + dims, value, mask=dims < D)
            tl.debug_barrier()  # all threads have stored before any of them loads
        length = tl.minimum(length + 1, tokens)

    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if table_ptr is not None:  # fetched one tile ahead of its use, as the page numbers are in sparse.py
        table_ptr += batch * (tokens // PAGE)
        token = split * TILE + tl.arange(0, TILE)
        page = tl.load(table_ptr + token // PAGE, mask=token < tokens, other=-1)
    # Dealt out like cards: shares differ by one tile at most, and programs that run together read neighbouring memory.
    for tile in range(split, tl.cdiv(length, TILE), splits):
        token = tile * TILE + tl.arange(0, TILE)
        valid = token < length
        if table_ptr is None:
            part, at = batch, token.to(tl.int64)[:, None]
        else:
            valid = valid & (page >= 0)
            part, at = page.to(tl.int64)[:, None], (token % PAGE).to(tl.int64)[:, None]
            token_ahead = token + splits * TILE
            page = tl.load(table_ptr + token_ahead // PAGE, mask=token_ahead < tokens, other=-1)
        keys = tl.load(k_ptr + part * k_batch + head * k_head + at * k_token + dims[None, :], mask=valid[:, None] & in_head, other=0.0)
        values = tl.load(v_ptr + part * v_batch + head * v_head + at * v_token + dims[None, :], mask=valid[:, None] & in_head, other=0.0)
        row_max, row_sum, acc = attend_tile(q, keys, values, valid, scale_log2, row_max, row_sum, acc)

    out_rows = split.to(tl.int64) * rows + batch * kv_heads * G + heads
    store_partial(outs_ptr, lses_ptr, out_rows, dims, live, row_max, row_sum, acc, D)


def programs_of(rows, sms, per_sm):
    """How many programs an SM may run: from the fewest that keep it busy to three more, since of many more the last would run alone."""
    fewest = max(per_sm, -(-rows // sms))
    return range(fewest, fewest + 4)


@lru_cache
def choose_splits(rows, tokens, sms, per_sm, tile):
    """How many splits each of ``rows`` = B * Hkv caches is dealt out to, so that every SM runs nearly the same number of programs.

    tokens: the cache's capacity, not its length, since a captured graph keeps the grid. per_sm: the fewest programs that keep enough
    bytes in flight into an SM. The choice is the one whose busiest SM is done first, by a count of its tiles; none is left without one.
    """
    tiles = -(-tokens // tile)

    def cost(splits):
        programs = -(-rows * splits // sms)  # on the busiest SM; with fewer than per_sm it waits for memory and is done no sooner
        return max(programs, per_sm) * (PROGRAM_TILES + -(-tiles // splits))

    filling = [max(1, min(tiles, programs * sms // rows)) for programs in programs_of(rows, sms, per_sm)]
    return min([1, *filling], key=cost)  # of equals the first: fewer splits, fewer partial results


def check_splits(splits):
    if splits is not None and (type(splits) is not int or not 1 <= splits <= 4096):
        raise ValueError(f"splits must be an int from 1 to 4096, got {splits!r}.")


def launch_shape(q, k, card, tokens):
    """Compile-time sizes and launch options of both attention kernels for q [B, Hq, D], k [B, Hkv, T, D] and a ``Card``.

    tokens: how many are to be read, or None where the caller fixes the splits: then a row's tiles do not depend on its neighbours.
    """
    rows, group, dim = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    # tl.dot needs at least 16 rows, and powers of two; padding heads are masked on load and on store.
    block_g, block_d = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(dim)
    token_bytes = 2 * block_d * k.element_size()

    def room(tile):  # beside q, the weights and the compiler's own needs
        return card.shared_bytes - block_g * (block_d + max(block_d, tile + 1)) * k.element_size() - 2048

    # The widest tile of which two fit on their way in. With more rows than SMs a half of it, so that two programs can share an SM.
    widest = 128 if rows <= card.sms else 64
    # Nor so wide that most SMs get no tile at all: a few tokens are read sooner by many programs.
    if tokens is not None:
        widest = max(32, min(widest, 3 * rows * tokens // card.sms))
    tile = next((tile for tile in (128, 64, 32) if tile <= widest and 2 * tile * token_bytes <= room(tile)), 16)
    return dict(
        G=group, D=dim, BLOCK_G=block_g, BLOCK_D=block_d, TILE=tile, DEPENDENT=card.dependent_launch,
        num_warps=4 if block_g <= 32 and block_g * block_d <= 8192 else 8,
        num_stages=max(1, min(3, 1 + room(tile) // (tile * token_bytes))),
    )  # fmt: skip


def wanted_programs(k, card, shape):
    """The fewest programs of this ``launch_shape`` that keep enough bytes in flight into an SM, as far as they fit."""
    in_flight = max(1, shape["num_stages"] - 1) * shape["TILE"] * 2 * shape["BLOCK_D"] * k.element_size()
    resident = max(1, card.shared_bytes // (in_flight + 4096))
    return min(resident, -(-IN_FLIGHT // in_flight))


def splits_for(k, card, shape, tokens):
    """The splits of a launch with this ``launch_shape`` over ``tokens`` tokens of each KV head."""
    return choose_splits(max(1, k.shape[0] * k.shape[1]), tokens, card.sms, wanted_programs(k, card, shape), shape["TILE"])


def attend_prefix(q, k, v, scale):
    """PyTorch path of one sequence: q [Hq, D] over all of k, v [Hkv, n, D], n >= 1; fp32 out [Hq, D] and lse [Hq]."""
    kv_heads, _, dim = k.shape
    grouped = q.float().view(kv_heads, -1, dim) * scale
    scores = grouped @ k.float().transpose(1, 2)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse[..., None]) @ v.float()
    return out.reshape(-1, dim), lse.reshape(-1)


def prefix(k, row, length, table=None):
    """The first ``length`` keys (or values) of a sequence, [Hkv, length, D]: a view, or with a page table a copy out of the pool."""
    if table is None:
        return k[row, :, :length]
    return k[table[row, : page_count(length, k.shape[2])].long()].transpose(0, 1).flatten(1, 2)[:, :length]


def decode_workspace(q, k, *, table=None):
    """A ``Workspace`` for ``dense_decode`` and ``sparse_decode`` calls with tensors shaped like q [B, Hq, D], k [B, Hkv, T, D] or its table."""
    k = spanned(k, table)
    this_card, rows, tokens = card(q.device), max(1, k.shape[0] * k.shape[1]), max(1, k.shape[2])
    # Calls that read a part of the cache or a page list may narrow the tile, and so split further than a call that reads everything.
    shapes = [launch_shape(q, k, this_card, tokens >> halvings) for halvings in range(tokens.bit_length())]
    programs = [programs_of(rows, this_card.sms, wanted_programs(k, this_card, shape))[-1] for shape in shapes]
    return Workspace(q, max(1, *(min(-(-tokens // shape["TILE"]), most * this_card.sms // rows) for shape, most in zip(shapes, programs))))


def launch_dense(q, k, v, lengths, scale, splits, workspace, k_new=None, v_new=None, table=None):
    """Stage one. Returns (workspace, splits) for stage two.

    k_new, v_new: contiguous [B, Hkv, D], one more token of each sequence, which lengths do not count yet. It is written into the cache.
    """
    sizes, this_card = spanned(k, table), card(q.device)
    batch, kv_heads, tokens, _ = sizes.shape
    shape = launch_shape(q, sizes, this_card, None if splits else tokens)
    splits = splits or splits_for(sizes, this_card, shape, tokens)
    workspace = workspace_for(q, splits, workspace)
    _dense_kernel[(splits, batch * kv_heads)](
        q, k, v, k_new, v_new, lengths, table, *workspace.partials(splits),
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3],
        tokens, batch * q.shape[1], kv_heads, splits, scale * LOG2_E, PAGE=None if table is None else k.shape[2], **shape,
    )  # fmt: skip
    return workspace, splits


def dense_decode(q, k, v, *, lengths=None, table=None, scale=None, splits=None, workspace=None, backend="auto", return_lse=False):
    """Exact attention of one query token per sequence over its whole KV cache.

    q: [B, Hq, D]. k, v: [B, Hkv, T, D]. Any outer strides (a [B, T, Hkv, D] cache goes in as a transposed view), last
    dimension contiguous. All three in one dtype (fp16, bf16 or fp32) on one device; Hkv divides Hq; D in 64, 80, 96,
    128, 192, 256. lengths: [B] int32 on that device, the valid tokens of each sequence (default T); what lies
    past a length is never read into the result, NaN included. scale: of the scores, default D ** -0.5.
    table: [B, N] int32 on that device makes k, v a pool of pages, [pages, Hkv, P, D] with P = 16, 32, 64 or 128: page n of sequence b is
    page table[b, n] of the pool (-1 for none), T is N * P, and the result that of k, v with the pages in order, bit for bit.
    splits: parts that the cache is dealt out to (default from the shape and the card). workspace: from ``decode_workspace``; the call then
    allocates nothing, and what it returns is overwritten by the next call with it. The PyTorch backend ignores both.

    Returns out [B, Hq, D] in q's dtype, and with ``return_lse`` also lse [B, Hq] fp32, natural log. A sequence of
    length 0 gives out 0 and lse -inf. Sums and partial results are fp32.
    Raises ValueError or TypeError for input that does not fit, RuntimeError where the backend cannot run.
    """
    check_attention(q, k, v, table)
    check_splits(splits)
    batch, _, tokens, dim = spanned(k, table).shape
    if lengths is not None:
        lengths = check_lengths(lengths, batch, tokens, q.device)
    check_table_covers(table, lengths, k.shape[2])
    scale = check_scale(scale, dim)
    backend = resolve_backend(backend, q)
    if not (batch and tokens):
        out, lse = empty_result(q)
    elif backend == "torch":
        out, lse = empty_result(q)
        for row, length in enumerate([tokens] * batch if lengths is None else lengths.tolist()):
            if length > 0:
                out[row], lse[row] = attend_prefix(q[row], prefix(k, row, length, table), prefix(v, row, length, table), scale)
    else:
        workspace, splits = launch_dense(q, k, v, lengths, scale, splits, workspace, table=table)
        out, lse = workspace.merge(splits)
    return (out, lse) if return_lse else out
