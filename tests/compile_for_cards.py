"""Compile every launch for cards that are not here, and list what each one needs.

    python tests/compile_for_cards.py                    a table of the launches that test_compile.py checks
    python tests/compile_for_cards.py --all              every dtype, head dim, group padding and page size: hours on two cores
    python tests/compile_for_cards.py --target sm_89     of one target only; may be repeated
    python tests/compile_for_cards.py --json             one JSON object a line instead of a table

Compiling for a target needs no GPU, only the compilers inside Triton's package: ptxas for NVIDIA, LLVM and its linker for AMD,
where the result goes as far as the loadable hsaco. But the kernels must not be interpreted, so this is a process of its own,
which pretends to have a GPU while pageskip_lib is imported.

What a launch compiles to follows from the kernel, its constants (all of ``launch_shape``, and the page size), its options, the
dtypes and the target. ``launch_shape`` reads of a card its shared memory, whether it launches dependents early, and whether it
has at least as many SMs as there are rows; so cards that agree in the first two and in the target are one, once with few rows and
once with many: an RTX 4060 is an RTX 4090 here, and equal launches are compiled once. Caches are taken as laid out in multiples
of 16 elements, lengths and row budgets as given, splits as more than one, rows to select from as ROW_PAGES wide. Scores and
summaries are launched on tensors without memory, and what they hand to their kernels is noted down. What is left out
without ``--all``: bf16, which is as wide as fp16; all but one D and one G of those that are padded to the same power of two (the
ones taken have padding to mask); many rows for the sparse kernel and for fp32, where the tile is no wider than with few; the
sparse kernel in fp32 with more than 32 heads a KV head; with a page table more than 32 heads, many rows and fp32; and of the
scores, summaries, appends and what lies between a layer's products, which keep nothing in flight, all but one launch for each
piece of code that a constant turns on, and the widest ones (these not for gfx1100).

Columns. registers: of one thread; of AMD's, vector registers. local: bytes a thread that did not fit into registers and lie in
memory instead (the stack frame of the cubin, the private segment of the hsaco: these kernels have no arrays, so all of it is
spills). shared: bytes a program, and room: what the card can give it.
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch

real = torch.cuda.is_available
torch.cuda.is_available = lambda: True
from pageskip_lib import block_summaries, bounds8, cache, cards, decode, dense, fused, merge, runtime, scores, selection, sparse, summaries  # noqa: E402
from pageskip_lib.bench import ceilings  # noqa: E402
from pageskip_lib.checks import HEAD_DIMS, PAGE_SIZES  # noqa: E402

torch.cuda.is_available = real

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

LDS = 64 * 1024  # of a workgroup on AMD, CDNA and RDNA alike
TARGETS = {f"sm_{card.target}": (card.shared_bytes, card.dependent_launch) for card in cards.CARDS.values()}
TARGETS |= {"gfx942": (LDS, False), "gfx1100": (LDS, False)}
SMS, FEW_ROWS, MANY_ROWS = 100, 1, 1000
LONG, SHORT = 1 << 20, 2048  # tokens to read: the widest tile, and one that leaves no SM without work

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
KERNELS = {
    "dense": dense._dense_kernel, "sparse": sparse._sparse_kernel, "merge": merge._merge_kernel, "select": selection._select_kernel,
    "read": ceilings._read_kernel, "score": scores._score_kernel, "summary": summaries._minmax_kernel, "append": decode._append_kernel,
    "score8": bounds8._score8_kernel, "both": decode._append_and_score_kernel,
    "newest": dense._dense_kernel, "append+merge": decode._append_and_merge_kernel,
    "paged dense": dense._dense_kernel, "paged sparse": sparse._sparse_kernel, "paged append": cache._append_paged_kernel,
    "written": block_summaries._summarize_written_kernel,
    "first norm": fused._add_norm_kernel, "norm": fused._add_norm_kernel, "rotate": fused._rotate_kernel, "gate": fused._gate_kernel,
}  # fmt: skip
LONGS = ("page_ptr", "slot_ptr")
INTS = ("held_ptr", "lengths_ptr", "after_ptr", "copy_ptr", "s_lengths_ptr", "row_budgets_ptr", "pages_ptr", "counts_ptr", "table_ptr", "rows_ptr")
CODES = ("low_ptr", "high_ptr", "s_low_ptr", "s_high_ptr")
FLOATS = ("scale_ptr", "channel_ptr", "s_scale_ptr", "s_channel_ptr", "scores_ptr", "outs_ptr", "lses_ptr", "outs", "lses", "lse", "out_ptr")
IN_DTYPE = ("q_ptr", "k_ptr", "v_ptr", "out", "x_ptr", "first_ptr", "second_ptr", "kmin_ptr", "kmax_ptr", "k_new_ptr", "v_new_ptr")
IN_DTYPE += ("residual_ptr", "weight_ptr", "normed_ptr", "projected_ptr", "cos_ptr", "sin_ptr", "gate_up_ptr", "gated_ptr")
TYPES = dict.fromkeys(LONGS, "*i64") | dict.fromkeys(INTS, "*i32") | dict.fromkeys(CODES, "*i8") | dict.fromkeys(FLOATS, "*fp32") | dict(scale_log2="fp32", eps="fp32")
STRIDES = {f"{name}_{axis}" for name in (*"qkvfs", "low", "high", "scale") for axis in ("batch", "head", "token", "entry")}
GROUPS = (6, 24, 48, 96)  # padded to 16, 32, 64 and 128
ROW_PAGES = (64, 1024, 4096, 16384)
COLUMNS = "target kernel dtype KIND GROUP PER_PAGE SIZE D G PAGE BLOCK_D BLOCK_G BLOCK_N TILE num_warps num_stages registers local shared room".split()


def card_of(target):
    shared, dependent = TARGETS[target]
    return runtime.Card(target, sms=SMS, l2_bytes=0, shared_bytes=shared, dependent_launch=dependent)


def attention_cells(everything):
    """(dtype, D, G, rows, {} or dict(PAGE)) of the attention launches."""
    pages = [{}, dict(PAGE=16), dict(PAGE=64)]
    if everything:
        yield from itertools.product(DTYPES, HEAD_DIMS, GROUPS, (FEW_ROWS, MANY_ROWS), pages)
        return
    yield from itertools.product([torch.float16], (64, 96, 192), GROUPS, [FEW_ROWS], pages)
    yield from itertools.product([torch.float16], (64, 96, 192), GROUPS, [MANY_ROWS], [{}])
    yield from itertools.product([torch.float32], (64, 96, 192), GROUPS, [FEW_ROWS], [{}])
    yield from itertools.product([torch.float32], (64, 96, 192), GROUPS[:2], [FEW_ROWS], [dict(PAGE=16)])


def score_cells(target, everything):
    """(kind, group, page size, bound size, dtype, D, G) of a target's score launches."""
    if everything:
        groups = [group for group in scores.GROUPS if group != "softmax_sum"]  # it launches "none"
        yield from itertools.product(summaries.KINDS, groups, [128], (128, 64, 32, 16, 8), DTYPES, (64, 96, 192), GROUPS)
        return
    yield from ((kind, "max", 64, 64, torch.float16, 96, 6) for kind in summaries.KINDS)
    yield from (("minmax", "none", 64, 8, torch.float16, 96, 6), ("minmax", "sum", 64, 64, torch.float32, 192, 6))
    if target != "gfx1100":  # LLVM takes half a minute over what it cannot fit into 256 registers
        yield from (("minmax", "max", 64, 64, torch.float16, 192, 24), ("minmax", "max", 128, 8, torch.float16, 192, 96))


def summary_cells(everything):
    """(dtype, D, tokens of an entry) of the launches that build summaries."""
    if everything:
        return itertools.product(DTYPES, HEAD_DIMS, (8, *PAGE_SIZES))
    return ((torch.float16, 96, 8), (torch.float16, 96, 64), (torch.float32, 192, 128))


def append_cells(everything):
    """(dtype, D, KV heads) of the launches that append a token."""
    return itertools.product(DTYPES, HEAD_DIMS, (1, 8, 32)) if everything else ((torch.float16, 96, 6), (torch.float16, 192, 32))


def fused_cells(everything):
    """(dtype, D, hidden size) of the launches between a layer's products."""
    return itertools.product(DTYPES, HEAD_DIMS, (576, 4096, 8192)) if everything else ((torch.float16, 96, 8192), (torch.float32, 256, 576))


def noted(module, kernel, call):
    """The constants that ``call`` launches this kernel of the module with; nothing runs."""
    with mock.patch.object(module, kernel) as launcher:
        call()
    return launcher.__getitem__.return_value.call_args.kwargs


def launches(target, everything=False):
    """Every launch to compile for a target, once: (target, kernel, dtype, constants and options of the launch)."""
    card, found = card_of(target), []
    early = dict(launch_pdl=True) if card.dependent_launch else {}
    in_rows, paged = dict(table_ptr=None), dict(PAGE=16)  # with a table the loads are narrowest in the smallest pages
    cached = dict(k_new_ptr=None, v_new_ptr=None)  # the newest token like the others; a step gives it apart
    for dtype, dim, group, rows, page in attention_cells(everything):
        q, k = torch.empty(rows, group, dim, dtype=dtype, device="meta"), torch.empty(rows, 1, 64, dim, dtype=dtype, device="meta")
        for tokens in (LONG, SHORT) if everything or (dtype, dim, group, rows) == (torch.float16, 96, 6, FEW_ROWS) else (LONG,):
            shape = dense.launch_shape(q, k, card, tokens)
            whole = in_rows | dict(PAGE=None)
            found.append((target, "sparse", dtype, shape | page | in_rows | early) if page else (target, "dense", dtype, shape | cached | whole))
            if not page and (everything or (dtype, rows) == (torch.float16, FEW_ROWS)):
                found.append((target, "newest", dtype, shape | whole))
            if everything or (dtype, rows) == (torch.float16, FEW_ROWS) and group in GROUPS[:2]:
                found.append((target, "paged sparse", dtype, shape | page | early) if page else (target, "paged dense", dtype, shape | cached | paged))
    blocks = dict(zip(("BLOCK_S", "BLOCK_D"), merge.merge_blocks(32)), DEPENDENT=card.dependent_launch, num_warps=1)
    for dtype in DTYPES:
        found += [(target, "merge", dtype, dict(D=dim) | blocks | early) for dim in HEAD_DIMS]
        found.append((target, "read", dtype, dict(BLOCK=ceilings.read_once.__defaults__[0])))
    # The usual sink of 1 is a constant by itself.
    found += [(target, "select", torch.float32, dict(PAGE=16, sink=1) | selection.select_shape(pages, card)) for pages in ROW_PAGES]
    for kind, group, page_size, bound_size, dtype, dim, heads in score_cells(target, everything):
        q, k = torch.empty(1, heads, dim, dtype=dtype, device="meta"), torch.empty(1, 1, page_size, dim, dtype=dtype, device="meta")
        summary = summaries.summarize_pages(k, page_size, kind=kind, bound_size=bound_size, backend="torch")
        module, kernel, name = (bounds8, "_score8_kernel", "score8") if kind == "minmax8" else (scores, "_score_kernel", "score")
        with mock.patch.object(module, "card", lambda device: card):
            shape = noted(module, kernel, lambda: scores.page_scores(q, summary, group=group, backend="triton"))  # noqa: B023
        one = {"mean_radius": dict(s_entry=1), "minmax8": dict(scale_entry=1)}.get(kind, {})  # a stride of 1 is a constant
        found.append((target, name, dtype, shape | one))
    for dtype, dim, size in summary_cells(everything):
        k = torch.empty(1, 1, 128, dim, dtype=dtype, device="meta")
        shape = noted(summaries, "_minmax_kernel", lambda: summaries.summarize_pages(k, 128, bound_size=size, backend="triton"))  # noqa: B023
        found.append((target, "summary", dtype, shape))
        for kind, unused in (("minmax8", ("kmin_ptr", "kmax_ptr")), ("minmax", ("low_ptr", "high_ptr", "scale_ptr", "channel_ptr"))):
            found.append((target, "written", dtype, shape | dict(KIND=kind) | dict.fromkeys(unused)))
    for dtype, dim, kv_heads in append_cells(everything):
        k, budget = torch.zeros(1, kv_heads, 128, dim, dtype=dtype), selection.Budget(1, sink=0, local=1)
        for sms in (1, SMS):  # more rows than SMs, and fewer: 64 and 32 entries a program
            fewer = lambda device: dataclasses.replace(card, sms=sms)  # noqa: B023, E731
            with mock.patch.object(bounds8, "card", fewer), mock.patch.object(decode, "card", fewer), mock.patch.object(decode, "launch_select"):
                step = decode.DecodeStep(k, k, torch.ones(1, dtype=torch.int32), budget, heads=6 * kv_heads)
                shape = noted(decode, "_append_and_score_kernel", step._append_and_select)
            found.append((target, "both", dtype, shape | dict(scale_entry=1)))
        blocks = dict(BLOCK_H=triton.next_power_of_2(kv_heads), BLOCK_D=triton.next_power_of_2(dim), DEPENDENT=card.dependent_launch)
        unused = dict.fromkeys(("low_ptr", "high_ptr", "scale_ptr", "channel_ptr"))
        for kind in ("minmax8", "minmax"):
            constants = dict(KIND=kind, PAGE=64, D=dim) | blocks | (unused if kind == "minmax" else {})
            found += [(target, "append", dtype, constants), (target, "paged append", dtype, constants)]
            for splits in (2, 32):
                block_s, merge_d = merge.merge_blocks(splits)
                merging = dict(BLOCK_S=block_s, MERGE_D=merge_d, num_warps=decode.merging_warps(blocks["BLOCK_H"], blocks["BLOCK_D"]))
                found.append((target, "append+merge", dtype, constants | merging | early))
    for dtype, dim, hidden in fused_cells(everything):
        x, heads = torch.empty(1, hidden, dtype=dtype, device="meta"), torch.empty(1, 1, dim, dtype=dtype, device="meta")
        normed = noted(fused, "_add_norm_kernel", lambda: fused.add_norm(x, x, x[0], 1e-6, "triton"))  # noqa: B023
        rotated = noted(fused, "_rotate_kernel", lambda: fused.rotate(x, x, x, heads, heads, heads, "triton"))  # noqa: B023
        gated = noted(fused, "_gate_kernel", lambda: fused.gated(x, "triton"))  # noqa: B023
        found += [(target, "first norm", dtype, normed | dict(x_ptr=None)), (target, "norm", dtype, normed)]
        found += [(target, "rotate", dtype, rotated), (target, "gate", dtype, gated)]
    return list({str(launch): launch for launch in found}.values())


def compiled(target, kernel, dtype, shape):
    """Compile one launch; what it needs, as a dict."""
    function = KERNELS[kernel]
    options = {name: value for name, value in shape.items() if name not in function.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in shape:
            signature[name], constants[(i,)] = "constexpr", shape[name]
        else:
            signature[name] = "*" + DTYPES[dtype] if name in IN_DTYPE else TYPES.get(name, "i32")
        if name == "second_ptr" and shape["KIND"] == "mean_radius":
            signature[name] = "*fp32"
        if signature[name].startswith("*") or name in STRIDES and not function.params[i].do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]  # loads of 16 bytes
    nvidia = target.startswith("sm_")
    arch = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    result = triton.compile(ASTSource(function, signature, constants, attributes), target=arch, options=options)
    registers, local = nvidia_usage(result.asm["cubin"]) if nvidia else amd_usage(result.asm["amdgcn"])
    return dict(registers=registers, local=local, shared=result.metadata.shared)


def nvidia_usage(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{what}:(\d+)", text)[1]) for what in ("REG", "STACK"))


def amd_usage(assembly):
    return tuple(int(re.search(rf"\.{what}:\s*(\d+)", assembly)[1]) for what in ("vgpr_count", "private_segment_fixed_size"))


def listed(launch):
    target, kernel, dtype, shape = launch
    row = dict(target=target, kernel=kernel, dtype=DTYPES[dtype], **shape, room=TARGETS[target][0])
    try:
        return row | compiled(*launch)
    except Exception as error:  # the row says so, and the others go on
        return row | dict(error=f"{type(error).__name__}: {error}")


def main():
    parser = argparse.ArgumentParser(description="Compile every launch for cards that are not here, and list what each one needs.")
    parser.add_argument("--all", action="store_true", help="every dtype, head dim, group padding and page size")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options = parser.parse_args()
    wanted = [launch for target in options.target or TARGETS for launch in launches(target, options.all)]
    if not options.json:
        print(*(f"{name:>12}" for name in COLUMNS), sep="")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for row in pool.map(listed, wanted):
            line = json.dumps(row) if options.json else "".join(f"{'-' if row.get(name) is None else row[name]:>12}" for name in COLUMNS) + "  " + row.get("error", "")
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
