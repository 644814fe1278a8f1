"""Where transformers' continuous batching keeps its keys and values, and what one of its forwards is about to do with them."""

from functools import cached_property

import torch
from transformers.integrations.eager_paged import eager_paged_attention_forward

from .checks import page_count


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


class Step:
    """One forward: which rows decode, which are exact, and where everything lies. Worked out once, used by all layers of a group.

    A row that brings one token decodes. exact: (first and last query, first and last key) of the others.
    """

    def __init__(self, kwargs, blocks, page_size):
        self.blocks, self.page_size = blocks, page_size
        self.read, self.write = kwargs["read_index"], kwargs["write_index"]
        of_full = lambda value: value["full_attention"] if isinstance(value, dict) else value  # noqa: E731
        queries, self.starts = kwargs["cu_seq_lens_q"].long(), of_full(kwargs["cu_seq_lens_k"]).long()
        most_queries = kwargs.get("max_length_q", kwargs.get("max_seqlen_q"))  # the second name until 5.17
        self.most_keys = of_full(kwargs.get("max_length_k", kwargs.get("max_seqlen_k")))
        reads = any(index.numel() for index in self.read)
        self.all_decode = reads and most_queries == 1  # then the host need not know more, and does not wait
        self.rows = self.queries = slice(None)  # the rows that decode, and the queries that they bring
        self.exact = []
        if not self.all_decode:
            q, k = queries.tolist(), self.starts.tolist()
            bounds = list(zip(q, q[1:], k, k[1:]))
            decoding = [row for row, (first, last, *_) in enumerate(bounds) if reads and last - first == 1]
            self.exact = [bound for row, bound in enumerate(bounds) if row not in decoding]
            self.rows = torch.tensor(decoding, dtype=torch.int64, device=queries.device)
            self.queries = queries[self.rows]
        self.decodes = self.all_decode or len(self.rows) > 0
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
        if not self.step.all_decode:  # several tokens to a page
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
