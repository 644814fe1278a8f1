"""Tokens per second of transformers' continuous batching: by itself, and inside ``use_pageskip_serving``, in turns on the same requests.

By itself it runs with SDPA, as it does wherever flash attention is not installed; with flash attention it has block tables and CUDA graphs, and is
not measured here. With SDPA it gathers every request's cache for each token and lets every request's query meet every request's keys, under a mask.
So the second arm goes through pageskip and skips nothing: what it gains is not credited to the pages that are skipped.
"""

import os
import statistics
import time
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

from .. import runtime
from ..checks import page_count
from ..models import check_fits, head_dim, load_model
from ..quality.needle import budget_for, haystack, is_right, plant
from ..quality.policies import FullPolicy, PageskipPolicy
from ..serving import use_pageskip_serving

PLAIN, ALL, SKIP = "transformers, SDPA", "pageskip, all pages", "pageskip"
ARMS = (PLAIN, ALL, SKIP)
ROUNDS = 2
BLOCK = 256  # tokens of the engine's blocks, its default


def measurements():
    """How many times ``run_serve`` calls its progress function: a first round that is not timed, and the others."""
    return (1 + ROUNDS) * len(ARMS)


def run_serve(*, progress=lambda: None):
    """``measure_serve`` with the embedded model: eight long requests on a GPU, three short ones on a CPU."""
    model, tokenizer = load_model()
    if model.device.type == "cuda":
        sizes = dict(requests=8, context=8000, tokens=96)
        sizes |= dict(batch_tokens=prefill_room(model, **sizes))
    else:
        sizes = dict(requests=3, context=1500, tokens=16, batch_tokens=512)
    return measure_serve(model, tokenizer, progress=progress, **sizes)


def blocks_for(requests, context, tokens):
    """Blocks of the engine's cache. With few of them free it lets nobody join, so twice of what the requests fill."""
    return 2 * requests * (page_count(context + tokens, BLOCK) + 1)


def prefill_room(model, *, requests, context, tokens):
    """Tokens that the engine may prefill in one forward, at most 8,192 and at least 512: its mask is as wide as its cache, and a small GPU is full of it."""
    config, held = model.config, BLOCK * blocks_for(requests, context, tokens)
    size = model.dtype.itemsize
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * held * size
    batch_tokens = 8192
    while batch_tokens > 512 and cache + 4 * batch_tokens * (held + batch_tokens) * size > runtime.free_memory(model.device):  # 4: two of them, and copies
        batch_tokens //= 2
    return batch_tokens


def measure_serve(
    model, tokenizer, *, requests, context, tokens, batch_tokens, budget=0.125, page_size=16, depth=0.25, rounds=ROUNDS, progress=lambda: None
):
    """Send all requests to the engine at once, round after round, arms in turns. Returns (rows, settings).

    requests: how many, each with a code of its own in a haystack of its own. context: tokens of each prompt; tokens: that each generates, greedily;
    batch_tokens: the most that the engine prefills in one forward; budget: share of the context that a policy may read; page_size: tokens of
    a page; depth: of the codes; rounds: how often all arms take their turn, after a shorter first one that is not timed.
    A step's seconds are those between two tokens of a request while all requests decode. Raises ValueError when the settings do not fit.
    """
    check_fits(model, context + tokens)
    pages = budget_for(budget, context, page_size)
    codes = [str(7491 + 311 * number) for number in range(requests)]
    prompts = [plant(tokenizer, haystack("transcripts"), context=context, depth=depth, code=code, seed=seed) for seed, code in enumerate(codes)]
    inputs, load = [prompt.body + prompt.question for prompt in prompts], os.getloadavg()[0]
    policies = {PLAIN: None, ALL: FullPolicy(page_size), SKIP: PageskipPolicy(pages, page_size)}
    runs = {arm: [] for arm in ARMS}
    for turn in range(1 + rounds):
        for arm, policy in policies.items():
            run = serve(model, inputs, policy, tokens=tokens if turn else min(tokens, 4), batch_tokens=batch_tokens)
            if turn:
                runs[arm].append(run)
            progress()
    rows = []
    for arm in ARMS:
        step, seconds = (statistics.median(run[name] for run in runs[arm]) for name in ("step", "seconds"))
        answers = runs[arm][-1]["answers"]
        plain = runs[PLAIN][-1]["answers"]
        rows.append(dict(
            arm=arm, attention=runs[arm][-1]["attention"], step=step, fastest=min(run["step"] for run in runs[arm]),
            timed_steps=runs[arm][-1]["steps"],
            tokens_per_second=requests / step, against_plain=rows[0]["step"] / step if rows else 1.0, seconds=seconds,
            all_tokens_per_second=requests * tokens / seconds,
            right=sum(is_right(tokenizer.decode(answer), code) for answer, code in zip(answers, codes)),
            same=sum(answer == expected for answer, expected in zip(answers, plain)), answer=tokenizer.decode(answers[0][:8]),
        ))  # fmt: skip
    settings = dict(
        model=model.config._name_or_path, requests=requests, context=context, tokens=tokens, batch_tokens=batch_tokens, block=BLOCK,
        budget=budget, budget_pages=pages.pages, page_size=page_size, depth=depth, dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device), threads=torch.get_num_threads(), load_before=round(load, 1), load_after=round(os.getloadavg()[0], 1),
        method=f"continuous batching of {requests} requests of {context} tokens, {tokens} generated each, {rounds} rounds, arms in turns; a "
        "step is the median time between a request's tokens while all decode, seconds are the whole run with its prefill; answers compared "
        "with the first arm's",
    )  # fmt: skip
    return rows, settings


def serve(model, inputs, policy, *, tokens, batch_tokens):
    """One run of the engine: its answers, its attention, the whole run's seconds, and the median step while every request decodes."""
    blocks = blocks_for(len(inputs), len(inputs[0]), tokens)
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=batch_tokens)
    config.auto_switch_to_flash = False
    generation = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    seen = []
    with use_pageskip_serving(model, policy) if policy else engine_with_sdpa(model):
        watch = model.register_forward_pre_hook(lambda *_: seen.append(model.config._attn_implementation))
        try:
            begun = time.perf_counter()
            results = model.generate_batch(inputs, generation_config=generation, continuous_batching_config=config, record_timestamps=True)
        finally:
            watch.remove()
    failed = [result.error for result in results.values() if result.error is not None]
    if failed or len(results) < len(inputs):
        answered, first = len(results) - len(failed), failed[0] if failed else "none"
        raise RuntimeError(f"The engine answered {answered} of {len(inputs)} requests; the first error: {first}.")
    stamps = [result.timestamps for result in results.values()]
    steps = steps_together(stamps)
    return dict(
        answers=[result.generated_tokens for result in results.values()], attention=seen[-1], seconds=max(map(max, stamps)) - begun,
        step=statistics.median(steps) if steps else float("nan"), steps=len(steps),
    )  # fmt: skip


@contextmanager
def engine_with_sdpa(model):
    """Inside, the engine takes SDPA for this model and nothing else."""
    before = model.config._attn_implementation
    model.set_attn_implementation("paged|sdpa" if "paged|sdpa" in AttentionInterface().valid_keys() else "sdpa")  # its name until 5.17, and after
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def steps_together(stamps):
    """Seconds between a request's tokens, of all requests whose times are given, while the last to begin has begun and none has ended."""
    begin, end = max(map(min, stamps)), min(map(max, stamps))
    return [after - before for times in stamps for before, after in zip(times, times[1:]) if begin <= before and after <= end]


def table(rows):
    """The rows as text, one line an arm."""
    lines = [f"{'arm':<22}{'attention':<16}{'ms/step':>9}{'tokens/s':>10}{'against plain':>15}{'whole run':>11}{'right':>7}{'same':>6}  first answer"]
    for row in rows:
        lines.append(
            f"{row['arm']:<22}{row['attention']:<16}{1e3 * row['step']:>9.1f}{row['tokens_per_second']:>10.1f}{row['against_plain']:>14.2f}x"
            f"{row['seconds']:>10.1f}s{row['right']:>7}{row['same']:>6}  {row['answer'].strip()!r}"
        )
    return "\n".join(lines)
