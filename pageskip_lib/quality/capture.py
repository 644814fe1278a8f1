"""Real queries, keys and values of a live model while it decodes: what selection quality is measured on.

The text is teacher-forced: the model reads given tokens, and at chosen positions the step is a decode step, whose queries are recorded by a
policy inside ``use_pageskip``. Nothing is patched for that; ``patched_sdpa`` shows the other way, a spy in PyTorch's place.
"""

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .. import runtime
from ..live_model import LiveCache, prefill, step, use_pageskip
from ..models import check_fits
from .policies import FullPolicy

SHIPPED = Path(__file__).resolve().parent.parent.parent / "data" / "captured_smollm2.safetensors"
TENSORS = ("queries", "keys", "values", "lengths", "ids")
FACTS = ("layers", "kv_heads", "scale", "provenance")


@dataclass
class Captured:
    """S decode steps of one sequence in L layers. T: tokens cached at the last step.

    queries: [S, L, 1, Hq, D]; keys, values: [L, Hkv, T, D]; all in the model's dtype, on the CPU, rotary positions applied. lengths: [S] int32, the
    tokens that a step attends to (the first ones). ids: [T] int32 token ids. layers, kv_heads: numbers in the model of what was kept.
    scale: the model's softmax scale. provenance: dict of model, context, dtype, date, versions.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor
    layers: list
    kv_heads: list
    scale: float
    provenance: dict = field(default_factory=dict)

    def save(self, path):
        """Write safetensors, with all that is not a tensor as JSON in the metadata."""
        facts = json.dumps({name: getattr(self, name) for name in FACTS})
        save_file({name: getattr(self, name).contiguous() for name in TENSORS}, path, metadata={"pageskip": facts})
        Path(path).chmod(0o644)  # safetensors writes 0600, which another user of a shared checkout cannot read

    @classmethod
    def load(cls, path=SHIPPED):
        """Read a saved set (default: the one that ships in data/). Raises ValueError when the file is none."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["pageskip"])
                return cls(**{name: file.get_tensor(name) for name in TENSORS}, **facts)
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{Path(path).name} is not a captured set: write one with python -m pageskip_lib.quality capture.") from error


class Recorder(FullPolicy):
    """Reads everything, and keeps the queries of the running step by layer."""

    def __init__(self):
        super().__init__()
        self.queries = {}

    def choose(self, layer_idx, q, keys, lengths, summary):
        self.queries[layer_idx] = q.clone()
        return super().choose(layer_idx, q, keys, lengths, summary)


@torch.inference_mode()
def capture(model, ids, *, steps=8, every=16, layers=None, kv_heads=None, context="", progress=False):
    """Run ``ids`` through a live model and capture ``steps`` decode steps, the last one at the last token.

    model: a transformers causal LM that ``use_pageskip`` takes. ids: token ids (a list, or [T] int64). every: tokens from one captured step to
    the next. layers, kv_heads: which to keep (default: all whose decode can be sparse; all). context: a few words for the provenance.

    Returns a ``Captured``. Raises ValueError when the tokens do not fit the model, or there are too few of them, or a layer or head is missing.
    """
    ids = torch.as_tensor(ids, dtype=torch.int64).flatten().to(model.device)
    check_fits(model, len(ids))
    if steps < 1 or every < 1:
        raise ValueError(f"steps and every must be 1 or more, got {steps} and {every}.")
    lengths = [len(ids) - every * (steps - 1 - n) for n in range(steps)]
    if lengths[0] < 2:
        raise ValueError(f"{steps} steps, {every} tokens apart, need at least {every * (steps - 1) + 2} tokens, got {len(ids)}.")
    cache, recorder, seen = LiveCache(model.config), Recorder(), []
    for done, length in zip([0, *lengths], lengths):
        if length - 1 > done:
            prefill(model, ids[None, done : length - 1], cache, progress=progress and not done)
        with use_pageskip(model, recorder):
            step(model, ids[None, length - 1 : length], cache)
        seen.append(dict(recorder.queries))
    layers = _known("layers", layers, sorted(seen[0]))
    kv_heads = _known("kv_heads", kv_heads, range(cache.layers[layers[0]].keys.shape[1]))
    stored = {name: torch.stack([getattr(cache.layers[layer], name)[0, kv_heads] for layer in layers]).cpu() for name in ("keys", "values")}
    queries = torch.stack([torch.stack([queries[layer] for layer in layers]) for queries in seen])
    queries = queries.unflatten(3, (cache.layers[layers[0]].keys.shape[1], -1))[:, :, :, kv_heads].flatten(3, 4).cpu()
    machine = runtime.machine()
    provenance = dict(
        model=model.config._name_or_path, context=context, dtype=str(model.dtype).removeprefix("torch."), date=date.today().isoformat(),
        device=machine.name, torch=machine.torch, transformers=machine.transformers,
    )  # fmt: skip
    return Captured(
        queries=queries, **stored, lengths=torch.tensor(lengths, dtype=torch.int32), ids=ids.int().cpu(), layers=layers, kv_heads=kv_heads,
        scale=_scale(model, layers), provenance=provenance,
    )  # fmt: skip


def _known(name, wanted, there):
    """The wanted numbers, in order, all of which must be there; all that are there when None."""
    wanted = list(there) if wanted is None else sorted(set(wanted))
    if not wanted or not set(wanted) <= set(there):
        raise ValueError(f"{name} must be among {list(there)}, which this model decodes through pages, got {wanted}.")
    return wanted


def _scale(model, layers):
    """The softmax scale that the model's attention modules of these layers share."""
    scales = {module.scaling for module in model.modules() if getattr(module, "layer_idx", None) in layers and hasattr(module, "scaling")}
    if len(scales) != 1:
        raise ValueError(f"The captured layers must share one softmax scale, got {sorted(scales)}.")
    return scales.pop()


@contextmanager
def patched_sdpa():
    """A spy in the place of ``torch.nn.functional.scaled_dot_product_attention``: short, and blind to layers, caches and masks.

    Yields a list that receives (q [B, Hq, D], k [B, Hkv, T, D]) of every call with one query token, in the order of the layers. k is what the
    call got: transformers hands over KV heads that are not expanded (enable_gqa) as long as there is no mask. Models whose attention is
    "sdpa" call it; what runs inside ``use_pageskip`` decodes elsewhere and is not seen.
    """
    calls, original = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, *args, **kwargs):
        if query.shape[2] == 1:
            calls.append((query[:, :, 0].clone(), key.clone()))
        return original(query, key, value, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = spy
    try:
        yield calls
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
