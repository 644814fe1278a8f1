"""The needle test: plant a code in a long text, ask for it much later, and let each policy answer.

The prompt's body is prefilled exactly, once. The question itself is then read token by token under the policy, and the
answer is decoded greedily under it, so the layers that choose pages never see the code but through their pages. What layers 0 and 1
read (everything), and what the body's own tokens picked up while they were prefilled, is the same for every policy.
"""

import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..live_model import LiveCache, prefill, step, use_pageskip
from ..models import check_fits, head_dim
from ..selection import Budget
from .policies import FullPolicy, PageskipPolicy, RandomPolicy, WindowPolicy

DATA = Path(__file__).resolve().parent.parent.parent / "data"
HAYSTACKS = ("transcripts", "jargon")
STATEMENT = ("\n\nThe vault access code is", ".\n\n")
QUESTION = "\n\nThe vault access code is"
ANSWER_TOKENS = 6


@dataclass(frozen=True)
class Prompt:
    """Token ids of a planted prompt: body [n], question [m], and the positions of the code's tokens in the body."""

    body: list
    question: list
    code_tokens: range


def haystack(name):
    """The text of a shipped haystack, "transcripts" (the embedded model's own answers) or "jargon" (the Jargon File)."""
    if name not in HAYSTACKS:
        raise ValueError(f"haystack must be one of {HAYSTACKS}, got {name!r}.")
    return (DATA / f"{name}.txt").read_text(encoding="utf-8")


def turned(text, seed):
    """The text begun at a paragraph that ``seed`` picks, its beginning put after its end; seed 0 leaves it as it is."""
    paragraphs = text.split("\n\n")
    turn = torch.randint(len(paragraphs), (), generator=torch.Generator().manual_seed(seed)).item() if seed else 0
    return "\n\n".join(paragraphs[turn:] + paragraphs[:turn])


def plant(tokenizer, text, *, context, depth, code, seed=0, statement=STATEMENT, question=QUESTION):
    """A ``Prompt`` of ``context`` tokens with the code ``depth`` (0 to 1) of the way into the body.

    text: the haystack; seed rotates it by paragraphs, so that different seeds give different surroundings. statement: what stands before
    the code and after it.
    Raises ValueError when the haystack is too short or the depth is out of range.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must lie between 0 (start) and 1 (end), got {depth}.")
    if not re.fullmatch(r"\d{1,12}", code):
        raise ValueError(f"code must be 1 to 12 digits, got {code!r}.")
    if code in text:
        raise ValueError(f"The haystack itself contains {code}; choose another code.")
    encode = lambda piece: tokenizer(piece, add_special_tokens=False).input_ids  # noqa: E731
    before, digits, after = encode(statement[0]), encode(f" {code}"), encode(statement[1])
    question = encode(question)
    room = context - len(before) - len(digits) - len(after) - len(question)
    if room < 0:
        raise ValueError(f"context must hold at least the needle and the question, {context - room} tokens; got {context}.")
    hay = encode(turned(text, seed))
    if len(hay) < room:
        raise ValueError(f"The haystack has {len(hay):,} tokens; a context of {context:,} needs {room:,}.")
    cut = round(depth * room)
    body = hay[:cut] + before + digits + after + hay[cut:room]
    stop = cut + len(before) + len(digits)
    spaces = sum(not tokenizer.decode([token]).strip() for token in digits)  # some tokenizers make the space a token of its own
    return Prompt(body=body, question=question, code_tokens=range(stop - len(digits) + spaces, stop))


def budget_for(share, context, page_size):
    """The ``Budget`` that reads ``share`` (0 to 1] of a context: whole pages, rounded down."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"budget must be a share of the context, above 0 and at most 1, got {share}.")
    return Budget.for_tokens(share * context, page_size)


def make_policies(budget, page_size, seed):
    """{name: policy} of all four, with the same budget."""
    return dict(
        full=FullPolicy(page_size), pageskip=PageskipPolicy(budget, page_size), window=WindowPolicy(budget, page_size),
        random=RandomPolicy(budget, page_size, seed=seed),
    )  # fmt: skip


def bytes_read(call, policy, kv_heads, dim, element_size):
    """KV bytes of one recorded decode call (one layer, one token), page summaries included: the mean over its sequences, rounded down.

    call: (layer, lengths [B], PageList or None) as ``use_pageskip`` records it. Padding that a row's cache leaves out costs nothing.
    """
    _, lengths, pages = call
    rows = lengths.tolist()
    if pages is None:
        return 2 * kv_heads * sum(rows) * dim * element_size // len(rows)
    held = (lengths[:, None, None] - pages.pages * policy.page_size).clamp(max=policy.page_size)
    tokens = int(held[pages.pages >= 0].sum())
    choosing = kv_heads * sum(policy.summary_bytes(length, dim, element_size) for length in rows)
    return (2 * tokens * dim * element_size + choosing) // len(rows)


def held_by_step(calls, prompt, policy):
    """{(layer, step): KV heads whose list holds every page of the code}, for the recorded calls that chose pages."""
    code_pages = {token // policy.page_size for token in prompt.code_tokens}
    held, steps = {}, Counter()
    for layer, _, pages in calls:
        if pages is not None:
            held[layer, steps[layer]] = sum(code_pages <= set(head) for head in pages.pages[0].tolist())
        steps[layer] += 1
    return held


@torch.inference_mode()
def ask(model, tokenizer, prompt, policy, cache, *, record=None):
    """Put the question to a prefilled ``cache`` (rolled back to the body first) under one policy, and decode greedily.

    record: a list that receives the decode calls, as ``use_pageskip`` reports them. Returns the row of the table: policy, answer
    (text), bytes_per_token, needle_page_share (of the calls that chose pages; 1 where none did and all was read), seconds_per_token (median).
    """
    cache.truncate(len(prompt.body))
    calls = [] if record is None else record
    answer, seconds = [], []
    with use_pageskip(model, policy, record=calls):
        for position in range(len(prompt.question) + ANSWER_TOKENS - 1):
            token = prompt.question[position] if position < len(prompt.question) else answer[-1]
            started = time.perf_counter()
            chosen = step(model, torch.tensor([[token]], device=model.device), cache).argmax().item()  # waits for a GPU
            seconds.append(time.perf_counter() - started)
            if position >= len(prompt.question) - 1:
                answer.append(chosen)
    held = held_by_step(calls, prompt, policy)
    config = model.config
    read = sum(bytes_read(call, policy, config.num_key_value_heads, head_dim(config), model.dtype.itemsize) for call in calls)
    return dict(
        policy=policy.name,
        answer=tokenizer.decode(answer),
        bytes_per_token=round(read / len(seconds)),
        needle_page_share=sum(held.values()) / (len(held) * config.num_key_value_heads) if held else 1.0,
        seconds_per_token=statistics.median(seconds),
    )


def is_right(answer, code):
    """Is the first number in the answer the code?"""
    found = re.search(r"\d+", answer)
    return bool(found) and found.group() == code


def run_needle(model, tokenizer, *, context=4096, depth=0.25, budget=0.12, page_size=16, code="7491", seed=0, hay="transcripts", policies=None, progress=True):
    """The whole test: one prefill, then every policy at one budget. Returns (rows, settings) for the table and the JSON.

    context: tokens of the prompt; depth: where the code stands, 0 to 1; budget: share of the context that a policy may read;
    page_size: tokens of a page; code: digits; seed: turns the haystack, and draws the random policy's pages; hay: "transcripts" or
    "jargon"; policies: names, all four by default.
    Raises ValueError when the settings do not fit the model, the haystack or each other.
    """
    check_fits(model, context + ANSWER_TOKENS)
    chosen = budget_for(budget, context, page_size)
    made = make_policies(chosen, page_size, seed)
    prompt = plant(tokenizer, haystack(hay), context=context, depth=depth, code=code, seed=seed)
    cache = LiveCache(model.config)
    prefill(model, torch.tensor([prompt.body], device=model.device), cache, progress=progress)
    rows = []
    for name in tqdm(policies or made, desc="policies", disable=not progress):
        row = ask(model, tokenizer, prompt, made[name], cache)
        rows.append(dict(row, right=is_right(row["answer"], code)))
    settings = dict(
        model=model.config._name_or_path, context=context, depth=depth, budget=budget, budget_pages=chosen.pages, sink_pages=chosen.sink,
        local_pages=chosen.local, page_size=page_size, code=code, seed=seed, haystack=hay, dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device), question_tokens_later=context - len(prompt.question) - prompt.code_tokens.stop,
    )  # fmt: skip
    return rows, settings


def table(rows):
    """The rows as text, one line a policy."""
    lines = [f"{'policy':<10}{'answer':<36}{'right':<7}{'KV read/token':>14}{'needle page held':>18}{'s/token':>9}"]
    for row in rows:
        answer = repr(row["answer"].strip())
        lines.append(
            f"{row['policy']:<10}{answer:<36}{'yes' if row['right'] else 'no':<7}{row['bytes_per_token'] / 1e6:>11.2f} MB"
            f"{row['needle_page_share']:>18.1%}{row['seconds_per_token']:>9.3f}"
        )
    return "\n".join(lines)
