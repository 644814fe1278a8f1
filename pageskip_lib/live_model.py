"""The decode step inside a live transformers model.

Three pieces, each through transformers' own interfaces: a cache layer that grows without copying the whole cache for
every token and keeps page summaries current, an attention function (with its mask function, so that prefill stays
causal), and a context manager that puts both into a model and takes them out again.
"""

from contextlib import contextmanager

import torch
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .bounds8 import channel_sizes, encode
from .checks import HEAD_DIMS, check_bound_size, page_count
from .dense import dense_decode
from .models import check_fits
from .sparse import sparse_decode
from .summaries import PageSummary, summarize_pages

ATTENTION = "pageskip"
FIRST_CAPACITY = 256  # tokens; doubled whenever it is full


class LiveCacheLayer(CacheLayerMixin):
    """One layer's keys and values [B, Hkv, T, D] in buffers with room to grow, and their page summaries on request."""

    is_sliding = False
    is_croppable = True

    def __init__(self):
        super().__init__()
        self._buffers = ()
        self._length = 0
        self._summary_of = None  # (kind, bound size) of the stored summaries
        self._fields = {}  # their tensors, with room to grow as the keys have
        self._summarised = 0  # tokens that they cover
        self._channel = None  # of minmax8

    def lazy_initialization(self, key_states, value_states):
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = tuple(states.new_empty(*states.shape[:2], 0, states.shape[3]) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Append keys and values [B, Hkv, n, D]; returns views of all that is cached."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[2]
        capacity = self._buffers[0].shape[2]
        if self._length > capacity:
            room = max(FIRST_CAPACITY, 2 * capacity, self._length) - capacity
            self._buffers = tuple(torch.nn.functional.pad(buffer, (0, 0, 0, room)) for buffer in self._buffers)
        for buffer, states in zip(self._buffers, (key_states, value_states)):
            buffer[:, :, start : self._length] = states
        return self._set_views()

    def _set_views(self):
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)
        return self.keys, self.values

    def summary(self, page_size, kind="minmax", bound_size=None):
        """The ``PageSummary`` of all cached keys. Only entries touched since the last call of the same kind and bound size are made again."""
        bound_size = check_bound_size(bound_size, page_size)
        if self._summary_of != (kind, bound_size):
            self._summary_of, self._fields, self._summarised = (kind, bound_size), {}, 0
        first, entries = self._summarised // bound_size, page_count(self._length, bound_size)
        if self._summarised < self._length or not self._fields:
            for name, field in self._touched(first * bound_size, page_size, kind, bound_size).items():
                stored = self._fields.get(name, field[:, :, :0])
                if stored.shape[2] < entries:
                    room = page_count(self._buffers[0].shape[2], bound_size)
                    grown = field.new_zeros(*field.shape[:2], room, *field.shape[3:])
                    grown[:, :, :first] = stored[:, :, :first]
                    stored = grown
                stored[:, :, first:entries] = field
                self._fields[name] = stored
            self._summarised = self._length
        lengths = torch.full((self.keys.shape[0],), self._length, dtype=torch.int32, device=self.device)
        fields = {name: stored[:, :, :entries] for name, stored in self._fields.items()}
        if kind == "minmax8":
            fields["channel"] = self._channel
        return PageSummary(kind, page_size, lengths, **fields, bound_size=bound_size)

    def _touched(self, start, page_size, kind, bound_size):
        """{name: entries} of the tokens from ``start`` on. The channels of minmax8 are sized once, by the first keys, and stay."""
        keys = self.keys[:, :, start:]
        if kind != "minmax8":
            return summarize_pages(keys, page_size, kind=kind, bound_size=bound_size).fields
        exact = summarize_pages(keys, page_size, bound_size=bound_size).fields.values()
        if not self._fields:
            self._channel = channel_sizes(*exact)
        return dict(zip(("kmin", "kmax", "scale"), encode(*exact, self._channel)))

    def truncate(self, length):
        """Keep the first ``length`` tokens. The page that is cut is summarised anew before it is scored again."""
        if not 0 <= length <= self._length:
            raise ValueError(f"length must lie between 0 and the {self._length} cached tokens, got {length}.")
        if length < self._length:
            self._length = length
            bound_size = self._summary_of[1] if self._summary_of else 1
            self._summarised = min(self._summarised, length // bound_size * bound_size)
            self._set_views()

    def crop(self, tokens_to_remove):
        """transformers' cropping: a negative number removes that many tokens, a positive one (before 5.18) is the new length."""
        length = self._length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self._length)
        self.truncate(max(length, 0))

    def _rearrange_rows(self, change):
        if self.is_initialized:
            self._buffers = tuple(change(buffer) for buffer in self._buffers)
            self._summary_of = None
            self._set_views()

    def reorder_cache(self, beam_idx):
        self._rearrange_rows(lambda buffer: buffer.index_select(0, beam_idx.to(buffer.device)))

    def batch_repeat_interleave(self, repeats):
        self._rearrange_rows(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        self._rearrange_rows(lambda buffer: buffer[indices])

    def reset(self):
        self.__init__()

    def get_seq_length(self):
        return self._length

    def get_mask_sizes(self, query_length):
        return self._length + query_length, 0

    def get_max_length(self):
        return -1


class LiveCache(DynamicCache):
    """A transformers cache whose full-attention layers are ``LiveCacheLayer``; other layers stay as the model has them."""

    def __init__(self, config):
        super().__init__(config=config)
        self.layers = [LiveCacheLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        self.layer_class_to_replicate = None

    def truncate(self, length):
        """Roll every layer back to ``length`` tokens, whatever transformers' own ``crop`` means in this version."""
        for layer in self.layers:
            if not isinstance(layer, LiveCacheLayer):
                raise ValueError(f"A {type(layer).__name__} layer cannot be rolled back.")
            layer.truncate(length)


class Session:
    """What ``use_pageskip`` puts into a model: the policy, the cache of the running forward, and what to report.

    exact_layers: {layer: reason} of layers that decoded exactly without asking the policy, at any step so far.
    """

    def __init__(self, policy, record):
        self.policy = policy
        self.record = record
        self.cache = None
        self.exact_layers = {}

    def before_forward(self, model, args, kwargs):
        """Forward pre-hook: hand the model a LiveCache where it would make (or was given) an empty DynamicCache."""
        name = "cache" if "cache" in kwargs else cache_argument(model)
        cache = kwargs.get(name)
        caching = kwargs.get("use_cache")
        caching = model.config.use_cache if caching is None else caching
        if caching and (cache is None or (type(cache) is DynamicCache and cache.get_seq_length() == 0)):
            cache = kwargs[name] = LiveCache(model.config)
        self.cache = cache
        return args, kwargs

    def why_exact(self, module, query, mask, extras):
        """Why this layer's decode must not go through page selection, or None."""
        if getattr(module, "is_sliding", False) or extras.get("sliding_window") is not None:
            return "sliding-window layer"
        if mask is not None:
            return "padding or another mask is in force"
        if query.shape[-1] not in HEAD_DIMS:
            return f"head dim {query.shape[-1]}"
        if any(extras.get(name) is not None for name in ("softcap", "position_bias", "s_aux")):
            return "scores are changed before the softmax"
        return None

    def summary(self, layer_idx, keys, page_size, **options):
        layers = getattr(self.cache, "layers", ())
        layer = layers[layer_idx] if layer_idx < len(layers) else None
        if isinstance(layer, LiveCacheLayer) and layer.keys.data_ptr() == keys.data_ptr():
            return layer.summary(page_size, **options)
        return summarize_pages(keys, page_size, **options)  # a cache that is not ours: right, but every key is read

    def decode(self, module, query, key, value, scaling):
        """One token: query [B, Hq, 1, D] over key, value [B, Hkv, T, D]. Returns [B, 1, Hq, D]."""
        policy, layer_idx = self.policy, module.layer_idx
        q = query[:, :, 0]
        pages = policy.choose(layer_idx, q, key, lambda **options: self.summary(layer_idx, key, policy.page_size, **options))
        if self.record is not None:
            self.record.append((layer_idx, key.shape[2], pages))
        if pages is None:
            out = dense_decode(q, key, value, scale=scaling)
        else:
            out = sparse_decode(q, key, value, pages, page_size=policy.page_size, scale=scaling)
        return out[:, None]


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The registered attention function: one query token goes through the session's policy, several are exact."""
    session = getattr(module, "pageskip_session", None)
    if session is not None and query.shape[2] == 1:
        reason = session.why_exact(module, query, attention_mask, kwargs)
        if reason is None:
            return session.decode(module, query, key, value, scaling), None
        session.exact_layers[module.layer_idx] = reason
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextmanager
def use_pageskip(model, policy, *, record=None):
    """Inside this context every one-token step of ``model`` goes through ``policy``; steps of several tokens stay exact.

    model: a transformers causal LM whose attention goes through transformers' attention interface. policy: see
    ``quality.policies``; its choose(layer_idx, q [B, Hq, D], keys [B, Hkv, T, D], summary) returns a ``PageList`` to read,
    or None for all pages. record: a list that receives (layer_idx, tokens, PageList or None) for each decode call of each layer.

    Yields the ``Session``. ``model.generate(...)`` works unchanged: where it would use a DynamicCache it gets a ``LiveCache``.
    Layers with a sliding window, and any step that comes with a mask (padding), stay exact and are listed in ``exact_layers``.
    """
    session = Session(policy, record)
    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    if any(getattr(module, "pageskip_session", None) for module in modules):
        raise RuntimeError("This model is inside another use_pageskip already; leave that one first.")
    before = model.config._attn_implementation
    hook = model.register_forward_pre_hook(session.before_forward, with_kwargs=True)
    try:
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            raise ValueError(f"{type(model).__name__} does not take its attention from transformers' attention interface.")
        for module in modules:
            module.pageskip_session = session
        yield session
    finally:
        hook.remove()
        for module in modules:
            module.pageskip_session = None
        model.set_attn_implementation(before)


def cache_argument(model):
    """The name of forward's cache argument: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    import inspect

    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def prefill(model, ids, cache, *, chunk=512, progress=False):
    """Run prompt tokens through the model, exactly and causally, into ``cache``.

    ids: [B, n] int64 on the model's device, n >= 2 inside ``use_pageskip`` (one token there is a decode step). chunk: tokens
    at a time. Returns the logits [B, vocabulary] of the last position.
    Raises ValueError when cache and prompt together do not fit the model's context.
    """
    check_fits(model, cache.get_seq_length() + ids.shape[1])
    # Even chunks: a last chunk of one token would look like a decode step.
    pieces = ids.tensor_split(max(1, page_count(ids.shape[1], chunk)), dim=1)
    for piece in tqdm(pieces, desc="prefill", unit="chunk", disable=not progress):
        logits = step(model, piece, cache)
    return logits


@torch.inference_mode()
def step(model, ids, cache):
    """One forward of ids [B, n] on top of ``cache``; logits [B, vocabulary] of the last position.

    ``logits_to_keep=1`` spares those of the other positions, which nobody reads (0.6 MB a token in fp32 with a vocabulary of 152k).
    """
    return model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
