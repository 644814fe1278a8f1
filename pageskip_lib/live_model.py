"""The decode step inside a live transformers model.

Three pieces, each through transformers' own interfaces: a cache layer that grows without copying the whole cache for
every token and keeps page summaries current, an attention function (with its mask function, so that prefill stays
causal), and a context manager that puts both into a model and takes them out again.
"""

from contextlib import contextmanager
from functools import partial

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
    """One layer's keys and values [B, Hkv, T, D] in buffers with room to grow, and their page summaries on request.

    Rows with padding on the left are stored without it: each begins with its first real token and ends after ``lengths`` [B] int32, so pages
    are counted from there. Keys carry their rotary position, so where they lie does not matter. ``aligned`` puts the padding back.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self):
        super().__init__()
        self._buffers = ()
        self._length = 0  # T, padding included
        self.lengths = None
        self.padding = None  # [B] int64, tokens at each row's left that count as none; None where no row has any
        self.compact = False  # whether ``update`` returns rows as they are stored, for an attention function that knows their lengths
        self._summary_of = None  # (kind, bound size) of the stored summaries
        self._fields = {}  # their tensors, with room to grow as the keys have
        self._summarised = 0  # tokens that they cover
        self._channel = None  # of minmax8

    def lazy_initialization(self, key_states, value_states):
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = tuple(states.new_empty(*states.shape[:2], 0, states.shape[3]) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Append keys and values [B, Hkv, n, D]; returns all that is cached, as views unless rows have padding that somebody expects there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[2]
        capacity = self._buffers[0].shape[2]
        if self._length > capacity:
            room = max(FIRST_CAPACITY, 2 * capacity, self._length) - capacity
            self._buffers = tuple(torch.nn.functional.pad(buffer, (0, 0, 0, room)) for buffer in self._buffers)
        if self.padding is None:
            for buffer, states in zip(self._buffers, (key_states, value_states)):
                buffer[:, :, start : self._length] = states
        else:
            self.padding = self.padding.clamp(max=self._length).expand(key_states.shape[0])
            # Turned to the left, so that padding comes to lie behind the row's end, where nobody reads and the next tokens go.
            place = (torch.arange(start, self._length, device=self.device) - self.padding[:, None]) % self._length
            for buffer, states in zip(self._buffers, (key_states, value_states)):
                buffer[self._rows(), :, place] = states.transpose(1, 2)
        self._set_views()
        return (self.keys, self.values) if self.compact else self.aligned()

    def _rows(self):
        return torch.arange(self._buffers[0].shape[0], device=self.device)[:, None]

    def _set_views(self):
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)
        if self.padding is None:
            self.lengths = torch.full((self.keys.shape[0],), self._length, dtype=torch.int32, device=self.device)
        else:
            self.lengths = (self._length - self.padding).int()

    def aligned(self):
        """keys and values [B, Hkv, T, D] where transformers' masks expect them: a copy if rows have padding, in whose place some key stands."""
        if self.padding is None:
            return self.keys, self.values
        place = (torch.arange(self._length, device=self.device) - self.padding[:, None]).clamp(min=0)
        return tuple(part[self._rows(), :, place].transpose(1, 2) for part in (self.keys, self.values))

    def summary(self, page_size, kind="minmax", bound_size=None):
        """The ``PageSummary`` of all cached keys. Only entries touched since the last call of the same kind and bound size are made again."""
        bound_size = check_bound_size(bound_size, page_size)
        if self._summary_of != (kind, bound_size):
            self._summary_of, self._fields, self._summarised = (kind, bound_size), {}, 0
        if self._summarised < self._length or not self._fields:
            where, made = self._touched(page_size, kind, bound_size)
            room = page_count(self._buffers[0].shape[2], bound_size) + 1  # one more: not every row has touched as many entries
            for name, field in made.items():
                stored = self._fields.get(name)
                if stored is None or stored.shape[2] < room:
                    grown = field.new_zeros(*field.shape[:2], room, *field.shape[3:])
                    if stored is not None:
                        grown[:, :, : stored.shape[2]] = stored
                    stored = self._fields[name] = grown
                stored[where] = field if self.padding is None else field.transpose(1, 2)
            self._summarised = self._length
        entries = page_count(self._length, bound_size)
        fields = {name: stored[:, :, :entries] for name, stored in self._fields.items()}
        if kind == "minmax8":
            fields["channel"] = self._channel
        return PageSummary(kind, page_size, self.lengths, **fields, bound_size=bound_size)

    def _touched(self, page_size, kind, bound_size):
        """(where, {name: entries}) of all tokens since the last summary. The channels of minmax8 are sized once, by the first keys, and stay."""
        if self.padding is None:
            first = self._summarised // bound_size
            keys, lengths = self.keys[:, :, first * bound_size :], None
            where = slice(None), slice(None), slice(first, page_count(self._length, bound_size))
        else:  # as many entries from every row, from its own first on
            first = (self._summarised - self.padding[:, None]).clamp(min=0) // bound_size
            count = page_count(self._length - self._summarised - 1, bound_size) + 1
            tokens = (first * bound_size + torch.arange(count * bound_size, device=self.device)).clamp(max=self._length - 1)
            keys = self.keys[self._rows(), :, tokens].transpose(1, 2)
            lengths = (self.lengths - first[:, 0] * bound_size).clamp(min=0, max=count * bound_size).int()
            where = self._rows(), slice(None), first + torch.arange(count, device=self.device)
        if kind != "minmax8":
            return where, summarize_pages(keys, page_size, lengths=lengths, kind=kind, bound_size=bound_size).fields
        exact = summarize_pages(keys, page_size, lengths=lengths, bound_size=bound_size).fields.values()
        if not self._fields:
            self._channel = channel_sizes(*exact)
        return where, dict(zip(("kmin", "kmax", "scale"), encode(*exact, self._channel)))

    def truncate(self, length):
        """Keep the first ``length`` tokens. The page that is cut is summarised anew before it is scored again."""
        if not 0 <= length <= self._length:
            raise ValueError(f"length must lie between 0 and the {self._length} cached tokens, got {length}.")
        if length < self._length:
            self._length = length
            self._summarised = min(self._summarised, max(length - 1, 0))  # the entry of the last token that is left is made anew
            if self.padding is not None:
                self.padding = self.padding.clamp(max=length)
            self._set_views()

    def crop(self, tokens_to_remove):
        """transformers' cropping: a negative number removes that many tokens, a positive one (before 5.18) is the new length."""
        length = self._length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self._length)
        self.truncate(max(length, 0))

    def _rearrange_rows(self, change):
        if self.is_initialized:
            self._buffers = tuple(change(buffer) for buffer in self._buffers)
            self._fields = {name: change(field) for name, field in self._fields.items()}
            self._channel = None if self._channel is None else change(self._channel)
            self.padding = None if self.padding is None else change(self.padding)
            self._set_views()

    def reorder_cache(self, beam_idx):
        self._rearrange_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats):
        self._rearrange_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        self._rearrange_rows(lambda tensor: tensor[indices])

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

    @property
    def live_layers(self):
        return [layer for layer in self.layers if isinstance(layer, LiveCacheLayer)]

    def leave_out(self, mask):
        """Before a forward with ``mask`` (2-D [B, T], 4-D [B, H, n, T], or None): rows that hold nothing yet will not store their padding.

        Raises ValueError when the mask counts a token that was left out before.
        """
        first = next(iter(self.live_layers), None)
        if first is None or (first.padding is None and (mask is None or first.get_seq_length())):
            return
        if mask is None:
            raise ValueError("This cache holds rows with padding: give attention_mask with every step, as generate() does.")
        seen = seen_keys(mask)
        leading = torch.where(seen.any(1), seen.int().argmax(1), seen.shape[1])
        padding = leading if first.padding is None else torch.where(first.padding >= first.get_seq_length(), leading, first.padding)
        if (leading < padding).any():
            raise ValueError("attention_mask counts tokens that were padding when they were cached; their keys are not there.")
        padding = padding if padding.any() else None
        for layer in self.live_layers:
            layer.padding = padding

    def truncate(self, length):
        """Roll every layer back to ``length`` tokens, whatever transformers' own ``crop`` means in this version."""
        for layer in self.layers:
            if not isinstance(layer, LiveCacheLayer):
                raise ValueError(f"A {type(layer).__name__} layer cannot be rolled back.")
            layer.truncate(length)


def seen_keys(mask):
    """[B, T] bool: the tokens that a 2-D mask counts, or that a 4-D one (boolean, or added to the scores) lets any query see."""
    if mask.dim() == 2:
        return mask.bool()
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return allowed.any(2).any(1)


def why_exact(module, query, extras):
    """Why this layer's attention, given query [B, Hq, n, D] and further arguments, is none that page selection can take over; or None."""
    if getattr(module, "is_sliding", False) or extras.get("sliding_window") is not None:
        return "sliding-window layer"
    if getattr(module, "is_kv_shared_layer", False):
        return "keys of another layer"
    if query.shape[-1] not in HEAD_DIMS:
        return f"head dim {query.shape[-1]}"
    if any(extras.get(name) is not None for name in ("softcap", "position_bias", "s_aux")):
        return "scores are changed before the softmax"
    return None


class Session:
    """What ``use_pageskip`` puts into a model: the policy, the cache of the running forward, and what to report.

    exact_layers: {layer: reason} of layers that decoded exactly without asking the policy, at any step so far.
    """

    def __init__(self, policy, record):
        self.policy = policy
        self.record = record
        self.cache = None
        self.exact_layers = {}
        self._judged = None  # (mask, whether it hides the padding and nothing else): all layers of a step get the same one

    def before_forward(self, model, args, kwargs):
        """Forward pre-hook: hand the model a LiveCache where it would make (or was given) an empty DynamicCache."""
        name = "cache" if "cache" in kwargs else cache_argument(model)
        cache = kwargs.get(name)
        caching = kwargs.get("use_cache")
        caching = model.config.use_cache if caching is None else caching
        if caching and (cache is None or (type(cache) is DynamicCache and cache.get_seq_length() == 0)):
            cache = kwargs[name] = LiveCache(model.config)
        self.cache = cache
        if isinstance(cache, LiveCache):
            cache.leave_out(kwargs.get("attention_mask"))
            for layer in cache.live_layers:
                layer.compact = True
        return args, kwargs

    def after_forward(self, *_):
        """Forward hook, also after an error: outside this session attention functions expect the padding in its place."""
        for layer in getattr(self.cache, "live_layers", ()):
            layer.compact = False
        self.cache = self._judged = None

    def layer_of(self, module, keys):
        """The ``LiveCacheLayer`` that holds these keys, or None: the module's own, or the one whose keys it shares."""
        layers = getattr(self.cache, "layers", ())
        likely = layers[module.layer_idx : module.layer_idx + 1]
        holds = lambda layer: isinstance(layer, LiveCacheLayer) and layer.is_initialized and layer.keys.data_ptr() == keys.data_ptr()  # noqa: E731
        return next((layer for layer in (*likely, *layers) if holds(layer)), None)

    def why_exact(self, module, query, mask, layer, extras):
        """Why this layer's decode must not go through page selection, or None."""
        if mask is not None and (layer is None or not self.hides_padding_only(mask, layer)):
            return why_exact(module, query, extras) or "a mask that is not padding on the left"
        return why_exact(module, query, extras)

    def hides_padding_only(self, mask, layer):
        """Does a one-token step's mask [B, 1, 1, T] hide just what the layer has left out?"""
        if self._judged is None or self._judged[0] is not mask:
            padding = 0 if layer.padding is None else layer.padding[:, None]
            counted = torch.arange(layer.keys.shape[2], device=mask.device) >= padding
            same = mask.dtype == torch.bool and mask.shape[1] == 1 and bool((mask[:, 0, 0] == counted).all())
            self._judged = mask, same
        return self._judged[1]

    def decode(self, module, query, key, value, layer, scaling):
        """One token: query [B, Hq, 1, D] over key, value [B, Hkv, T, D], held by ``layer`` if not None. Returns [B, 1, Hq, D]."""
        policy, q = self.policy, query[:, :, 0]
        if layer is None:  # a cache that is not ours: right, but every key is read for its summaries
            lengths, summary = torch.full((key.shape[0],), key.shape[2], dtype=torch.int32, device=key.device), partial(summarize_pages, key)
        else:
            lengths, summary = layer.lengths, layer.summary
        pages = policy.choose(module.layer_idx, q, key, lengths, partial(summary, policy.page_size))
        if self.record is not None:
            self.record.append((module.layer_idx, lengths, pages))  # a tensor: reading it here would wait for the GPU
        if pages is None:
            out = dense_decode(q, key, value, lengths=lengths, scale=scaling)
        else:
            out = sparse_decode(q, key, value, pages, page_size=policy.page_size, lengths=lengths, scale=scaling)
        return out[:, None]


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The registered attention function: one query token goes through the session's policy, several are exact."""
    session = getattr(module, "pageskip_session", None)
    layer = None if session is None else session.layer_of(module, key)
    if session is not None and query.shape[2] == 1:
        reason = session.why_exact(module, query, attention_mask, layer, kwargs)
        if reason is None:
            return session.decode(module, query, key, value, layer, scaling), None
        session.exact_layers[module.layer_idx] = reason
    if layer is not None:
        key, value = layer.aligned()
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextmanager
def use_pageskip(model, policy, *, record=None):
    """Inside this context every one-token step of ``model`` goes through ``policy``; steps of several tokens stay exact.

    model: a transformers causal LM whose attention goes through transformers' attention interface. policy: see
    ``quality.policies``; its choose(layer_idx, q [B, Hq, D], keys [B, Hkv, T, D], lengths [B], summary) returns a ``PageList`` to read,
    or None for all pages. record: a list that receives (layer_idx, lengths, PageList or None) for each decode call of each layer; lengths [B] int32,
    on the device, are the tokens that each row held at that step, its padding left out.

    Yields the ``Session``. ``model.generate(...)`` works unchanged: where it would use a DynamicCache it gets a ``LiveCache``.
    Prompts of different lengths, padded on the left, go through the policy too: padding is neither attended nor summarised. Layers with a sliding
    window or with the keys of another layer, and steps that come with any other mask, stay exact and are listed in ``exact_layers``.
    """
    session = Session(policy, record)
    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    if any(getattr(module, "pageskip_session", None) for module in modules):
        raise RuntimeError("This model is inside another use_pageskip already; leave that one first.")
    before = model.config._attn_implementation
    hooks = [model.register_forward_pre_hook(session.before_forward, with_kwargs=True)]
    hooks.append(model.register_forward_hook(session.after_forward, always_call=True))
    try:
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            raise ValueError(f"{type(model).__name__} does not take its attention from transformers' attention interface.")
        for module in modules:
            module.pageskip_session = session
        yield session
    finally:
        for hook in hooks:
            hook.remove()
        for module in modules:
            module.pageskip_session = None
        model.set_attn_implementation(before)


def cache_argument(model):
    """The name of forward's cache argument: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    import inspect

    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()  # not inference_mode: generate() could not write into a cache made there
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


@torch.no_grad()
def step(model, ids, cache):
    """One forward of ids [B, n] on top of ``cache``; logits [B, vocabulary] of the last position.

    ``logits_to_keep=1`` spares those of the other positions, which nobody reads (0.6 MB a token in fp32 with a vocabulary of 152k).
    """
    return model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
