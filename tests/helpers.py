"""What the kernel tests share: makers of inputs, guarded scratch, and error bounds derived from the dtype."""

import math
from contextlib import contextmanager

import pytest
import torch

from pageskip_lib import Workspace, reference, runtime

BACKENDS = ("torch", "triton")


def dtypes_for(backend):
    """The dtypes that a backend takes on this machine: Triton's interpreter refuses bf16, compiled kernels do not."""
    if backend == "triton" and not torch.cuda.is_available():
        return (torch.float16, torch.float32)
    return (torch.float16, torch.bfloat16, torch.float32)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def backend_params():
    """One pytest parameter for each backend; Triton's is skipped where Triton cannot run at all."""
    problem = runtime.kernel_problem(runtime.default_device())
    skip = pytest.mark.skipif(problem is not None, reason=str(problem))
    return [pytest.param(backend, marks=skip if backend == "triton" else ()) for backend in BACKENDS]


def backend_and_dtype_params():
    """Every (backend, dtype) that this machine can run."""
    return [
        pytest.param(*param.values, dtype, marks=param.marks, id=f"{param.values[0]}-{name_of(dtype)}")
        for param in backend_params()
        for dtype in dtypes_for(param.values[0])
    ]


each_backend = pytest.mark.parametrize("backend", backend_params())
each_backend_and_dtype = pytest.mark.parametrize("backend, dtype", backend_and_dtype_params())


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    """Normal numbers that are the same on every device: drawn on the CPU in fp32, then converted."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def make_qkv(batch, heads, kv_heads, tokens, dim, *, dtype=torch.float32, device="cpu", seed=0):
    q = randn(batch, heads, dim, seed=seed, dtype=dtype, device=device)
    k, v = (randn(batch, kv_heads, tokens, dim, seed=seed + n, dtype=dtype, device=device) for n in (1, 2))
    return q, k, v


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def unit_roundoff(dtype):
    """Half the gap between 1 and the next number: 2^-24 for fp32, 2^-11 for fp16, 2^-8 for bf16."""
    return torch.finfo(dtype).eps / 2


def dot_error(dim, q, k):
    """Error of one fp32 dot product: dim roundings of at most |q||k| 2^-24 each, that add up like a random walk.

    Four standard deviations of that walk, since tests take the worst of thousands of products.
    """
    longest = float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()) if q.numel() and k.numel() else 0.0
    return 4 * math.sqrt(dim) * 2**-24 * longest


def attention_errors(q, k, v, scale):
    """(error of out, error of lse) that rounding alone explains, for finite inputs.

    Scores carry the error of their dot product, weights twice that (their own, and the sum they are divided by); sums over
    n tokens add sqrt(n) roundings of 2^-24; fp16 and bf16 round the weights before the product with v (fp16 also flushes
    those below 2^-24, 2^-25 each), and the result once more.
    """
    tokens, dim = k.shape[2], q.shape[-1]
    score = dot_error(dim, q, k) * abs(scale) + 2**-20  # 2^-20: exp2 and log2 on their own, some ulps of numbers near 10
    total = math.sqrt(tokens) * 2**-24
    roundoff = unit_roundoff(q.dtype)
    relative = 2 * score + 2 * total + 2 * roundoff + (tokens * 2**-25 if q.dtype == torch.float16 else 0.0)
    return relative * float(v.abs().max()), score + total


def assert_is_attention(result, q, k, v, *, lengths=None, scale=None, pages=None, page_size=None):
    """``result`` = (out, lse) must be attention of q over k, v (or its listed pages) as ``reference.attention`` defines it."""
    out, lse = result
    assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
    assert lse.shape == q.shape[:2] and lse.dtype == torch.float32 and lse.device == q.device
    true_out, true_lse = reference.attention(q, k, v, lengths=lengths, scale=scale, pages=pages, page_size=page_size)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    valid_k, valid_v = (x.cpu().nan_to_num(0.0, 0.0, 0.0) for x in (k, v))
    out_error, lse_error = attention_errors(q.cpu(), valid_k, valid_v, scale)
    torch.testing.assert_close(out.cpu().double(), true_out, rtol=0, atol=out_error)
    torch.testing.assert_close(lse.cpu().double(), true_lse, rtol=2**-22, atol=lse_error)  # fp32 holds lse, 2^-23 relative


def same_bits(a, b):
    """Equal shape, dtype and values, -0.0 counting as 0.0; NaN is never equal, so it fails too."""
    return a.dtype == b.dtype and torch.equal(a, b)


def poisoned_workspace(q, splits, value):
    """A ``Workspace`` whose scratch holds ``value`` wherever the kernel writes nothing."""
    workspace = Workspace(q, splits)
    workspace.outs.fill_(value)
    workspace.lses.fill_(value)
    return workspace


class Guarded:
    """Makes contiguous tensors that lie between guard bands, and tells later whether anything wrote into the bands."""

    CANARY = 12345.0
    BAND = 64 * 256  # elements on either side: more rows than the widest padded group

    def __init__(self):
        self._buffers = []

    def make(self, shape, dtype, device):
        size = math.prod(shape)
        buffer = torch.full((size + 2 * self.BAND,), self.CANARY, dtype=dtype, device=device)
        self._buffers.append(buffer)
        return buffer[self.BAND : self.BAND + size].view(shape)

    def workspace(self, q, splits):
        workspace = Workspace(q, splits)
        for name in ("outs", "lses", "out", "lse"):
            tensor = getattr(workspace, name)
            setattr(workspace, name, self.make(tensor.shape, tensor.dtype, tensor.device))
        return workspace

    def empty_result(self, q):
        out, lse = self.make(q.shape, q.dtype, q.device), self.make(q.shape[:2], torch.float32, q.device)
        return out.zero_(), lse.fill_(float("-inf"))

    def intact(self):
        assert self._buffers, "nothing was made, so nothing was guarded"
        bands = [band for buffer in self._buffers for band in (buffer[: self.BAND], buffer[-self.BAND :])]
        canary = [torch.full_like(band, self.CANARY) for band in bands]  # in the band's dtype: bf16 rounds 12345
        return all(torch.equal(band, expected) for band, expected in zip(bands, canary))


def far_apart(x, axis, tmp_path):
    """The same values as x, in memory so that entries along ``axis`` lie so far apart that offsets pass 2^31 elements.

    With 3 entries or more the stride itself stays below 2^31, so that the kernel gets it as a 32-bit integer.
    On the CPU the memory is a file with holes, which takes next to no room.
    """
    strides = list(x.contiguous().stride())
    strides[axis] = -(-(2**31 + 4096) // (x.shape[axis] - 1))
    size = sum((n - 1) * stride for n, stride in zip(x.shape, strides)) + 1
    if x.is_cuda:
        if torch.cuda.mem_get_info()[0] < 2 * size * x.element_size():
            pytest.skip("needs more free GPU memory")
        buffer = torch.zeros(size, dtype=x.dtype, device=x.device)
    else:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
        buffer = torch.from_file(str(file), shared=True, size=size, dtype=x.dtype)
    return buffer.as_strided(x.shape, strides).copy_(x)


@contextmanager
def waiting_fails():
    """Inside, PyTorch raises wherever the host would wait for the GPU."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Unlaunchable:
    """Takes the place of a kernel: launching it fails the test."""

    def __getitem__(self, grid):
        raise AssertionError(f"a kernel was launched, on grid {grid}")
