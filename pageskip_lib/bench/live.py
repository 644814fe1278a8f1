"""Tokens per second of ``model.generate()``: plain transformers, and inside ``use_pageskip``, in turns on one prompt.

Plain transformers copies its whole cache for every token. The second arm takes that copy away and nothing else, so that it is not credited to
the pages that are skipped.
"""

import os
import statistics
import time
from contextlib import nullcontext

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from ..live_model import LiveCache, cache_argument, prefill, use_pageskip
from ..models import check_fits, load_model
from ..quality.needle import budget_for, haystack, is_right, plant
from ..quality.policies import FullPolicy, PageskipPolicy

PLAIN, UNCOPIED = "transformers, SDPA", "SDPA, live cache"
ROUNDS, KINDS = 4, ("minmax", "minmax8")


class Clock(BaseStreamer):
    """Takes the time whenever ``generate`` hands over a token, the prompt first."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def copied(cache, config):
    """A DynamicCache of transformers with copies of what a ``LiveCache`` holds."""
    copy = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        copy.update(layer.keys, layer.values, number)
    return copy


def measurements():
    """How many times ``run_live`` calls its progress function."""
    return ROUNDS * (3 + len(KINDS))


def run_live(*, progress=lambda: None):
    """``measure_live`` with the embedded model."""
    return measure_live(*load_model(), progress=progress)


def measure_live(
    model, tokenizer, *, context=7000, budget=0.125, page_size=16, depth=0.25, code="7491", tokens=9, rounds=ROUNDS, kinds=KINDS,
    progress=lambda: None,
):  # fmt: skip
    """Prefill a needle prompt once, then let each arm generate from its last token on, round after round. Returns (rows, settings).

    context: tokens of the prompt; budget: share of it that a policy may read; page_size: tokens of a page; depth, code: of the needle;
    tokens: that each arm generates in a round, greedily; rounds: how often all arms take their turn; kinds: of the page summaries, an arm each.
    Seconds are those from one token to the next, so the first of a round, which may still summarise the prompt, is not among them.
    Raises ValueError when the settings do not fit the model or the haystack.
    """
    check_fits(model, context + tokens)
    pages = budget_for(budget, context, page_size)
    prompt = plant(tokenizer, haystack("transcripts"), context=context, depth=depth, code=code)
    ids = torch.tensor([prompt.body + prompt.question], device=model.device)
    load, cache = os.getloadavg()[0], LiveCache(model.config)
    prefill(model, ids[:, :-1], cache)
    policies = {PLAIN: None, UNCOPIED: None, "pageskip, all pages": FullPolicy(page_size)}
    policies |= {f"pageskip, {kind}": PageskipPolicy(pages, page_size, kind=kind) for kind in kinds}
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    seconds, answers = {arm: [] for arm in policies}, {}
    for _ in range(rounds):
        for arm, policy in policies.items():
            cache.truncate(context - 1)
            used, clock = copied(cache, model.config) if arm == PLAIN else cache, Clock()
            with use_pageskip(model, policy) if policy else nullcontext():
                out = model.generate(ids, streamer=clock, **{cache_argument(model): used}, **options)
            seconds[arm] += [after - before for before, after in zip(clock.times[1:], clock.times[2:])]
            answers[arm] = tokenizer.decode(out[0, context:])
            progress()
    median = {arm: statistics.median(taken) for arm, taken in seconds.items()}
    rows = [
        dict(
            arm=arm, answer=answers[arm], right=is_right(answers[arm], code), seconds=median[arm], fastest=min(seconds[arm]),
            tokens_per_second=1 / median[arm], against_plain=median[PLAIN] / median[arm], timed_tokens=len(seconds[arm]),
        )
        for arm in policies
    ]  # fmt: skip
    settings = dict(
        model=model.config._name_or_path, context=context, budget=budget, budget_pages=pages.pages, page_size=page_size, depth=depth, code=code,
        dtype=str(model.dtype).removeprefix("torch."), device=str(model.device), threads=torch.get_num_threads(),
        load_before=round(load, 1), load_after=round(os.getloadavg()[0], 1),
        method=f"generate() of {tokens} tokens, {rounds} rounds, arms in turns; median seconds from token to token; all of the prompt but its "
        "last token was prefilled exactly",
    )  # fmt: skip
    return rows, settings


def table(rows):
    """The rows as text, one line an arm."""
    lines = [f"{'arm':<24}{'s/token':>9}{'fastest':>9}{'tokens/s':>10}{'against plain':>15}  answer"]
    for row in rows:
        lines.append(
            f"{row['arm']:<24}{row['seconds']:>9.4f}{row['fastest']:>9.4f}{row['tokens_per_second']:>10.2f}{row['against_plain']:>14.2f}x  "
            f"{row['answer'].strip()!r} ({'right' if row['right'] else 'wrong'})"
        )
    return "\n".join(lines)
