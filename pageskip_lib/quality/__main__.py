"""Command line: ``python -m pageskip_lib.quality needle``."""

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path

from .. import load_model, runtime
from ..models import ModelUnavailable
from .needle import HAYSTACKS, run_needle, table


def parser():
    top = argparse.ArgumentParser(prog="python -m pageskip_lib.quality", description="Does the model still work?")
    commands = top.add_subparsers(dest="command", required=True)
    needle = commands.add_parser(
        "needle", help="plant a code in a long text and ask each policy for it", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    needle.add_argument("--context", type=int, default=4096, help="tokens of the prompt")
    needle.add_argument("--depth", type=float, default=0.25, help="where the code stands, 0 (start) to 1 (end)")
    needle.add_argument("--budget", type=float, default=0.12, help="share of the context that a policy may read")
    needle.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    needle.add_argument("--code", default="7491", help="the digits to plant")
    needle.add_argument("--seed", type=int, default=0, help="turns the haystack, and draws the random policy's pages")
    needle.add_argument("--haystack", choices=HAYSTACKS, default="transcripts", help="the text around the code")
    needle.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: float32 on CPU, bfloat16 on CUDA")
    needle.add_argument("--json", metavar="FILE", help="write rows and settings to FILE ('-' for standard output)")
    return top


def needle_command(options):
    import torch

    started = time.perf_counter()
    model, tokenizer = load_model(dtype=getattr(torch, options.dtype) if options.dtype else None)
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


def main(arguments=None):
    options = parser().parse_args(arguments)
    try:
        needle_command(options)
    except (ModelUnavailable, ValueError, OSError) as error:
        sys.exit(f"pageskip: {error}")


if __name__ == "__main__":
    main()
