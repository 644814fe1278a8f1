"""Everyday text: how often is the next token under a policy the one that full attention would have taken?

Stretches of plain prose, nothing planted. The first tokens of each are prefilled exactly; the rest is teacher-forced: the text's own tokens are read
one by one under the policy, whatever the model would have said. Each step's prediction is compared with that of full attention, which read the
same tokens: same greedy token or not, the loss of the token that really follows (perplexity), and the KL divergence from full attention's
distribution. The keys and values of the tokens that are read one by one are those which the policy's own layers made: what a layer missed
is missing from the later tokens' keys too, as it is when the model generates.

The stretches of one text are the rows of a batch. Budgets are shares of the prefilled cache's bytes, summaries included, as in ``grid``. The
control reads everything too, but all tokens in one pass of transformers' own attention: how far it is from full attention one token at
a time is what rounding costs, and no policy can be told from full attention below that.
"""

import hashlib
import math
from functools import cached_property
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..live_model import LiveCache, cache_argument, prefill, step, use_pageskip
from ..models import check_fits, head_dim
from . import grid, needle
from .grid import policy_for
from .needle import HAYSTACKS, bytes_read, haystack
from .policies import FullPolicy
from .recall import Setting
from .sweep import SCRATCH, Cells, interval

SETTINGS = (
    Setting("window", 16), Setting("random", 16), Setting("pageskip", 16, "minmax8", 16, "max"), Setting("pageskip", 64, "minmax8", 64, "max"),
    Setting("pageskip", 16, "minmax", 16, "max"),
)  # fmt: skip
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
CONTEXT, TOKENS, STRETCHES = 3584, 256, 4
BLOCK = 32  # neighbouring tokens depend on each other: intervals draw blocks of so many
METRICS = ("agreement", "loss", "kl")


def stretches(tokenizer, text, count, length):
    """Token ids [count, length] int64: pieces of a haystack, evenly spread, none overlapping another. Raises ValueError when it is too short."""
    ids = tokenizer(haystack(text), add_special_tokens=False).input_ids
    if len(ids) < count * length:
        raise ValueError(f"The {text} have {len(ids):,} tokens; {count} stretches of {length:,} need {count * length:,}.")
    apart = len(ids) // count
    return torch.tensor([ids[n * apart : n * apart + length] for n in range(count)])


def compared(logits, exact, following):
    """[3, B] fp32 by ``METRICS``: is the greedy token exact's (0 or 1), the loss of ``following`` and KL(exact || logits) in nats.

    logits, exact: [B, vocabulary], of the policy and of full attention. following: [B] int64, the token that really follows.
    """
    ours, full = (x.float().log_softmax(-1) for x in (logits, exact))
    same = (logits.argmax(-1) == exact.argmax(-1)).float()
    return torch.stack([same, -ours.gather(-1, following[:, None])[:, 0], (full.exp() * (full - ours)).sum(-1)])


class Reading:
    """The stretches of one text [B, context + tokens + 1]: prefilled, and read by full attention, once and only when that is asked for."""

    def __init__(self, model, ids, context, bar):
        self.model, self.ids, self.context, self.bar = model, ids.to(model.device), context, bar
        self.tokens = ids.shape[1] - context - 1

    @cached_property
    def cache(self):
        cache = LiveCache(self.model.config)
        prefill(self.model, self.ids[:, : self.context], cache, progress=not self.bar.disable)
        return cache

    def steps(self, policy, calls):
        """Logits [B, vocabulary] after each token, read one by one under a policy; calls receives the decode calls."""
        self.cache.truncate(self.context)
        with use_pageskip(self.model, policy, record=calls):
            for at in range(self.context, self.context + self.tokens):
                yield step(self.model, self.ids[:, at : at + 1], self.cache)

    def at_once(self):
        """The same logits from transformers' own attention, a block of tokens at a time."""
        self.cache.truncate(self.context)
        for block in self.ids[:, self.context : -1].split(BLOCK, dim=1):
            yield from self.model(block, **{cache_argument(self.model): self.cache}, use_cache=True).logits.unbind(1)

    @cached_property
    def exact(self):
        """(logits of full attention [tokens][B, vocabulary] in the model's dtype, its bytes read per token of a stretch)."""
        calls = []
        return list(self.steps(FullPolicy(), calls)), self._bytes(calls, FullPolicy())

    def _bytes(self, calls, policy):
        config = self.model.config
        read = sum(bytes_read(call, policy, config.num_key_value_heads, head_dim(config), self.model.dtype.itemsize) for call in calls)
        return round(read / self.tokens)

    def cell(self, policy):
        """A cell: each of ``METRICS`` and full (full attention's loss) as block means, and read (bytes per token). policy: None for the control."""
        exact, read = self.exact
        calls, found = [], []
        for n, logits in enumerate(self.at_once() if policy is None else self.steps(policy, calls)):
            following = self.ids[:, self.context + n + 1]
            full = -exact[n].float().log_softmax(-1).gather(-1, following[:, None]).T
            found.append(torch.cat([compared(logits, exact[n], following), full]))
            self.bar.update()
        blocks = torch.stack(found, dim=-1).unflatten(-1, (-1, BLOCK)).mean(-1).flatten(1).double().tolist()  # [4, B * blocks]
        numbers = {name: [float(f"{x:.6g}") for x in row] for name, row in zip((*METRICS, "full"), blocks)}
        return numbers | dict(read=read if policy is None else self._bytes(calls, policy))


def arms(model, context, settings, shares):
    """[(what a row says of it, policy or None)]: the control, then every setting at every share that holds its forced pages."""
    found = [(dict(policy="full", label="everything, at once", budget=1.0), None)]
    for setting in settings:
        for share in shares:
            policy = policy_for(setting, share, context, head_dim(model.config), model.dtype.itemsize)
            if policy is not None:
                about = dict(page_size=setting.page_size, kind=setting.kind, bound_size=setting.bound_size, group=setting.group)
                found.append((dict(policy=setting.policy, label=setting.label, budget=share) | about, policy))
    return found


def scratch_path(model, **options):
    """Where the finished cells of such a run are kept: the name changes with the model, the options, PyTorch and the code of the test."""
    digest = hashlib.sha256(repr((model.config._name_or_path, model.dtype, model.device.type, torch.__version__, sorted(options.items()))).encode())
    for file in (__file__, grid.__file__, needle.__file__):
        digest.update(Path(file).read_bytes())
    return SCRATCH / f"agree_{digest.hexdigest()[:16]}.jsonl"


@torch.inference_mode()
def run_agree(
    model, tokenizer, *, texts=HAYSTACKS, context=CONTEXT, tokens=TOKENS, stretches_each=STRETCHES, settings=SETTINGS, shares=SHARES, scratch=None,
    progress=True,
):  # fmt: skip
    """Read every text under every setting and share. Returns (rows, settings of the run).

    texts: names of haystacks. context: tokens that are prefilled; tokens: those that are then read one by one, in each of ``stretches_each``
    stretches of a text, a multiple of 32. settings: of ``recall.Setting``. shares: of the cache's bytes, 0 to 1. scratch: file of finished
    cells; a stopped run that is given the same one goes on after its last finished cell.

    A row: policy, label, budget (share; 1 for the control), page_size, kind, bound_size, group, tokens (predictions compared), agreement (share
    of equal greedy tokens) with its 95% interval low and high, perplexity, full_perplexity (full attention's, same tokens), kl (mean, nats),
    bytes_per_token (of one stretch, all layers), by_text ({text: dict of agreement, perplexity, full_perplexity, kl}).
    The interval draws blocks of 32 tokens again: it speaks of other places in these texts, not of other texts or models.
    It keeps full attention's logits: tokens * stretches_each * vocabulary numbers of the model's dtype.
    Raises ValueError for what does not fit the model, the texts or each other.
    """
    if tokens < BLOCK or tokens % BLOCK:
        raise ValueError(f"tokens must be a multiple of {BLOCK}, {BLOCK} or more, got {tokens}.")
    if context < 2 or stretches_each < 1:
        raise ValueError(f"A context of 2 tokens or more and 1 stretch or more are needed, got {context} and {stretches_each}.")
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares must lie above 0 and at most at 1, got {list(shares)}.")
    check_fits(model, context + tokens)
    pieces = {text: stretches(tokenizer, text, stretches_each, context + tokens + 1) for text in texts}
    todo, done, cells = arms(model, context, settings, shares), Cells(scratch), {}
    with tqdm(total=len(pieces) * len(todo) * tokens, desc="agree", unit="step", disable=not progress) as bar:
        for text, ids in pieces.items():
            reading = Reading(model, ids, context, bar)
            for about, policy in arms(model, context, settings, shares):  # anew: the random policy draws the same pages after a stop
                key, before = repr((text, *about.values())), bar.n
                cells.setdefault(about["label"], {}).setdefault(about["budget"], {})[text] = done.get(key, lambda: reading.cell(policy))
                bar.update(before + tokens - bar.n)
    rows = [_row(about, cells[about["label"]][about["budget"]], tokens * stretches_each * len(pieces)) for about, _ in todo]
    done.remove()
    return rows, dict(
        model=model.config._name_or_path, dtype=str(model.dtype).removeprefix("torch."), device=model.device.type, texts=list(pieces),
        context=context, tokens_each=tokens, stretches_each=stretches_each,
        method="context prefilled exactly, then the text's own tokens one by one under the policy, compared with full attention's predictions; "
        f"budgets are shares of the cache's bytes, page summaries included; 95% bootstrap intervals over blocks of {BLOCK} tokens",
    )  # fmt: skip


def _row(about, by_text, tokens):
    join = lambda name, texts: torch.tensor([x for text in texts for x in by_text[text][name]], dtype=torch.float64)  # noqa: E731
    numbers = lambda *texts: dict(  # noqa: E731
        agreement=round(join("agreement", texts).mean().item(), 4), perplexity=round(math.exp(join("loss", texts).mean()), 4),
        full_perplexity=round(math.exp(join("full", texts).mean()), 4), kl=round(join("kl", texts).mean().item(), 5),
    )  # fmt: skip
    _, low, high = interval(join("agreement", by_text))
    read = round(sum(cell["read"] for cell in by_text.values()) / len(by_text))
    return about | dict(
        tokens=tokens, **numbers(*by_text), low=round(low, 4), high=round(high, 4), bytes_per_token=read,
        by_text={text: numbers(text) for text in by_text},
    )  # fmt: skip


def table(rows):
    """The rows as text, one line a setting and share."""
    lines = [f"{'':<34}{'budget':>8}{'same token':>12}{'95% interval':>18}{'perplexity':>12}{'full':>8}{'KL':>9}{'MB read/token':>15}"]
    for row in rows:
        between = f"{row['low']:.1%} - {row['high']:.1%}"
        lines.append(
            f"{row['label']:<34}{row['budget']:>8.2%}{row['agreement']:>12.1%}{between:>18}{row['perplexity']:>12.2f}{row['full_perplexity']:>8.2f}"
            f"{row['kl']:>9.4f}{row['bytes_per_token'] / 1e6:>15.2f}"
        )
    return "\n".join(lines)
