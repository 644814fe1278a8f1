"""A whole model's token step: exact attention against pageskip, split into weights, attention and the rest."""

import gc
import time

import torch
from torch.nn.functional import linear

from .. import costs, models
from ..loop import DecodeLoop, empty_caches, join_projections
from ..quality.policies import DENSE_LAYERS
from ..runtime import default_device
from ..summaries import entry_bytes
from ..token_time import model_named
from . import room
from .dense import DTYPES, REPEATS
from .peers import OURS, arms
from .step import BUDGET, PAGE
from .timing import kernel_names, sm_clock, time_arms

SERVED, EVERY, NONE, PRODUCTS = "pageskip", "pageskip in every layer", "no attention", "matrix products"
SPARE = 64  # of the context's tokens a measurement starts with so many fewer: every replay of a loop appends one
WALL = 16  # tokens of the run that the host's clock times
SECONDS_EACH = 0.02  # of a measurement: the launch of a graph with hundreds of kernels, which comes first, vanishes in it
RANDOM = "DeepSeek-R1-Distill-Qwen-1.5B"
TINY = costs.ModelShape("tiny", 3, 4, 2, 64, 256, 512, 1024, tied=False, qkv_bias=True)
COLUMNS = dict(microseconds="step", products="products", attention="attention", rest="rest", tokens_per_s="tokens/s")
RATIOS = dict(speed_up="over flash", speed_up_best="over best")
# model: [(batch, tokens), ...]
SHAPES = {
    "cuda": {models.TITLE: [(1, 8192), (8, 8192), (32, 8192)], RANDOM: [(32, 65536), (8, 65536), (1, 65536), (1, 262144)]},
    "cpu": {TINY.name: [(2, 4096)], models.TITLE: [(1, 8192)]},
}


def random_model(shape, device, dtype):
    """A Llama or (with ``qkv_bias``) Qwen2 of a ``costs.ModelShape``, with random weights: right for a time, of no use for an answer."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    config = (Qwen2Config if shape.qkv_bias else LlamaConfig)(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.feed_forward, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def memory(name, batch, tokens, dtype):
    """Bytes that ``measure_generate`` takes: the weights, and one set of caches with the summaries of three loops."""
    shape = TINY if name == TINY.name else model_named(name)
    summaries = 3 * entry_bytes("minmax8", shape.head_dim, dtype.itemsize) / (2 * PAGE * shape.head_dim * dtype.itemsize)
    return shape.parameters * dtype.itemsize + batch * tokens * shape.kv_bytes(dtype.itemsize) * (1 + summaries)


def model_of(name, device, dtype):
    """(model, "trained" or "random")."""
    if name == models.TITLE:
        return models.load_model(device=device, dtype=dtype)[0], "trained"
    return random_model(TINY if name == TINY.name else costs.MODELS[name], device, dtype), "random"


def weight_bytes(model):
    """(held, read by a step): all parameters, and all but an input embedding that is no output head as well, of which one row a token is read."""
    held = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return held, held - (embedding.nbytes if embedding is not head else 0)


def products(loop):
    """A call that does the token step's matrix products, one after another, and nothing else."""
    layer = loop.layers[0]
    sizes = [pair[0].shape[1] for pair in (layer.qkv, layer.out, layer.down)]
    hidden, attended, fed = (loop.steps[0].k.new_empty(len(loop.tokens), size).normal_() for size in sizes)

    def call():
        for layer in loop.layers:
            linear(hidden, *layer.qkv)
            linear(attended, *layer.out)
            linear(hidden, *layer.gate_up)
            linear(fed, *layer.down)
        return loop.model.lm_head(hidden)

    return torch.no_grad()(call)


def attending(arm, loop, tokens):
    """``DecodeLoop._token``'s attend by another ``Arm``: put the token into the cache at ``tokens`` - 1, attend to so many.

    It always appends at the same place, and keeps neither summaries nor lengths: that much less to do than a real loop.
    """
    position = torch.full((1,), tokens - 1, dtype=torch.int64, device=loop.tokens.device)
    calls = {id(step): arm.calls([(step.q, step.k[:, :, :tokens], step.v[:, :, :tokens])])[0] for step in loop.steps}

    def attend(step):
        step.k.index_copy_(2, position, step.k_new[:, :, None])
        step.v.index_copy_(2, position, step.v_new[:, :, None])
        return calls[id(step)]()

    return attend


def _peak(device):
    """Bytes of GPU memory that were in use at most, and that PyTorch had set aside for it."""
    if device != "cuda":
        return {}
    return dict(peak_allocated=torch.cuda.max_memory_allocated(), peak_reserved=torch.cuda.max_memory_reserved())


def _served(model, caches, start, device):
    """A loop as one would run it, captured and run once. Returns (loop, microseconds a token by the host's clock, peak memory)."""
    loop = DecodeLoop(model, caches, BUDGET, page_size=PAGE)
    for k, v in caches:
        k.normal_()
        v.normal_()
    loop.set_lengths(start)
    if device == "cuda":
        loop.capture()
    loop.generate(2)
    _wait(device)
    begun = time.perf_counter()
    loop.generate(WALL)
    _wait(device)
    seconds = time.perf_counter() - begun
    return loop, seconds / WALL * 1e6, _peak(device)


def _wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def _release(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_generate(model, name, weights, batch, tokens, device, progress=lambda: None):
    """Rows of one shape: every arm is a whole token step over the same caches, filled with random numbers."""
    _release(device)
    caches = empty_caches(model, batch, tokens)
    start = torch.full((batch,), tokens - SPARE, dtype=torch.int32, device=device)
    served, wall, peak = _served(model, caches, start, device)
    every, dense = (DecodeLoop(model, caches, BUDGET, page_size=PAGE, dense_layers=layers) for layers in (0, len(caches)))
    loops = (served, every, dense)
    for loop in loops:
        loop.set_lengths(start)
    calls = {arm: [lambda loop=loop: loop._run(loop.selects)] for arm, loop in ((SERVED, served), (EVERY, every), (OURS, dense))}
    exact = [OURS]
    for arm in arms(device, model.dtype):
        if arm.name.startswith("SDPA"):
            attend = attending(arm, dense, tokens - SPARE + 1)
            calls[arm.name] = [lambda attend=attend: dense._token(attend)]
            exact.append(arm.name)
    calls[NONE] = [lambda: dense._token(lambda step: step.q)]  # for an output, something of its shape
    calls[PRODUCTS] = [products(dense)]

    def rewind():
        for loop in loops:
            for step in loop.steps:
                step.lengths.copy_(start)

    times = time_arms(calls, repeats=REPEATS, seconds_each=SECONDS_EACH, before=rewind, progress=progress)
    rewind()
    clock = sm_clock()
    took = {arm: timing.median for arm, timing in times.items()}
    flash = next(arm for arm in exact if arm.startswith("SDPA"))
    held, read = weight_bytes(model)
    config, step = model.config, served.steps[0]
    row = dict(
        model=name, weights=weights, layers=len(caches), heads=config.num_attention_heads, kv_heads=step.k.shape[1], head_dim=step.k.shape[3],
        dtype=str(model.dtype).removeprefix("torch."), batch=batch, tokens=tokens, page_size=PAGE, budget_pages=BUDGET.pages,
        selects=every.selects, weight_bytes=held, weight_bytes_read=read, kv_bytes=sum(k.nbytes + v.nbytes for k, v in caches),
        summary_bytes=sum(step.summary.bytes for step in served.steps), sm_mhz=clock,
    )  # fmt: skip
    rows = []
    for arm, timing in times.items():
        made = row | dict(arm=arm, microseconds=round(timing.median, 2), low=round(timing.low, 2), high=round(timing.high, 2))
        if arm != PRODUCTS:
            made |= dict(products=round(took[PRODUCTS], 2), rest=round(took[NONE] - took[PRODUCTS], 2))
            made |= dict(attention=round(timing.median - took[NONE], 2))
        if arm not in (NONE, PRODUCTS):
            made |= dict(
                tokens_per_s=round(batch * 1e6 / timing.median, 1), speed_up=round(took[flash] / timing.median, 3),
                speed_up_best=round(min(took[one] for one in exact) / timing.median, 3),
            )  # fmt: skip
        if arm == SERVED:
            made |= dict(wall_microseconds=round(wall, 2), dense_layers=DENSE_LAYERS) | peak
        kernels = kernel_names(calls[arm][0]) if device == "cuda" else []
        rows.append(made | dict(kernels=kernels))
    return rows


def run_generate(*, shapes=None, progress=lambda: None):
    """Measure the token step of each model at every shape. Returns (rows, settings).

    A row: model, weights ("trained" or "random"), layers, heads, kv_heads, head_dim, dtype, batch, tokens, page_size, budget_pages, selects (are
    the sequences long enough to choose pages from?), arm, microseconds a token step with low and high quartile, and kernels (what ran on a GPU).

    The split: products (the matrix products alone), rest (what the step takes without attention, over the products), attention (what it takes
    with it, over that). tokens_per_s of all sequences together; speed_up over SDPA's flash backend, speed_up_best over the fastest exact arm.
    Bytes: weight_bytes held, weight_bytes_read by a step, kv_bytes, summary_bytes; of the arm "pageskip" peak_allocated and peak_reserved, from
    before its caches were made to after its captured loop had run, and wall_microseconds, a token of that run by the host's clock.

    Arms: "pageskip" reads everything in the first ``dense_layers`` layers, as a real model needs it, "pageskip in every layer" nowhere.
    All share one set of caches. Keys and values are random in all of them, the weights where the row says so.
    """
    device = default_device()
    dtype, rows = DTYPES[device][0], []
    every = [(name, *size) for name, sizes in (shapes or SHAPES[device]).items() for size in sizes]
    todo, left_out = room.split(every, lambda point: memory(*point, dtype), lambda point: f"{point[0]}, {point[1]} x {point[2]:,}")
    for name in dict.fromkeys(point[0] for point in todo):
        model, weights = model_of(name, device, dtype)
        join_projections(model)  # before memory is looked at: what they leave behind, PyTorch would keep for later
        for batch, tokens in (point[1:] for point in todo if point[0] == name):
            rows += measure_generate(model, name, weights, batch, tokens, device, progress)
        del model
        _release(device)
    graph = "each arm one CUDA graph of the whole token step" if device == "cuda" else "eager, wall clock"
    return rows, dict(left_out=left_out, method=f"embedding to next token; median of {REPEATS}, arms interleaved, random keys and values; {graph}")


def table(rows):
    """One block a shape: a line an arm with its split and its speed-ups, then what memory held."""
    lines = []
    for model, batch, tokens in dict.fromkeys((row["model"], row["batch"], row["tokens"]) for row in rows):
        block = [row for row in rows if (row["model"], row["batch"], row["tokens"]) == (model, batch, tokens)]
        one = block[0]
        lines.append(
            f"{model} ({one['weights']} weights), {one['layers']} layers, {one['dtype']}, {batch} x {tokens:,}, page {one['page_size']}, "
            f"{one['budget_pages']} pages{'' if one['selects'] else ': too short to choose pages from'}"
        )
        lines.append(f"{'microseconds':<26}" + "".join(f"{head:>11}" for head in (*COLUMNS.values(), *RATIOS.values())))
        for row in block:
            cells = [f"{row[name]:>11,.0f}" if name in row else f"{'-':>11}" for name in COLUMNS]
            cells += [f"{row[name]:>10.2f}x" if name in row else f"{'-':>11}" for name in RATIOS]
            lines.append(f"{row['arm']:<26}" + "".join(cells))
        lines.append(memory_line(next(row for row in block if row["arm"] == SERVED)))
    return "\n".join(lines)


def memory_line(row):
    """What the loop's data take, and on a GPU the most that memory held, over them."""
    parts = {"weights": row["weight_bytes"], "KV": row["kv_bytes"], "summaries": row["summary_bytes"]}
    held = sum(parts.values())
    text = " + ".join(f"{name} {size / 1e9:.3f}" for name, size in parts.items()) + f" = {held / 1e9:.3f} GB"
    if "peak_allocated" in row:
        text += "".join(f"; {name} at most {row[f'peak_{name}'] / held:.3f} of it" for name in ("allocated", "reserved"))
    return text + f"; a generated token {row['wall_microseconds']:,.0f} us by the host's clock"
