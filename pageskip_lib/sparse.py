"""Attention over a page list: the twin of dense.py, which walks listed pages instead of all tokens."""

import torch

from .checks import check_attention, check_lengths, check_page_size, check_scale, check_table_covers, check_tensor, page_count, shape_of, spanned
from .dense import attend_prefix, launch_shape, prefix, splits_for
from .merge import empty_result, workspace_for
from .runtime import card, resolve_backend, tl, triton
from .selection import PageList
from .tiles import LOG2_E, attend_tile, store_partial, valid_length


@triton.jit
def _sparse_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, pages_ptr, counts_ptr, outs_ptr, lses_ptr,
    q_batch, q_head, k_batch, k_head, k_token, v_batch, v_head, v_token,
    tokens, rows, kv_heads, splits, capacity, scale_log2,
    PAGE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
    pages_ptr += (batch * kv_heads + head) * capacity
    count = tl.minimum(tl.load(counts_ptr + batch * kv_heads + head), capacity)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    # Page numbers come one tile ahead of their use: keys whose address waits for a load of the same turn are not loaded ahead.
    # Nor does a page number wait for the count.
    entry = (split * TILE + tl.arange(0, TILE)) // PAGE
    page = tl.load(pages_ptr + entry, mask=entry < capacity, other=-1)
    if table_ptr is not None:
        table_ptr += batch * (tokens // PAGE)
        home = tl.load(table_ptr + page, mask=(page >= 0) & (page * PAGE < length), other=-1)
    for tile in range(split, tl.cdiv(count * PAGE, TILE), splits):
        token = page * PAGE + (tile * TILE + tl.arange(0, TILE)) % PAGE
        valid = (entry < count) & (page >= 0) & (token < length)
        entry = ((tile + splits) * TILE + tl.arange(0, TILE)) // PAGE
        page = tl.load(pages_ptr + entry, mask=entry < capacity, other=-1)
        if table_ptr is None:
            part, at = batch, token.to(tl.int64)[:, None]
        else:
            valid = valid & (home >= 0)
            part, at = home.to(tl.int64)[:, None], (token % PAGE).to(tl.int64)[:, None]
            home = tl.load(table_ptr + page, mask=(page >= 0) & (page * PAGE < length), other=-1)
        keys = tl.load(k_ptr + part * k_batch + head * k_head + at * k_token + dims[None, :], mask=valid[:, None] & in_head, other=0.0)
        values = tl.load(v_ptr + part * v_batch + head * v_head + at * v_token + dims[None, :], mask=valid[:, None] & in_head, other=0.0)
        row_max, row_sum, acc = attend_tile(q, keys, values, valid, scale_log2, row_max, row_sum, acc)

    out_rows = split.to(tl.int64) * rows + batch * kv_heads * G + heads
    store_partial(outs_ptr, lses_ptr, out_rows, dims, live, row_max, row_sum, acc, D)


def _attend_listed(q, k, v, pages, page_size, length, scale, row, table):
    """PyTorch path of sequence ``row`` with q [Hq, D]: gather the tokens of ``pages`` [Hkv, K] out of k, v, then attend.

    Returns fp32 out [Hq, D] and lse [Hq]. Only listed tokens are read; a head without any gives 0 and -inf.
    """
    kv_heads, dim = k.shape[1], k.shape[3]
    start = pages.long().masked_fill(pages < 0, page_count(length, page_size)) * page_size  # no page: one past the end
    token = (start[:, :, None] + torch.arange(page_size, device=k.device)).flatten(1)
    missing = (token >= length)[:, None]
    token.clamp_(max=length - 1)

    def listed(x, head):
        if table is None:
            return x[row, head].index_select(0, token[head]).float()
        return x[table[row, token[head] // page_size], head, token[head] % page_size].float()

    # Head by head: on a CPU the copies of one head's tokens stay in the cache, and their memory is there for the next head.
    grouped = q.float().view(kv_heads, -1, dim) * scale
    scores = torch.stack([grouped[head] @ listed(k, head).T for head in range(kv_heads)]).masked_fill_(missing, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return torch.cat([weights[head] @ listed(v, head) for head in range(kv_heads)]), lse.reshape(-1)


def _listed(pages, row):
    """The entries of one sequence that count: [Hkv, longest list], -1 for none."""
    counts = pages.counts[row]
    slots = torch.arange(int(counts.max()), device=counts.device)
    return pages.pages[row, :, : len(slots)].masked_fill(slots >= counts[:, None], -1)


def _lists_everything(listed, pages_held):
    """Does every head list pages 0 to pages_held - 1?"""
    in_order = torch.arange(pages_held, dtype=listed.dtype, device=listed.device)
    return listed.shape[1] >= pages_held and bool((listed[:, :pages_held] == in_order).all())


def _check_pages(pages, k, page_size):
    if not isinstance(pages, PageList):
        raise TypeError(f"pages must be a PageList, got {type(pages).__name__}.")
    for name, tensor, axes in (("pages.pages", pages.pages, "B, Hkv, K"), ("pages.counts", pages.counts, "B, Hkv")):
        check_tensor(name, tensor, axes)
        if tensor.dtype != torch.int32 or tensor.device != k.device:
            raise TypeError(f"{name} must be int32 on {k.device}, got {tensor.dtype} on {tensor.device}.")
        if tensor.shape[:2] != k.shape[:2]:
            raise ValueError(f"{name} must start with k's B, Hkv = {tuple(k.shape[:2])}, got {shape_of(tensor)}.")
    if not k.is_cuda and pages.counts.numel():
        capacity = pages.pages.shape[2]
        fewest, most = (int(count) for count in pages.counts.aminmax())
        if not 0 <= fewest <= most <= capacity:
            raise ValueError(f"pages.counts must lie between 0 and the list's {capacity} columns, got {pages.counts.tolist()}.")
    if not k.is_cuda and pages.pages.numel():
        (lowest, highest), pages_in_cache = (int(page) for page in pages.pages.aminmax()), page_count(k.shape[2], page_size)
        if lowest < -1 or highest >= pages_in_cache:
            raise ValueError(
                f"pages.pages must hold page numbers from 0 to {pages_in_cache - 1} (-1 for none), got {lowest} to {highest}."
            )


def sparse_decode(q, k, v, pages, *, page_size, lengths=None, table=None, scale=None, workspace=None, backend="auto", return_lse=False):
    """Exact attention of one query token per sequence over the listed pages only.

    q, k, v, lengths, table, scale, workspace, backend, the results and the errors as in ``dense_decode``. pages: a ``PageList`` as
    ``select_pages`` makes it, .pages [B, Hkv, K] int32 ascending page numbers with -1 for none, .counts [B, Hkv] int32, the
    leading entries to walk. page_size: tokens of a page, 16, 32, 64 or 128; with a table, of its pages. Page p of a sequence holds its
    tokens p * page_size and on, wherever a table says that they lie.

    The query heads of a KV head share its list and so its bytes. When every page is listed, in a list with room for the whole cache, the
    result equals ``dense_decode`` with its default splits bit for bit (one tile order). An empty list gives out 0 and lse -inf.
    """
    check_attention(q, k, v, table)
    check_page_size(page_size)
    if table is not None and k.shape[2] != page_size:
        raise ValueError(f"page_size must be the {k.shape[2]} tokens of the table's pages, got {page_size}.")
    sizes = spanned(k, table)
    _check_pages(pages, sizes, page_size)
    batch, kv_heads, tokens, dim = sizes.shape
    if lengths is not None:
        lengths = check_lengths(lengths, batch, tokens, q.device)
    check_table_covers(table, lengths, page_size)
    scale = check_scale(scale, dim)
    backend = resolve_backend(backend, q)
    capacity = pages.pages.shape[2]
    if not (batch and tokens and capacity):
        out, lse = empty_result(q)
    elif backend == "torch":
        out, lse = empty_result(q)
        for row, length in enumerate([tokens] * batch if lengths is None else lengths.tolist()):
            if length > 0:
                listed = _listed(pages, row)
                if _lists_everything(listed, page_count(length, page_size)):  # nothing to gather
                    out[row], lse[row] = attend_prefix(q[row], prefix(k, row, length, table), prefix(v, row, length, table), scale)
                else:
                    out[row], lse[row] = _attend_listed(q[row], k, v, listed, page_size, length, scale, row, table)
    else:
        page_numbers = pages.pages.contiguous()
        this_card = card(q.device)
        most = min(capacity * page_size, tokens)
        shape = launch_shape(q, sizes, this_card, most)
        splits = splits_for(sizes, this_card, shape, most)
        workspace = workspace_for(q, splits, workspace)
        _sparse_kernel[(splits, batch * kv_heads)](
            q, k, v, lengths, table, page_numbers, pages.counts.contiguous(), *workspace.partials(splits),
            q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3],
            tokens, batch * q.shape[1], kv_heads, splits, capacity, scale * LOG2_E,
            PAGE=page_size, **shape, **(dict(launch_pdl=True) if shape["DEPENDENT"] else {}),
        )  # fmt: skip
        out, lse = workspace.merge(splits)
    return (out, lse) if return_lse else out
