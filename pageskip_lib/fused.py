"""What lies between a layer's matrix products, in one launch each: residual and norm, rotary embedding, gate.

A transformers layer in PyTorch spends about 30 launches on them. For one token each takes as long to start as to run, and all of
them together longer than the weights take to be read. Sums and products are fp32, rounded once to the tensors' dtype.
"""

import torch

from .runtime import tl, triton

GATE_BLOCK = 1024


@triton.jit
def _add_norm_kernel(residual_ptr, x_ptr, weight_ptr, normed_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    dims = tl.arange(0, BLOCK)
    there = dims < size
    hidden = tl.load(residual_ptr + row + dims, mask=there, other=0.0)
    if x_ptr is not None:
        hidden = (hidden.to(tl.float32) + tl.load(x_ptr + row + dims, mask=there, other=0.0).to(tl.float32)).to(hidden.dtype)
        tl.store(residual_ptr + row + dims, hidden, mask=there)
    hidden = hidden.to(tl.float32)
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, axis=0) / size + eps)
    tl.store(normed_ptr + row + dims, normed * tl.load(weight_ptr + dims, mask=there, other=0.0).to(tl.float32), mask=there)


@triton.jit
def _rotate_kernel(
    projected_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, heads, kv_heads, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    there = dims < D // 2
    given = (row * (heads + 2 * kv_heads) + head) * D + dims
    first = tl.load(projected_ptr + given, mask=there, other=0.0).to(tl.float32)
    second = tl.load(projected_ptr + given + D // 2, mask=there, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        angle = row * D + dims
        turned = first * tl.load(cos_ptr + angle, mask=there, other=0.0) - second * tl.load(sin_ptr + angle, mask=there, other=0.0)
        angle += D // 2
        second = second * tl.load(cos_ptr + angle, mask=there, other=0.0) + first * tl.load(sin_ptr + angle, mask=there, other=0.0)
        first = turned
        if head < heads:
            target = q_ptr + (row * heads + head) * D + dims
        else:
            target = k_ptr + (row * kv_heads + head - heads) * D + dims
    else:
        target = v_ptr + (row * kv_heads + head - heads - kv_heads) * D + dims
    tl.store(target, first, mask=there)
    tl.store(target + D // 2, second, mask=there)


@triton.jit
def _gate_kernel(gate_up_ptr, gated_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = dims < size
    gate = tl.load(gate_up_ptr + row * 2 * size + dims, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + dims, mask=there, other=0.0).to(tl.float32)
    tl.store(gated_ptr + row * size + dims, gate * tl.sigmoid(gate) * up, mask=there)


def add_norm(residual, x, weight, eps, backend):
    """Add x to ``residual`` in place (None: nothing to add); returns its RMS norm (Zhang and Sennrich, arXiv 1910.07467) times ``weight``.

    residual, x: [B, H] contiguous. weight: [H]. eps: added to the mean of the squares. backend: "triton" or "torch".
    """
    if backend == "torch":
        if x is not None:
            residual += x
        hidden = residual.float()
        return (weight.float() * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps))).to(residual.dtype)
    normed, size = torch.empty_like(residual), residual.shape[1]
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(len(residual),)](residual, x, weight, normed, size, eps, BLOCK=block, num_warps=max(1, min(8, block // 256)))
    return normed


def rotate(projected, cos, sin, q, k, v, backend):
    """Rotary embedding (Su et al., arXiv 2104.09864; halves, as transformers lays them out), and the heads into q, k and v.

    projected: [B, (Hq + 2 Hkv) D] contiguous, queries, keys and values of one token. cos, sin: [B, D] contiguous, of its position.
    q [B, Hq, D], k and v [B, Hkv, D] contiguous: written. backend: "triton" or "torch".
    """
    (batch, heads, dim), kv_heads = q.shape, k.shape[1]
    if backend == "torch":
        parts = projected.view(batch, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
        for target, part in ((q, parts[0].float()), (k, parts[1].float())):
            first, second = part.chunk(2, dim=-1)
            target.copy_(part * cos[:, None].float() + torch.cat((-second, first), dim=-1) * sin[:, None].float())
        v.copy_(parts[2])
        return
    _rotate_kernel[(batch, heads + 2 * kv_heads)](
        projected, cos, sin, q, k, v, heads, kv_heads, D=dim, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1
    )


def gated(gate_up, backend):
    """SiLU(gate) * up (Shazeer, arXiv 2002.05202) of gate_up [B, 2 F] contiguous, the gate first: [B, F]. backend: "triton" or "torch"."""
    if backend == "torch":
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
    batch, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(batch, size)
    _gate_kernel[(batch, triton.cdiv(size, GATE_BLOCK))](gate_up, out, size, BLOCK=GATE_BLOCK)
    return out
