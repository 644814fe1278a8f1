"""A whole model's token step on the device, captured in one CUDA graph: from a token to the next one, and again, without the host.

The model is transformers' own, its weights are used where they lie. Its forward could be captured as well: called without a mask and
with position_ids it never waits for the host. But it launches about 30 small kernels a layer beside the 7 matrix products, which no
attention is fast enough to hide. So its modules are called here one by one: 4 products, 3 launches between them (fused.py), and the
step (decode.py), of which every layer has one. All layers count their lengths along on the device; the positions are layer 0's.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.functional import linear
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from .cache import CacheFull
from .checks import page_count
from .decode import DecodeStep
from .fused import add_norm, gated, rotate
from .live_model import LiveCache, prefill
from .models import head_dim
from .quality.policies import DENSE_LAYERS
from .runtime import resolve_backend


def empty_caches(model, batch, capacity):
    """Room for ``capacity`` tokens of ``batch`` sequences: a list of (k, v), each [B, Hkv, T, D], one for each layer of ``model``."""
    config = model.config
    shape = (batch, config.num_key_value_heads, capacity, head_dim(config))
    return [tuple(torch.empty(shape, dtype=model.dtype, device=model.device) for _ in "kv") for _ in range(config.num_hidden_layers)]


def joined(tensors):
    """One tensor of several along their first dimension, whose memory they share: if they don't yet, they are moved into it."""
    parts = [tensor.data for tensor in tensors]
    starts = [0, *accumulate(part.nbytes for part in parts)]
    first = parts[0]
    if any(
        part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.data_ptr() != first.data_ptr() + start
        for part, start in zip(parts, starts)
    ):
        whole = torch.cat(parts)
        for tensor, part in zip(tensors, whole.split([len(part) for part in parts])):
            tensor.data = part
        return whole
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def product(*linears):
    """(weight, bias or None) of one matrix product for several ``nn.Linear`` that read the same input."""
    return joined([one.weight for one in linears]), None if linears[0].bias is None else joined([one.bias for one in linears])


def products(layer):
    """A layer's four matrix products, each as (weight, bias): to q, k and v; from attention's out; to gate and up; down."""
    attention, mlp = layer.self_attn, layer.mlp
    together = ((attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))
    return [product(*linears) for linears in together]


def join_projections(model):
    """Move the projections of ``model`` that read the same input next to each other in memory. A ``DecodeLoop`` does so where it is not done."""
    check_model(model)
    for layer in model.model.layers:
        products(layer)


def check_model(model):
    """The loop calls the model's modules itself, so it must know them: what they are, and that nothing lies between."""
    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM):
        raise TypeError(f"model must be a LlamaForCausalLM or a Qwen2ForCausalLM, got {type(model).__name__}.")
    if any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or ()):
        raise ValueError("model must have full attention in every layer, got some with a sliding window.")
    if model.config.hidden_act != "silu":
        raise ValueError(f"model must have hidden_act 'silu', got {model.config.hidden_act!r}.")
    for name, module in model.named_modules():
        if name.endswith("_proj") and type(module) is not torch.nn.Linear:
            raise TypeError(f"model's projections must be nn.Linear, neither quantised nor adapted, got {type(module).__name__} as {name}.")


@dataclass
class Layer:
    """What the loop needs of one layer: its two norms, its four products as (weight, bias), and its attention's ``DecodeStep``."""

    input_norm: torch.nn.Module
    feed_norm: torch.nn.Module
    qkv: tuple
    out: tuple
    gate_up: tuple
    down: tuple
    step: DecodeStep


class DecodeLoop:
    """Greedy decoding of a Llama or Qwen2 model, one ``DecodeStep`` a layer.

    model: ``LlamaForCausalLM`` or ``Qwen2ForCausalLM`` with full attention in all layers. Its projections that read the same input move next
    to each other in memory, once; it works as before, and nothing is held twice. caches: as ``empty_caches`` makes them; the caller's, and
    written to. Several loops may share them, one at a time. budget, page_size, kind, group, backend: as in ``DecodeStep``.
    dense_layers: the first so many layers read everything.

    tokens: [B] int64 on the device, the newest token of each sequence, which is not in the caches yet. ``prefill`` sets it, and so may you.

    A call puts it into the caches and replaces it by the one that follows. Returns the logits [B, vocabulary], which the next call overwrites.
    """

    @torch.inference_mode(False)
    def __init__(self, model, caches, budget, *, page_size=64, kind="minmax8", group="max", dense_layers=DENSE_LAYERS, backend="auto"):
        check_model(model)
        self.model, self.layers = model, []
        k, _ = caches[0]
        if len(caches) != model.config.num_hidden_layers or k.dtype != model.dtype or k.device != model.device:
            raise ValueError(
                f"caches must hold k and v of {model.config.num_hidden_layers} layers, {model.dtype} on {model.device}, "
                f"got {len(caches)}, {k.dtype} on {k.device}."
            )
        everything = replace(budget, pages=max(budget.pages, page_count(k.shape[2], page_size)))
        self.backend = resolve_backend(backend, k)
        self.tokens = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)
        for n, (layer, (k, v)) in enumerate(zip(model.model.layers, caches)):
            step = DecodeStep(
                k, v, torch.zeros(k.shape[0], dtype=torch.int32, device=k.device), everything if n < dense_layers else budget,
                heads=model.config.num_attention_heads, page_size=page_size, kind=kind, group=group, scale=layer.self_attn.scaling, backend=backend,
            )  # fmt: skip
            self.layers.append(Layer(layer.input_layernorm, layer.post_attention_layernorm, *products(layer), step))
        self._graphs = {}

    @property
    def steps(self):
        """The ``DecodeStep`` of each layer."""
        return [layer.step for layer in self.layers]

    @property
    def selects(self):
        """Will the next call choose pages, in the layers that may?"""
        return self.steps[-1].selects

    @torch.no_grad()
    def set_lengths(self, lengths):
        """Make lengths [B] the valid tokens of each sequence in every layer, and summarise the caches anew."""
        for step in self.steps:
            step.set_lengths(lengths)

    @torch.no_grad()
    def prefill(self, prompts):
        """Fill the caches by transformers' own, exact forward, one prompt after the other: they need no padding. Sets ``tokens``.

        prompts: B tensors [n] int64 of token ids, of any lengths from 1 to the caches' capacity.
        """
        batch, _, capacity, _ = self.steps[0].k.shape
        if len(prompts) != batch or any(ids.dim() != 1 or not 1 <= len(ids) <= capacity for ids in prompts):
            got = [list(ids.shape) for ids in prompts]
            raise ValueError(f"prompts must be {batch} tensors of 1 to {capacity} token ids, got shapes {got}.")
        for row, ids in enumerate(prompts):
            cache = LiveCache(self.model.config)
            logits = prefill(self.model, ids[None].to(self.tokens.device), cache)
            for step, filled in zip(self.steps, cache.layers):
                step.k[row, :, : len(ids)], step.v[row, :, : len(ids)] = filled.keys[0], filled.values[0]
            self.tokens[row] = logits[0].argmax()
        self.set_lengths(torch.tensor([len(ids) for ids in prompts], dtype=torch.int32, device=self.tokens.device))

    @torch.no_grad()
    def _token(self, attend):
        """One token through the model. attend: from a ``DecodeStep`` that holds q, k_new and v_new to its out [B, Hq, D]."""
        model, backend = self.model.model, self.backend
        hidden = model.embed_tokens(self.tokens)
        # Before layer 0 counts the token that is appended: its length is the token's position.
        cos, sin = (angle[:, 0] for angle in model.rotary_emb(hidden, self.steps[0].lengths.long()[:, None]))
        x = None
        for layer in self.layers:
            step = layer.step
            normed = add_norm(hidden, x, layer.input_norm.weight, layer.input_norm.variance_epsilon, backend)
            rotate(linear(normed, *layer.qkv), cos, sin, step.q, step.k_new, step.v_new, backend)
            x = linear(attend(step).flatten(1), *layer.out)
            normed = add_norm(hidden, x, layer.feed_norm.weight, layer.feed_norm.variance_epsilon, backend)
            x = linear(gated(linear(normed, *layer.gate_up), backend), *layer.down)
        logits = self.model.lm_head(add_norm(hidden, x, model.norm.weight, model.norm.variance_epsilon, backend))
        self.tokens.copy_(logits.argmax(-1))
        return logits

    def _run(self, selects):
        return self._token(lambda step: step._run(selects and step.dense_up_to < step.k.shape[2]))

    def capture(self):
        """Capture the token step in CUDA graphs, which later calls replay; returns self. Caches, lengths and tokens stay as they are.

        There are two, as of a ``DecodeStep``: one reads everything, for short sequences, and one selects. The host, which counts, picks.
        """
        if self.backend != "triton" or not self.tokens.is_cuda:
            raise RuntimeError(f"A CUDA graph needs Triton kernels on a CUDA GPU; this loop has backend {self.backend!r} on {self.tokens.device}.")
        if self.model.model.rotary_emb.rope_type == "dynamic":
            raise ValueError("A model with rope_type 'dynamic' asks the host at every token for the longest sequence; that cannot be captured.")
        changed = [self.tokens, *(tensor for step in self.steps for tensor in step._state())]
        kept = [tensor.clone() for tensor in changed]
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # one pool: the graphs are never replayed at the same time
        last = self.steps[-1]
        for selects in (False, True)[: 2 if last.dense_up_to < last.k.shape[2] else 1]:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(selects)  # compiles what there is to compile; the token that it appends lies past the length again in a moment
                for tensor, before in zip(changed, kept):
                    tensor.copy_(before)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._run(selects)
            self._graphs[selects] = graph, logits
        return self

    def _check_room(self, count):
        step = self.steps[0]
        if count > step.room:
            capacity = step.k.shape[2]
            raise CacheFull(f"The caches hold {capacity} tokens a sequence, with room for {step.room} more, not {count}; nothing was appended.")

    def __call__(self):
        self._check_room(1)
        selects = self.selects
        for step in self.steps:
            step.room -= 1
        if not self._graphs:
            return self._run(selects)
        graph, logits = self._graphs[selects]
        graph.replay()
        return logits

    def generate(self, count):
        """Decode ``count`` tokens. Returns [B, count] int64 on the device: ``tokens`` as it was first, then those that follow.

        All of them are in the caches then, and ``tokens`` is the next. The host waits for nothing, so nothing stops at an end token.
        """
        self._check_room(count)
        made = torch.empty(len(self.tokens), count, dtype=torch.int64, device=self.tokens.device)
        for n in range(count):
            made[:, n] = self.tokens
            self()
        return made
