"""Refuse bad input with one sentence, before anything is launched."""

import torch

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def shape_of(tensor):
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"


def check_tensor(name, tensor, axes):
    """``tensor`` must be a torch tensor with one dimension for each word of ``axes``, its last one contiguous."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor of shape [{axes}], got {type(tensor).__name__}.")
    if tensor.dim() != len(axes.split(", ")):
        raise ValueError(f"{name} must have shape [{axes}], got {shape_of(tensor)}.")


def check_heads(q, k, k_name="k", *, dtype=None):
    """q [B, Hq, D] and k [B, Hkv, ..., D] must agree in batch, head dim and device, k be of ``dtype`` (default q's), and Hkv divide Hq."""
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32, got {q.dtype}.")
    if k.dtype != (dtype or q.dtype):
        wanted = f"dtype {dtype}" if dtype else f"q's dtype {q.dtype}"
        raise TypeError(f"{k_name} must have {wanted}, got {k.dtype}.")
    if k.device != q.device:
        raise ValueError(f"{k_name} must be on q's device {q.device}, got {k.device}.")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"{k_name} must have q's batch size {q.shape[0]}, got {shape_of(k)}.")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{k_name} must have q's head dim {q.shape[-1]}, got {shape_of(k)}.")
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"The head dim must be one of {HEAD_DIMS}, got {q.shape[-1]}.")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"The number of query heads must be a multiple of the KV heads, got {q.shape[1]} query and {k.shape[1]} KV heads."
        )


def check_attention(q, k, v, table=None):
    """Check q [B, Hq, D] and k, v [B, Hkv, T, D] of an attention call, or k, v [pages, Hkv, P, D] and their page table [B, N]."""
    axes = "B, Hkv, T, D" if table is None else "pages, Hkv, P, D"
    check_tensor("q", q, "B, Hq, D")
    check_tensor("k", k, axes)
    check_tensor("v", v, axes)
    if table is not None:
        _check_table(table, q, k)
    check_heads(q, spanned(k, table))
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {shape_of(k)}, got {shape_of(v)}.")
    if v.dtype != k.dtype:
        raise TypeError(f"v must have k's dtype {k.dtype}, got {v.dtype}.")
    if v.device != k.device:
        raise ValueError(f"v must be on k's device {k.device}, got {v.device}.")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_inner_stride(name, tensor)


def spanned(k, table):
    """k [B, Hkv, T, D] itself, or for a pool of pages a view of the shape that its page table [B, N] makes of it: not the keys, only their sizes."""
    return k if table is None else k[:1, :, :1].expand(table.shape[0], -1, table.shape[1] * k.shape[2], -1)


def _check_table(table, q, k):
    check_tensor("table", table, "B, N")
    if table.dtype != torch.int32 or table.device != k.device:
        raise TypeError(f"table must be int32 on {k.device}, got {table.dtype} on {table.device}.")
    if table.shape[0] != q.shape[0]:
        raise ValueError(f"table must have one row for each of the {q.shape[0]} sequences, got {shape_of(table)}.")
    if not table.is_contiguous():
        raise ValueError(f"table must be contiguous, got strides {table.stride()} for {shape_of(table)}.")
    if k.shape[0] == 0 or k.shape[2] not in PAGE_SIZES:
        raise ValueError(f"With a table k must hold at least one page [Hkv, P, D], with P one of {PAGE_SIZES}, got {shape_of(k)}.")
    if not table.is_cuda and table.numel() and not -1 <= int(table.min()) <= int(table.max()) < k.shape[0]:
        raise ValueError(f"table must hold pages from 0 to {k.shape[0] - 1} (-1 for none), got {int(table.min())} to {int(table.max())}.")


def check_table_covers(table, lengths, page_size):
    """Every token that counts must lie in a page; lengths [B], or None for the whole table. Checked on the CPU, as in ``check_lengths``."""
    if table is None or table.is_cuda:
        return
    held = table.shape[1] if lengths is None else page_count(lengths, page_size)[:, None]
    missing = (table < 0) & (torch.arange(table.shape[1]) < held)
    if missing.any():
        row, page = missing.nonzero()[0].tolist()
        raise ValueError(f"table must name a page for each that lengths count, but has {table[row, page]} for page {page} of sequence {row}.")


def check_inner_stride(name, tensor):
    if tensor.shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension (stride 1), got stride {tensor.stride(-1)}; call .contiguous()."
        )


def check_per_sequence(name, tensor, batch, device):
    """``tensor`` must be [B] int32 on ``device``."""
    check_tensor(name, tensor, "B")
    if tensor.shape[0] != batch:
        raise ValueError(f"{name} must have one entry for each of the {batch} sequences, got {tensor.shape[0]}.")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}.")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}.")


def check_lengths(lengths, batch, tokens, device):
    """Return ``lengths`` as [B] int32 on ``device``, filled with ``tokens`` when None.

    Values are checked on the CPU. On a GPU reading them would stall the stream, so the kernels
    clamp them to [0, tokens] instead and never read past the cache.
    """
    if lengths is None:
        return torch.full((batch,), tokens, dtype=torch.int32, device=device)
    check_per_sequence("lengths", lengths, batch, device)
    if not lengths.is_cuda and batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= tokens:
        raise ValueError(f"lengths must lie between 0 and the cache's {tokens} tokens, got {lengths.tolist()}.")
    return lengths.contiguous()


def check_scale(scale, dim):
    """The softmax scale as a float: ``scale``, or 1 / sqrt(dim) when None."""
    if scale is None:
        return dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {scale!r}.")
    return float(scale)


def check_page_size(page_size):
    if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
        raise ValueError(f"page_size must be one of {PAGE_SIZES}, got {page_size!r}.")


def check_bound_size(bound_size, page_size):
    """``bound_size`` itself, or page_size when None."""
    if bound_size is None:
        return page_size
    if not isinstance(bound_size, int) or bound_size not in (8, *PAGE_SIZES) or bound_size > page_size:
        raise ValueError(f"bound_size must be a power of two from 8 to the page size {page_size}, got {bound_size!r}.")
    return bound_size


def page_count(tokens, page_size):
    """N = ceil(tokens / page_size), for ints and for tensors."""
    return (tokens + page_size - 1) // page_size
