"""The needle in every cell of a grid: haystack, wording, context and depth, each with several codes; every policy at every budget.

Codes are the rows of one batch: prompts of one length that end in one question, so one prefill and one question answer for all. On a GPU
the cells of a context and wording share a batch, on a CPU each is one by itself.
Budgets are shares of the cache's bytes, summaries included, so settings with equal budgets read alike. Every cell is also asked with
everything read, the control; a code that the control misses says nothing about a policy, so
it stays in the rows and out of the counts.
"""

import hashlib
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..checks import page_count
from ..live_model import LiveCache, prefill, step, use_pageskip
from ..models import check_fits, head_dim
from ..selection import LOCAL_TOKENS, Budget
from . import needle
from .needle import ANSWER_TOKENS, HAYSTACKS, QUESTION, STATEMENT, bytes_read, haystack, is_right, plant
from .policies import AdaptivePolicy, CoarsePolicy, FullPolicy, PageskipPolicy, RandomPolicy, WindowPolicy
from .recall import Setting
from .sweep import SCRATCH, Cells

WORDINGS = {
    "verbatim": (STATEMENT, QUESTION),
    "reworded": (("\n\nUse code", " to open the vault.\n\n"), "\n\nTo open the vault, use code"),
}
SETTINGS = (
    Setting("window", 16), Setting("random", 16), Setting("pageskip", 16, "minmax", 16, "max"), Setting("pageskip", 16, "minmax8", 16, "max"),
    Setting("pageskip", 16, "minmax8", 16, "sum"), Setting("pageskip", 16, "mean_radius", 16, "max"), Setting("pageskip", 64, "minmax8", 64, "max"),
    Setting("pageskip", 64, "minmax8", 16, "max"), Setting("pageskip", 64, "minmax8", 16, "sum"), Setting("pageskip", 64, "minmax8", 8, "max"),
    Setting("pageskip", 64, "mean_std", 64, "max"), Setting("coarse", 16, group="sum"), Setting("coarse", 16, group="max"),
    Setting("coarse", 64, group="sum"), Setting("coarse", 64, group="max"),
)  # fmt: skip
SHARES = (1 / 8, 3 / 16, 1 / 4)
ADAPTIVE = ((16, 1 / 128), (16, 1 / 512), (16, 1 / 2048), (64, 1 / 256))  # page size, least share of a page
CAP = 1 / 2  # of an adaptive list
CONTEXTS, DEPTHS, CODES = (2048, 4096, 7168), (0.0, 0.25, 0.5, 0.75, 1.0), 10


@dataclass(frozen=True)
class Cell:
    """One place for the needle. context: tokens of the prompt; depth: 0 (start) to 1 (end); codes: how many are planted, one in each row."""

    hay: str
    wording: str
    context: int
    depth: float
    codes: int = CODES


def cells(contexts=CONTEXTS, depths=DEPTHS, hays=HAYSTACKS, wordings=tuple(WORDINGS), codes=CODES):
    """Every ``Cell`` of a grid, the shortest contexts first."""
    return [Cell(hay, wording, context, depth, codes) for context in contexts for hay in hays for wording in wordings for depth in depths]


def codes_for(cell):
    """The cell's codes: different numbers of four digits that its haystack does not contain, the same on every machine."""
    seed = int.from_bytes(hashlib.sha256(repr(cell).encode()).digest()[:4], "big")
    drawn = (torch.randperm(9000, generator=torch.Generator().manual_seed(seed)) + 1000).tolist()
    text = haystack(cell.hay)
    return [str(code) for code in drawn if str(code) not in text][: cell.codes]


def policy_for(setting, share, context, dim, element_size, least=None):
    """The policy of a ``Setting`` that reads at most ``share`` of a cache of ``context`` tokens, or None where its forced pages do not fit.

    least: of an ``AdaptivePolicy``, which then stands for the setting's.
    """
    pages, local = setting.pages_within(share, context, dim, element_size), page_count(LOCAL_TOKENS, setting.page_size) + 1
    if pages < 1 + local:
        return None
    budget = Budget(pages, sink=1, local=local)
    if least:
        return AdaptivePolicy(budget, setting.page_size, kind=setting.kind, bound_size=setting.bound_size, least=least)
    if setting.policy == "pageskip":
        return PageskipPolicy(budget, setting.page_size, kind=setting.kind, bound_size=setting.bound_size, group=setting.group)
    if setting.policy == "coarse":
        return CoarsePolicy(budget, setting.page_size, group=setting.group)
    return {"window": WindowPolicy, "random": RandomPolicy}[setting.policy](budget, setting.page_size)


def needle_shares(calls, prompts, page_size):
    """Of the recorded calls that chose pages, for each sequence: the share of KV heads' lists that hold every page of its code; 1 without any."""
    listed = [pages.pages for _, _, pages in calls if pages is not None]
    if not listed:
        return [1.0] * len(prompts)
    ends = [(prompt.code_tokens[0] // page_size, prompt.code_tokens[-1] // page_size) for prompt in prompts]  # four digits: two pages at most
    wanted = torch.tensor(ends, dtype=torch.int32, device=listed[0].device)[:, None, :, None]
    held = [(pages[:, :, None] == wanted).any(-1).all(-1).double().mean(1) for pages in listed]
    return torch.stack(held).mean(0).tolist()


@torch.inference_mode()
def ask_all(model, tokenizer, prompts, policy, cache):
    """Put each row's question to a cache that holds the rows' bodies, token by token under the policy, and decode greedily.

    Returns (answers, bytes per token of a sequence, ``needle_shares``). The cache is rolled back to the bodies first.
    """
    cache.truncate(len(prompts[0].body))
    calls, answers, tokens = [], [], len(prompts[0].question) + ANSWER_TOKENS - 1
    question = torch.tensor([prompt.question for prompt in prompts], device=model.device)
    with use_pageskip(model, policy, record=calls):
        for position in range(tokens):
            token = question[:, position] if position < question.shape[1] else answers[-1]
            chosen = step(model, token[:, None], cache).argmax(-1)
            if position >= question.shape[1] - 1:
                answers.append(chosen)
    config = model.config
    read = sum(bytes_read(call, policy, config.num_key_value_heads, head_dim(config), model.dtype.itemsize) for call in calls)
    texts = [tokenizer.decode(row) for row in torch.stack(answers, dim=1).tolist()]
    return texts, round(read / tokens), needle_shares(calls, prompts, policy.page_size)


def run_cells(model, tokenizer, together, settings, shares, adaptive):
    """Rows of cells that share a context and a wording, asked as one batch: the control, every setting at every budget that holds its forced
    pages, and adaptive lists, which have no budget but what they come to."""
    context, (statement, question) = together[0].context, WORDINGS[together[0].wording]
    planted = [(cell, code) for cell in together for code in codes_for(cell)]
    prompts = [
        plant(tokenizer, haystack(cell.hay), context=context, depth=cell.depth, code=code, statement=statement, question=question)
        for cell, code in planted
    ]
    cache = LiveCache(model.config)
    prefill(model, torch.tensor([prompt.body for prompt in prompts], device=model.device), cache)
    policies = [(FullPolicy(), dict(policy="full", label="everything", budget=1.0))]
    for setting in settings:
        about = dict(page_size=setting.page_size, kind=setting.kind, bound_size=setting.bound_size, group=setting.group)
        for share in shares:
            policy = policy_for(setting, share, context, head_dim(model.config), model.dtype.itemsize)
            if policy is not None:
                policies.append((policy, dict(policy=setting.policy, label=setting.label, budget=share) | about))
    for page_size, least in adaptive:
        setting = Setting("pageskip", page_size, "minmax8", page_size, "softmax_sum")
        policy = policy_for(setting, CAP, context, head_dim(model.config), model.dtype.itemsize, least)
        about = dict(page_size=page_size, kind="minmax8", bound_size=page_size, group="softmax_sum", least=least)
        if policy is not None:
            policies.append((policy, dict(policy="adaptive", label=f"pages from 1/{1 / least:.0f} on, page {page_size}", budget=CAP) | about))
    asked = [(about, *ask_all(model, tokenizer, prompts, policy, cache)) for policy, about in policies]
    rows = []
    for cell in together:
        mine = [n for n, (owner, _) in enumerate(planted) if owner == cell]
        codes = [planted[n][1] for n in mine]
        where = dict(hay=cell.hay, wording=cell.wording, context=context, depth=cell.depth, asked=len(mine))
        known = [n for n in mine if is_right(asked[0][1][n], planted[n][1])]  # by the control
        found = [
            where | about | dict(
                right=sum(is_right(answers[n], planted[n][1]) for n in mine), control_right=len(known),
                kept=sum(is_right(answers[n], planted[n][1]) for n in known), bytes_per_token=read,
                needle_page_share=round(math.fsum(held[n] for n in mine) / len(mine), 4), answers=[answers[n] for n in mine], codes=codes,
            )
            for about, answers, read, held in asked
        ]  # fmt: skip
        rows += found
    return rows


def scratch_path(model, todo, settings, shares, adaptive):
    """Where the finished cells of such a grid are kept: the name changes with the model, the grid, PyTorch and the code of the test."""
    facts = model.config._name_or_path, model.dtype, str(model.device.type), torch.__version__, todo, settings, shares, adaptive
    digest = hashlib.sha256(repr(facts).encode())
    for file in (__file__, needle.__file__):
        digest.update(Path(file).read_bytes())
    return SCRATCH / f"needle_{digest.hexdigest()[:16]}.jsonl"


def run_grid(model, tokenizer, todo=None, settings=SETTINGS, shares=SHARES, adaptive=ADAPTIVE, *, scratch=None, progress=True):
    """Ask every cell. Returns (rows, settings). A stopped run that is given the same ``scratch`` file goes on after its last finished batch.

    A row: hay, wording, context, depth, policy, label, budget (share of the cache's bytes; 1 for the control), page_size, kind, bound_size,
    group, least (of an adaptive list), asked (codes), right, control_right, kept (right here and there), bytes_per_token (of a sequence),
    needle_page_share, answers and codes.
    Raises ValueError when a context does not fit the model or a haystack.
    """
    todo = cells() if todo is None else todo
    check_fits(model, max(cell.context for cell in todo) + ANSWER_TOKENS)
    done, rows, batches = Cells(scratch), [], {}
    for cell in todo:
        batches.setdefault((cell.context, cell.wording) if model.device.type == "cuda" else cell, []).append(cell)
    for together in tqdm(batches.values(), desc="batches of cells", disable=not progress):
        rows += done.get(repr(together), lambda together=together: run_cells(model, tokenizer, together, settings, shares, adaptive))
    done.remove()
    return rows, dict(
        model=model.config._name_or_path, dtype=str(model.dtype).removeprefix("torch."), device=model.device.type, cells=len(todo),
        method="body prefilled exactly, question and answer token by token under the policy; budgets are shares of the cache's bytes, "
        "page summaries included; right: the first number of the answer is the code",
    )  # fmt: skip


def summarized(rows):
    """One dict a setting and budget, over the cells whose code the control finds: kept, known (codes that the control finds), cells,
    bytes_per_token (mean), read (mean share of the control's bytes), needle_page_share (mean), and what makes the setting.

    rows: as ``run_grid`` returns them, the control's among them.
    """
    place = lambda row: (row["hay"], row["wording"], row["context"], row["depth"])  # noqa: E731
    whole = {place(row): row["bytes_per_token"] for row in rows if row["policy"] == "full"}
    groups = {}
    for row in rows:
        if row["control_right"]:
            groups.setdefault((row["label"], row["budget"]), []).append(row)
    return [
        {name: group[0].get(name) for name in ("label", "budget", "policy", "page_size", "kind", "bound_size", "group")} | dict(
            kept=sum(row["kept"] for row in group), known=sum(row["control_right"] for row in group), cells=len(group),
            bytes_per_token=statistics.fmean(row["bytes_per_token"] for row in group),
            read=statistics.fmean(row["bytes_per_token"] / whole[place(row)] for row in group),
            needle_page_share=statistics.fmean(row["needle_page_share"] for row in group),
        )
        for group in groups.values()
    ]  # fmt: skip


def by_depth(rows, hay, wording, context, label, budget):
    """{depth: row} of one text, wording, context, setting and budget."""
    place = dict(hay=hay, wording=wording, context=context, label=label, budget=budget)
    return {row["depth"]: row for row in rows if place.items() <= row.items()}


def table(rows):
    """One line a setting and budget: of the codes that the control finds, how many it finds too; then what the control missed."""
    lines = [f"{'':<40}{'budget':>8}{'codes kept':>16}{'MB read/token':>15}{'needle page held':>18}"]
    for of in summarized(rows):
        codes = f"{of['kept']} of {of['known']}"
        lines.append(f"{of['label']:<40}{of['budget']:>8.1%}{codes:>16}{of['bytes_per_token'] / 1e6:>15.2f}{of['needle_page_share']:>18.1%}")
    controls = [row for row in rows if row["policy"] == "full"]
    missed = sum(row["asked"] - row["control_right"] for row in controls)
    without = sum(not row["control_right"] for row in controls)
    lines.append(f"{len(controls)} cells; the control misses {missed} of their {sum(row['asked'] for row in controls)} codes, all of them in {without} cells")
    return "\n".join(lines)
