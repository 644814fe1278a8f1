"""Command line: ``python -m pageskip_lib.quality needle``, ``agree``, ``capture`` or ``recall``."""

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path

from .. import load_model, runtime
from ..bench import records
from ..models import EMBEDDED, ModelUnavailable
from .capture import SHIPPED, Captured, capture
from .needle import HAYSTACKS, haystack, run_needle, table, turned
from .policies import DENSE_LAYERS
from . import agree, grid, sweep


def parser():
    top = argparse.ArgumentParser(prog="python -m pageskip_lib.quality", description="Does the model still work?")
    commands = top.add_subparsers(dest="command", required=True)
    defaults = dict(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    needle = commands.add_parser("needle", help="plant a code in a long text and ask each policy for it", **defaults)
    needle.add_argument("--context", type=int, default=4096, help="tokens of the prompt")
    needle.add_argument("--depth", type=float, default=0.25, help="where the code stands, 0 (start) to 1 (end)")
    needle.add_argument("--budget", type=float, default=0.12, help="share of the context that a policy may read")
    needle.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    needle.add_argument("--code", default="7491", help="the digits to plant")
    needle.add_argument("--seed", type=int, default=0, help="turns the haystack, and draws the random policy's pages")
    needle.add_argument("--haystack", choices=HAYSTACKS, default="transcripts", help="the text around the code")
    needle.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32 on CPU, bfloat16 on CUDA")
    needle.add_argument("--json", metavar="FILE", help="write rows and settings to FILE ('-' for standard output)")
    needle.add_argument("--grid", action="store_true", help="a whole grid of contexts, depths, texts and wordings; goes on where it was stopped")
    needle.add_argument("--contexts", type=int, nargs="+", default=grid.CONTEXTS, help="of the grid")
    needle.add_argument("--depths", type=float, nargs="+", default=grid.DEPTHS, help="of the grid")
    needle.add_argument("--codes", type=int, default=grid.CODES, help="of each cell of the grid")
    needle.add_argument("--record", metavar="NAME", type=records.argument, help="with --grid: write data/recorded/grid_NAME.json")
    agreement = commands.add_parser("agree", help="read plain text: how often is the next token full attention's", **defaults)
    agreement.add_argument("--model", default=EMBEDDED, help="any transformers causal LM, by name or directory")
    agreement.add_argument("--texts", choices=HAYSTACKS, nargs="+", default=list(HAYSTACKS), help="what to read")
    agreement.add_argument("--context", type=int, default=agree.CONTEXT, help="tokens that are prefilled exactly")
    agreement.add_argument("--tokens", type=int, default=agree.TOKENS, help="tokens of each stretch that are then read one by one")
    agreement.add_argument("--stretches", type=int, default=agree.STRETCHES, help="pieces of each text, the rows of a batch")
    agreement.add_argument("--shares", type=float, nargs="+", default=list(agree.SHARES), help="budgets, as shares of the cache's bytes")
    agreement.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32 on CPU, bfloat16 on CUDA")
    agreement.add_argument("--json", metavar="FILE", help="write rows and settings to FILE ('-' for standard output)")
    agreement.add_argument("--record", metavar="NAME", type=records.argument, help="write data/recorded/agree_NAME.json")
    capture = commands.add_parser("capture", help="store real queries, keys and values of a decoding model", **defaults)
    capture.add_argument("file", metavar="FILE", help="the safetensors file to write")
    capture.add_argument("--model", default=EMBEDDED, help="any transformers causal LM, by name or directory")
    capture.add_argument("--context", type=int, default=4096, help="tokens of the text")
    capture.add_argument("--steps", type=int, default=16, help="decode steps to capture, the last one at the end of the text")
    capture.add_argument("--every", type=int, default=32, help="tokens from one captured step to the next")
    capture.add_argument("--layers", type=int, nargs="+", help="layers to keep (all)")
    capture.add_argument("--kv-heads", type=int, nargs="+", help="KV heads to keep, with their query heads (all)")
    capture.add_argument("--haystack", choices=HAYSTACKS, default="transcripts", help="the text")
    capture.add_argument("--seed", type=int, default=0, help="turns the text, so that another part of it is read")
    capture.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32 on CPU, bfloat16 on CUDA")
    recall = commands.add_parser("recall", help="how much attention the chosen pages keep, at equal bytes read", **defaults)
    recall.add_argument("--captured", metavar="FILE", nargs="+", default=[str(SHIPPED)], help="captured sets, measured together")
    recall.add_argument("--record", metavar="NAME", type=records.argument, help="write data/recorded/recall_NAME.json")
    recall.add_argument("--json", metavar="FILE", help="write rows and settings to FILE ('-' for standard output)")
    return top


def grid_command(options, model, tokenizer):
    todo = grid.cells(contexts=options.contexts, depths=options.depths, codes=options.codes)
    rows, settings = grid.run_grid(model, tokenizer, todo, scratch=grid.scratch_path(model, todo, grid.SETTINGS, grid.SHARES, grid.ADAPTIVE))
    report(options, "grid", rows, settings, grid.table(rows))


def agree_command(options):
    import torch

    model, tokenizer = load_model(options.model, dtype=getattr(torch, options.dtype) if options.dtype else None)
    given = dict(
        texts=options.texts, context=options.context, tokens=options.tokens, stretches_each=options.stretches, settings=agree.SETTINGS,
        shares=options.shares,
    )  # fmt: skip
    rows, settings = agree.run_agree(model, tokenizer, **given, scratch=agree.scratch_path(model, **given))
    report(options, "agree", rows, settings, agree.table(rows))


def report(options, kind, rows, settings, table):
    """Print the table or the JSON, and write the files that were asked for."""
    record = records.stamped(rows, settings)
    if options.json == "-":
        print(json.dumps(record, indent=1))
    else:
        print(table)
        print(f"{runtime.machine()}; {settings['dtype']}; {settings['method']}")
        if options.json:
            Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.record:
        print(f"written to data/recorded/{records.save(record, kind, options.record).name}", file=sys.stderr)


def needle_command(options):
    import torch

    started = time.perf_counter()
    model, tokenizer = load_model(dtype=getattr(torch, options.dtype) if options.dtype else None)
    if options.grid:
        return grid_command(options, model, tokenizer)
    rows, settings = run_needle(
        model, tokenizer, context=options.context, depth=options.depth, budget=options.budget, page_size=options.page_size,
        code=options.code, seed=options.seed, hay=options.haystack,
    )  # fmt: skip
    settings |= dict(machine=runtime.machine().as_dict(), date=date.today().isoformat(), seconds=round(time.perf_counter() - started, 1))
    result = json.dumps(dict(settings=settings, rows=rows), indent=1) + "\n"
    if options.json == "-":
        print(result, end="")
        return
    print(
        f"{settings['code']!r} planted {settings['depth']:.0%} into {settings['context']:,} tokens, asked {settings['question_tokens_later']:,} "
        f"tokens later; every policy but full may read {settings['budget_pages']} pages of {settings['page_size']} ({settings['budget']:.0%})."
    )
    print(table(rows))
    print(f"{runtime.machine()}; {settings['dtype']}, {settings['seconds']} s")
    if options.json:
        Path(options.json).write_text(result, encoding="utf-8")


def capture_command(options):
    import torch

    model, tokenizer = load_model(options.model, dtype=getattr(torch, options.dtype) if options.dtype else None)
    ids = tokenizer(turned(haystack(options.haystack), options.seed), add_special_tokens=False).input_ids
    if len(ids) < options.context:
        raise ValueError(f"The {options.haystack} have {len(ids):,} tokens; a context of {options.context:,} needs more text.")
    captured = capture(
        model, ids[: options.context], steps=options.steps, every=options.every, layers=options.layers, kv_heads=options.kv_heads,
        context=f"{options.haystack}, seed {options.seed}", progress=True,
    )  # fmt: skip
    captured.save(options.file)
    size = Path(options.file).stat().st_size / 1e6
    print(f"{len(captured.lengths)} steps, {len(captured.layers)} layers, {options.context:,} tokens: {size:.1f} MB in {Path(options.file).name}")


def recall_command(options):
    captures = [Captured.load(path) for path in options.captured]
    rows = sweep.sweep(captures, scratch=sweep.scratch_path(captures), progress=True)
    first = captures[0]
    settings = dict(
        model=first.provenance["model"], dtype=first.provenance["dtype"], contexts=[one.provenance["context"] for one in captures],
        captured=[one.provenance["date"] for one in captures], tokens=[len(one.ids) for one in captures],
        positions=sum(len(one.lengths) for one in captures), layers=first.layers, kv_heads=first.kv_heads,
        group=first.queries.shape[3] // len(first.kv_heads), dense_layers=DENSE_LAYERS,
        method="means over layers, query positions and KV heads; dense layers left out; 95% bootstrap intervals over query positions; "
        "budgets and read are shares of the cache's bytes, page summaries included",
    )  # fmt: skip
    record = records.stamped(rows, settings)
    if options.json == "-":
        print(json.dumps(record, indent=1))
    else:
        print(sweep.table(rows))
        print(f"\nThe bound, page 16, budget 25%:\n{sweep.ablation(rows)}")
        print(f"{settings['model']}, {settings['positions']} positions, budget {sweep.HEAT_SHARE:.1%} unless said; {settings['method']}")
    if options.json and options.json != "-":
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.record:
        print(f"written to data/recorded/{records.save(record, 'recall', options.record).name}", file=sys.stderr)


def main(arguments=None):
    options = parser().parse_args(arguments)
    try:
        dict(needle=needle_command, agree=agree_command, capture=capture_command, recall=recall_command)[options.command](options)
    except (ModelUnavailable, ValueError, OSError) as error:
        sys.exit(f"pageskip: {error}")


if __name__ == "__main__":
    main()
