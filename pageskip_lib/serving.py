"""The decode step inside transformers' continuous batching (``generate_batch``), over its paged cache and under its scheduler.

The engine packs the tokens of many requests into one row, and says with indices where their keys lie in its pool of blocks. A request that
brings one token decodes: its indices become a page table, its pages are scored and selected, and the sparse kernel walks them where they lie.
Page summaries lie beside the pool, one slot for each page of each block. Whatever a step writes, the pages it wrote to are summarised anew up to
their newest token, so a block that is freed and given to another request carries nothing over, and a shared prefix is summarised once.
"""

import inspect
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

from transformers import AttentionInterface, AttentionMaskInterface, ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from .block_summaries import BlockSummaries
from .checks import page_count, spanned
from .dense import dense_decode
from .engine import Blocks, Step
from .live_model import why_exact
from .sparse import sparse_decode

ATTENTION = "pageskip_paged"
# The one name that the engine takes in every version without exchanging it for flash attention. It makes masks for it, and no CUDA graphs.
ENGINE_ATTENTION = "paged|eager"
# Options under which the engine writes blocks without telling the model, or expects a forward that never asks the host.
REFUSED = (
    "use_cuda_graph", "use_async_batching", "varlen_compile_config", "decode_compile_config", "default_compile_level", "q_padding_interval_size",
    "kv_padding_interval_size", "cpu_offload_space",
)  # fmt: skip


class Untouched:
    """Stands in for the engine's cache, so that a layer hands keys and values on as they are: the attention function stores them."""

    def update(self, keys, values, layer_idx, kwargs=None):
        return keys, values


class ServingSession:
    """What ``use_pageskip_serving`` puts into a model. exact_layers: {layer: reason} of layers that stay as the engine has them."""

    def __init__(self, model, policy):
        if policy.reads == "keys":
            raise ValueError(f"The policy {policy.name} ranks pages by the keys themselves; inside the engine a policy gets their summaries only.")
        self.policy = policy
        self.exact_layers = {}
        self.managers = WeakSet()
        self.blocks = self.step = self._given = None  # of the running forward
        self.summaries = WeakKeyDictionary()  # {an engine's cache: {layer: BlockSummaries}}
        self._begin = model.init_continuous_batching
        self._configs = list({id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values())

    def begin(self, *args, **kwargs):
        """In place of the model's ``init_continuous_batching``, through which every way into the engine goes: refuse what cannot be right."""
        given = inspect.signature(self._begin).bind(*args, **kwargs).arguments
        generation = given.get("generation_config") or self._begin.__self__.generation_config
        config = given.get("continuous_batching_config") or getattr(generation, "continuous_batching_config", None) or ContinuousBatchingConfig()
        block = getattr(config, "page_size", None) or config.block_size  # the second name until 5.17
        if block % self.policy.page_size:
            raise ValueError(f"The engine's blocks must hold whole pages of {self.policy.page_size} tokens, but hold {block}.")
        refused = [name for name in REFUSED if getattr(config, name, None) not in (None, False, 0, (False, False))]
        if refused:
            raise ValueError(f"Inside use_pageskip_serving the engine runs without {', '.join(refused)}: it would pass the page summaries by.")
        if (generation.num_return_sequences or 1) > 1:
            raise ValueError("num_return_sequences must be 1 inside use_pageskip_serving: the engine copies blocks without their page summaries.")
        if getattr(self._begin.__self__, "_cached_continuous_batching_manager", None) not in {None, *self.managers}:
            raise RuntimeError("The model keeps an engine from before use_pageskip_serving; call destroy_cached_continuous_batching_manager() first.")
        manager = self._begin(*args, **kwargs)
        self.managers.add(manager)
        return manager

    def before_forward(self, model, args, kwargs):
        """Forward pre-hook: the engine's attention becomes ours until the forward is over."""
        cache = kwargs.get("cache")
        if not isinstance(cache, PagedAttentionCache):
            raise RuntimeError("Inside use_pageskip_serving the model answers through generate_batch and the engine's manager only.")
        if not any(getattr(manager.batch_processor, "cache", None) is cache for manager in self.managers):
            raise RuntimeError("This engine was made before use_pageskip_serving was entered, so its blocks have no page summaries.")
        self.summaries.setdefault(cache, {})
        self.blocks, self._given = Blocks(cache), kwargs
        self._attend_by(ATTENTION)
        return args, kwargs | dict(cache=Untouched())

    def after_forward(self, *_):
        """Forward hook, also after an error."""
        self.blocks = self.step = self._given = None
        self._attend_by(ENGINE_ATTENTION)

    def _attend_by(self, name):
        for config in self._configs:
            config._attn_implementation = name

    def attend(self, module, query, key, value, mask, scaling):
        """query [1, Hq, n, D], key and value [1, Hkv, n, D] of all rows' new tokens, mask [1, 1, n, keys of all rows]. Returns [1, n, Hq, D]."""
        layer, size = module.layer_idx, self.policy.page_size
        step = self.step = self.step or Step(self._given, self.blocks, size)
        group, pools = step.group(layer), step.blocks.tokens(layer)
        for pool, new in zip(pools, (key, value)):
            pool.index_copy_(0, group.write, new[0].transpose(0, 1))
        k, v = (pool.view(-1, size, *pool.shape[1:]).transpose(1, 2) for pool in pools)
        summaries = None
        if self.policy.reads == "summaries" and layer >= self.policy.dense_layers:
            layers = self.summaries[step.blocks.cache]
            if layer not in layers:
                slots = page_count(len(pools[0]), group.stride) * (group.block // size)
                layers[layer] = BlockSummaries(slots, size, self.policy.kind, self.policy.bound_size)
            summaries = layers[layer]
            summaries.update(k, *group.written)
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        for q0, q1, k0, k1 in step.exact:  # each over its own keys: what the mask hides of other rows need not be multiplied first
            if group.read.numel():
                own = [pool[group.read[k0:k1]].transpose(0, 1)[None] for pool in pools]
            else:
                own = [new[:, :, k0:k1] for new in (key, value)]
            out[:, q0:q1] = sdpa_attention_forward(module, query[:, :, q0:q1], *own, mask[..., q0:q1, k0:k1].contiguous(), scaling=scaling)[0]
        if step.decodes:
            lengths, table, slots = group.decoding
            q = query[0].transpose(0, 1)[step.queries]
            summary = lambda **wanted: summaries.of_rows(slots, lengths, **wanted)  # noqa: E731
            pages = self.policy.choose(layer, q, spanned(k, table), lengths, summary)
            where = dict(lengths=lengths, table=table, scale=scaling)
            out[0, step.queries] = dense_decode(q, k, v, **where) if pages is None else sparse_decode(q, k, v, pages, page_size=size, **where)
        return out


def attention_forward(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The registered attention function of a forward that the engine runs."""
    session = module.pageskip_session
    blocks = session.blocks
    reason = why_exact(module, query, kwargs) or (None if blocks.is_full(module.layer_idx) else "sliding-window layer")
    if reason is not None:
        session.exact_layers[module.layer_idx] = reason
        return blocks.attend(module, query, key, value, attention_mask, scaling, kwargs)
    return session.attend(module, query, key, value, attention_mask, scaling), None


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, eager_mask)  # never made: the engine brings the mask


@contextmanager
def use_pageskip_serving(model, policy):
    """Inside this context ``model.generate_batch(...)`` decodes through ``policy``: requests join, leave and share prefixes as the engine has it.

    model, policy: as ``use_pageskip`` takes them; the policy sees the cache's sizes and summaries, not its keys. Yields the ``ServingSession``.
    Rows that bring one token go through the policy (a prompt's last piece may be such a row), all others are exact. Layers with a sliding
    window, and others whose attention is unlike plain attention, stay as the engine has them and are listed in ``exact_layers``.

    The engine runs eagerly: CUDA graphs, compilation, offloading to the CPU and several sequences a request are refused with ValueError, as are
    blocks that are not a multiple of the policy's pages. Leaving the context waits for an engine that still runs. Beside its cache, the
    summaries take memory that the engine does not count: give it num_blocks, or a max_memory_percent that leaves them room.
    """
    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    if any(getattr(module, "pageskip_session", None) for module in modules):
        raise RuntimeError("This model is inside another pageskip context already; leave that one first.")
    session, before = ServingSession(model, policy), model.config._attn_implementation
    hooks = []
    try:
        model.set_attn_implementation(ENGINE_ATTENTION)
        if model.config._attn_implementation != ENGINE_ATTENTION:
            raise ValueError(f"{type(model).__name__} does not take its attention from transformers' attention interface.")
        hooks.append(model.register_forward_pre_hook(session.before_forward, with_kwargs=True))
        hooks.append(model.register_forward_hook(session.after_forward, always_call=True))
        model.init_continuous_batching = session.begin
        for module in modules:
            module.pageskip_session = session
        yield session
    finally:
        for manager in list(session.managers):
            if manager.is_running():
                manager.stop()
        for hook in hooks:
            hook.remove()
        model.__dict__.pop("init_continuous_batching", None)
        for module in modules:
            module.pageskip_session = None
        model.set_attn_implementation(before)
