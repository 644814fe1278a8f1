"""Everything that computes exact decode attention on this machine: ours, PyTorch's, and the libraries that can be imported here.

Each arm gets the cache in the layout it prefers, and whatever it does once for a shape (plans, compilation, the choice of a number of
splits) happens before anything is timed.
"""

import importlib
import warnings
from dataclasses import dataclass
from typing import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dense import decode_workspace, dense_decode
from .timing import time_arms

PAGE = 64  # of FlashInfer's paged cache
OURS = "pageskip dense"
LIBRARIES = {"FlashInfer": "flashinfer", "FA3": "flash_attn_interface"}


@dataclass(frozen=True)
class Arm:
    """One way to compute decode attention.

    calls: takes [(q [B, Hq, D], k, v [B, Hkv, T, D]), ...], all of one shape, and returns a zero-argument call for each, which
    returns [B, Hq, D]. tokens_first: it wants k and v stored as [B, T, Hkv, D] (it gets them as transposed views).
    """

    name: str
    calls: Callable
    tokens_first: bool = False


def sdpa(q, k, v, backend):
    """PyTorch's scaled_dot_product_attention with the group packed, pinned to one backend."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def _pageskip(sets):
    workspaces = [decode_workspace(q, k) for q, k, _ in sets]
    return [lambda q=q, k=k, v=v, w=w: dense_decode(q, k, v, workspace=w) for (q, k, v), w in zip(sets, workspaces)]


def each(function):
    """``Arm.calls`` of a function of (q, k, v) that needs no preparation."""
    return lambda sets: [lambda q=q, k=k, v=v: function(q, k, v) for q, k, v in sets]


def _pinned(backend):
    return each(lambda q, k, v: sdpa(q, k, v, backend))


def _refused(backend, device, dtype):
    """Does PyTorch refuse this backend of SDPA here, as it does cuDNN's where the card or the build has none?"""
    q, kv = torch.zeros(1, 2, 64, device=device, dtype=dtype), torch.zeros(1, 2, 64, 64, device=device, dtype=dtype)
    try:
        sdpa(q, kv, kv, backend)
    except RuntimeError:
        return True
    return False


def _flex(sets):
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # one compiled function for a shape, never a generic one for several
    compiled = torch.compile(flex_attention, dynamic=False)
    return [lambda q=q, k=k, v=v: compiled(q[:, :, None], k, v, enable_gqa=True)[:, :, 0] for q, k, v in sets]


def flashinfer_over(pages, sets, scratch):
    """Calls of FlashInfer's paged decode that read the listed pages and no others.

    pages: [B, K] int32 page numbers (of PAGE tokens) of each sequence, read by all of its KV heads, in any order but for one thing:
    where the cache's last page is listed, it comes last, since FlashInfer lets only that one be partly filled.
    sets: as ``Arm.calls`` takes them, stored tokens first. scratch: bytes of FlashInfer's workspace.
    """
    import flashinfer

    q, k, _ = sets[0]
    batch, kv_heads, tokens, dim = k.shape
    held = -(-tokens // PAGE)
    row = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(scratch, dtype=torch.uint8, device=q.device), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        row * pages.shape[1],
        (pages + row[:-1, None] * held).flatten(),
        (tokens - pages[:, -1] * PAGE).clamp(max=PAGE),
        q.shape[1], kv_heads, dim, PAGE, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip

    def paged(x):
        if tokens % PAGE:
            x = torch.nn.functional.pad(x, (0, 0, 0, held * PAGE - tokens))
        return x.transpose(1, 2).reshape(batch * held, PAGE, kv_heads, dim)

    return [lambda q=q, kv=(paged(k), paged(v)): wrapper.run(q, kv) for q, k, v in sets]


def shuffled_pages(batch, tokens, device):
    """[B, N] int32: every page of each sequence in random order, the last one last. A table in order is one that a kernel may ignore."""
    last = -(-tokens // PAGE) - 1
    generator = torch.Generator().manual_seed(0)
    rows = [[*torch.randperm(last, generator=generator).tolist(), last] for _ in range(batch)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _flashinfer(sets):
    q, k, _ = sets[0]
    return flashinfer_over(shuffled_pages(k.shape[0], k.shape[2], q.device), sets, scratch=256 << 20)


def _fa3(sets):
    import flash_attn_interface

    def calls(splits, sets):
        return [
            lambda q=q, k=k.transpose(1, 2), v=v.transpose(1, 2): flash_attn_interface.flash_attn_with_kvcache(
                q[:, None], k, v, num_splits=splits
            )[:, 0]
            for q, k, v in sets
        ]

    # 0 is its own heuristic; where another number of splits is faster, that one is the peer to beat.
    tried = time_arms({splits: calls(splits, sets) for splits in (0, 1, 2, 4, 8, 16, 32)}, repeats=3, seconds_each=0.001)
    return calls(min(tried, key=lambda splits: tried[splits].median), sets)


def versions():
    """Which releases of the peers that are not part of PyTorch's own version number would run here."""
    found = {"cuDNN": torch.backends.cudnn.version()}
    for name, module in LIBRARIES.items():
        try:
            found[name] = getattr(importlib.import_module(module), "__version__", "unknown")
        except Exception:  # not installed, or broken: then arms() leaves it out as well
            continue
    return found


def arms(device, dtype):
    """The ``Arm`` list for a device ("cuda" or "cpu") and dtype; a library that is not installed is left out, and cuDNN where PyTorch refuses it."""
    found = [Arm(OURS, _pageskip)]
    if device == "cpu":
        return [*found, Arm("SDPA", _pinned(SDPBackend.FLASH_ATTENTION))]
    found.append(Arm("SDPA flash", _pinned(SDPBackend.FLASH_ATTENTION)))
    if not _refused(SDPBackend.CUDNN_ATTENTION, device, dtype):
        found.append(Arm("SDPA cuDNN", _pinned(SDPBackend.CUDNN_ATTENTION)))
    if dtype == torch.float16:  # it compiles for seconds at every shape; one dtype shows its place
        found.append(Arm("FlexAttention", _flex))
    for name, calls in (("FlashInfer", _flashinfer), ("FA3", _fa3)):
        try:
            importlib.import_module(LIBRARIES[name])
        except ImportError:
            continue
        except Exception as error:  # installed but broken: say so, and measure the others
            warnings.warn(f"{name} cannot be used here: {type(error).__name__}: {error}", stacklevel=2)
            continue
        found.append(Arm(name, calls, tokens_first=True))
    return found
