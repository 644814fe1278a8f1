"""Compile both attention kernels for cards that are not here, and print what each launch needs; run by test_compile.py.

Compiling for a target needs no GPU, but the kernels must not be interpreted: so this runs in a process of its own, which
pretends to have a GPU while pageskip_lib is imported.
"""

import json

import torch

real = torch.cuda.is_available
torch.cuda.is_available = lambda: True
from pageskip_lib import dense, runtime, sparse  # noqa: E402

torch.cuda.is_available = real

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

POINTERS = {torch.float16: "*fp16", torch.float32: "*fp32"}
STRIDES = {f"{name}_{axis}" for name in "qkv" for axis in ("batch", "head", "token")}
# compute capability, shared memory of one program in KB, dependent launch: RTX 30, RTX 40, H100 and H200, RTX 50
CARDS = [(86, 99, False), (89, 99, False), (90, 227, True), (120, 99, True)]
SHAPES = [(torch.float16, 128, 6), (torch.float16, 256, 24), (torch.float32, 256, 4)]


def compiled(kernel, shape, dtype, capability):
    options = {name: shape.pop(name) for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in shape or name == "PAGE":
            signature[name], constants[(i,)] = "constexpr", shape.get(name, 16)
        elif name in ("lengths_ptr", "pages_ptr", "counts_ptr"):
            signature[name] = "*i32"
        elif name in ("outs_ptr", "lses_ptr"):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS[dtype]
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
        if name in STRIDES or signature[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", 16]]  # as for any contiguous cache: loads of 16 bytes
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


for capability, kilobytes, dependent in CARDS:
    card = runtime.Card("", sms=100, l2_bytes=0, shared_bytes=kilobytes * 1024, dependent_launch=dependent)
    for dtype, dim, group in SHAPES:
        for kernel in (dense._dense_kernel, sparse._sparse_kernel):
            shape = dense.launch_shape(torch.empty(1, group, dim, dtype=dtype), torch.empty(1, 1, 64, dim, dtype=dtype), card)
            result = compiled(kernel, dict(shape), dtype, capability)
            found = dict(kernel=kernel.fn.__name__, capability=capability, dtype=str(dtype), dim=dim, tile=shape["TILE"])
            print(json.dumps(found | dict(stages=shape["num_stages"], shared=result.metadata.shared, room=card.shared_bytes)), flush=True)
