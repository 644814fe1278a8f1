"""The decode step inside transformers' continuous batching (``generate_batch``), over its paged cache and under its scheduler.

The engine packs the tokens of many requests into one row, and says with indices where their keys lie in its pool of blocks. A request that
brings one token decodes: its indices become a page table, its pages are scored and selected, and the sparse kernel walks them where they lie.
Page summaries lie beside the pool, one slot for each page of each block. Whatever a step writes, the pages it wrote to are summarised anew up to
their newest token, so a block that is freed and given to another request carries nothing over, and a shared prefix is summarised once.
"""

import inspect
from contextlib import contextmanager
from functools import cached_property
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import AttentionInterface, AttentionMaskInterface, ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.eager_paged import eager_paged_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from .bounds8 import channel_sizes, encode
from .checks import page_count, spanned
from .dense import dense_decode
from .live_model import why_exact
from .sparse import sparse_decode
from .summaries import PageSummary, summarize_pages

ATTENTION = "pageskip_paged"
# The one name that the engine takes in every version without exchanging it for flash attention. It makes masks for it, and no CUDA graphs.
ENGINE_ATTENTION = "paged|eager"
# Options under which the engine writes blocks without telling the model, or expects a forward that never asks the host.
REFUSED = (
    "use_cuda_graph", "use_async_batching", "varlen_compile_config", "decode_compile_config", "default_compile_level", "q_padding_interval_size",
    "kv_padding_interval_size", "cpu_offload_space",
)  # fmt: skip


class Blocks:
    """The engine's ``PagedAttentionCache``, whose inside versions arrange differently: in one tensor (5.24) or in one for each layer (5.17).

    block: tokens of a block. stride: from a block's first token to the next block's, as the engine's indices count. They say where a token lies
    among ``tokens(layer)``, keys and values as [tokens, Hkv, D].
    """

    def __init__(self, cache):
        self.cache = cache
        self.one_tensor = hasattr(cache, "layer_to_allocator")

    def group(self, layer):
        """Which of the engine's index tensors are this layer's."""
        return self.cache.layer_to_allocator[layer].index if self.one_tensor else self.cache.layer_index_to_group_indices[layer][0]

    def is_full(self, layer):
        """Does the layer keep every token?"""
        if self.one_tensor:
            return self.cache.layer_to_allocator[layer].layer_type == "full_attention"
        return self.cache.sliding_windows[layer] == 1

    def size(self, layer):
        """(block, stride) of the layer's group."""
        if self.one_tensor:
            allocator = self.cache.layer_to_allocator[layer]
            return allocator.tokens_per_page, allocator.block_physical_stride
        return self.cache.block_size, self.cache.block_size

    def tokens(self, layer):
        if self.one_tensor:
            return tuple(pages.flatten(0, 1) for pages in self.cache.layer_to_allocator[layer].get_cache_for_block_table(layer))
        place = self.cache.layer_index_to_group_indices[layer][1]
        return self.cache.key_cache[place], self.cache.value_cache[place]

    def attend(self, module, query, key, value, mask, scaling, kwargs):
        """The engine's own attention, for a layer that stays as it is."""
        kwargs = dict(kwargs)
        if self.one_tensor:
            key, value = self.cache.update(key, value, module.layer_idx, kwargs)
        else:
            kwargs["cache"] = self.cache
        return eager_paged_attention_forward(module, query, key, value, mask, scaling, **kwargs)


class Untouched:
    """Stands in for the engine's cache, so that a layer hands keys and values on as they are: the attention function stores them."""

    def update(self, keys, values, layer_idx, kwargs=None):
        return keys, values


class Step:
    """One forward: which rows decode, which are exact, and where everything lies. Worked out once, used by all layers of a group.

    A row that brings one token decodes. exact: (first and last query, first and last key) of the others.
    """

    def __init__(self, kwargs, blocks, page_size):
        self.blocks, self.page_size = blocks, page_size
        self.read, self.write = kwargs["read_index"], kwargs["write_index"]
        of_full = lambda value: value["full_attention"] if isinstance(value, dict) else value  # noqa: E731
        queries, self.starts = kwargs["cu_seq_lens_q"], of_full(kwargs["cu_seq_lens_k"]).long()
        most_queries = kwargs.get("max_length_q", kwargs.get("max_seqlen_q"))  # the second name until 5.17
        self.most_keys = of_full(kwargs.get("max_length_k", kwargs.get("max_seqlen_k")))
        self.new = most_queries > 1 or not any(index.numel() for index in self.read)
        self.rows, self.exact = slice(None), []
        if self.new:  # else the host need not know more, and does not wait
            rows = list(zip(*(pair for bounds in (queries.tolist(), self.starts.tolist()) for pair in (bounds, bounds[1:]))))
            reads = any(index.numel() for index in self.read)
            decoding = [row for row, (q0, q1, *_) in enumerate(rows) if reads and q1 - q0 == 1]
            self.exact = [bounds for row, bounds in enumerate(rows) if row not in decoding]
            self.rows = torch.tensor(decoding, dtype=torch.int64, device=queries.device)
        self.decodes = not self.new or len(self.rows) > 0
        self.queries = queries[:-1].long()[self.rows]  # of the rows that decode
        self.groups = {}

    def group(self, layer):
        index = self.blocks.group(layer)
        if index not in self.groups:
            self.groups[index] = GroupStep(self, self.read[index], self.write[index], *self.blocks.size(layer))
        return self.groups[index]


class GroupStep:
    """A ``Step`` for the layers that share the engine's indices read and write, int64, into blocks of so many tokens."""

    def __init__(self, step, read, write, block, stride):
        self.step, self.read, self.write, self.block, self.stride = step, read, write, block, stride

    def slot(self, index):
        """The summary slot of the page that holds a token: blocks are counted, whatever lies between them in the pool."""
        size = self.step.page_size
        return index // self.stride * (self.block // size) + index % self.stride // size

    @cached_property
    def written(self):
        """(page [n], slot [n], tokens it holds [n] int32) of every page that this step writes to."""
        size = self.step.page_size
        page, slot, held = self.write // size, self.slot(self.write), self.write % size + 1
        if self.step.new:  # several tokens to a page
            slot, which = torch.unique(slot, return_inverse=True)
            page = torch.zeros_like(slot).scatter_(0, which, page)
            held = torch.zeros_like(slot).scatter_reduce_(0, which, held, "amax")
        return page, slot, held.int()

    @cached_property
    def decoding(self):
        """(lengths [B] int32, page table [B, N] int32, -1 for none, summary slots [B, N]) of the rows that decode."""
        step, size = self.step, self.step.page_size
        lengths = step.starts.diff()[step.rows]
        first = torch.arange(page_count(step.most_keys, size), device=self.read.device) * size
        token = self.read[(step.starts[:-1][step.rows, None] + first).clamp(max=len(self.read) - 1)]
        table = (token // size).masked_fill(first >= lengths[:, None], -1)
        return lengths.int(), table.int(), self.slot(token)


class LayerSummaries:
    """Summaries of one layer's pages, a slot for each page of each of the engine's blocks: fields [slots, Hkv, S, ...], S entries a page.

    The channels of minmax8 are sized once, by the first keys that the layer sees, and shared by all requests.
    """

    def __init__(self, slots, policy):
        self.slots, self.policy, self.fields, self.channel = slots, policy, {}, None

    def update(self, pages, written):
        """Summarise anew what was written. pages: the pool [pages, Hkv, P, D]."""
        page, slot, held = written
        kind, size, bound = self.policy.kind, self.policy.page_size, self.policy.bound_size
        made = summarize_pages(pages[page], size, lengths=held, kind="minmax" if kind == "minmax8" else kind, bound_size=bound).fields
        if kind == "minmax8":
            if self.channel is None:
                self.channel = channel_sizes(*(bounds.transpose(0, 1).flatten(1, 2)[None] for bounds in made.values()))
            made = dict(zip(("kmin", "kmax", "scale"), encode(*made.values(), self.channel)))
        for name, field in made.items():
            if name not in self.fields:
                self.fields[name] = field.new_zeros(self.slots, *field.shape[1:])
            self.fields[name][slot] = field

    def gathered(self, slots, lengths, kind="minmax", bound_size=None):
        """The ``PageSummary`` of rows whose pages have these slots [B, N]."""
        policy = self.policy
        if (kind, bound_size or policy.page_size) != (policy.kind, policy.bound_size):
            raise ValueError(f"Summaries are kept of the policy's kind {policy.kind!r} and bound_size {policy.bound_size}, not {kind!r} and {bound_size}.")
        fields = {name: field[slots].transpose(1, 2).flatten(2, 3) for name, field in self.fields.items()}
        if kind == "minmax8":
            fields["channel"] = self.channel.expand(len(slots), -1, -1)
        return PageSummary(kind, policy.page_size, lengths, **fields, bound_size=policy.bound_size)


class ServingSession:
    """What ``use_pageskip_serving`` puts into a model. exact_layers: {layer: reason} of layers that stay as the engine has them."""

    def __init__(self, model, policy):
        self.policy = policy
        self.exact_layers = {}
        self.managers = WeakSet()
        self.blocks = self.step = self._given = None  # of the running forward
        self.summaries = WeakKeyDictionary()  # {an engine's cache: {layer: LayerSummaries}}
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
        refused = [name for name in REFUSED if any(torch.utils._pytree.tree_leaves(getattr(config, name, None)))]
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
        if self.policy.reads_summaries and layer >= self.policy.dense_layers:
            layers = self.summaries[step.blocks.cache]
            if layer not in layers:
                layers[layer] = LayerSummaries(page_count(len(pools[0]), group.stride) * (group.block // size), self.policy)
            summaries = layers[layer]
            summaries.update(k, group.written)
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        for q0, q1, k0, k1 in step.exact:  # each over its own keys: what the mask hides of other rows need not be multiplied first
            if group.read.numel():
                own = [pool[group.read[k0:k1]].transpose(0, 1)[None] for pool in pools]
            else:
                own = [new[:, :, k0:k1] for new in (key, value)]
            out[:, q0:q1] = sdpa_attention_forward(module, query[:, :, q0:q1], *own, mask[..., q0:q1, k0:k1], scaling=scaling)[0]
        if step.decodes:
            lengths, table, slots = group.decoding
            q = query[0].transpose(0, 1)[step.queries]
            summary = lambda **wanted: summaries.gathered(slots, lengths, **wanted)  # noqa: E731
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
    blocks that are not a multiple of the policy's pages. Beside its cache, the summaries take memory that the engine does not count: give
    it num_blocks, or a max_memory_percent that leaves them room.
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
        for hook in hooks:
            hook.remove()
        model.__dict__.pop("init_continuous_batching", None)
        for module in modules:
            module.pageskip_session = None
        model.set_attn_implementation(before)
