"""What one step of a language model must read and compute: arithmetic on its shape, the batch and the context.

Counted: every weight that the step multiplies with, once; the whole KV cache, once; 2 FLOP a multiply-add. Not counted: activations,
norms, softmax, launches, reading anything twice. So bytes and FLOPs are lower bounds, and a time computed from them is a floor, not
a prediction (``token_time`` makes those). The roofline: Williams, Waterman and Patterson, CACM 52(4), 2009.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward layer, as its public config.json describes it.

    tied: input embedding and output head are one table. qkv_bias: the projections to q, k and v have a bias (Qwen2).
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False

    @property
    def group(self):
        """Query heads that share one KV head: G."""
        return self.heads // self.kv_heads

    @property
    def layer_parameters(self):
        """Weights of all layers, without the embedding, the output head and the last norm."""
        projected = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.hidden * (projected + self.heads * self.head_dim) + self.qkv_bias * projected
        return self.layers * (attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden)

    @property
    def head_parameters(self):
        """Weights of the output head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self):
        """All weights, the ones that memory must hold."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters_read(self):
        """Weights that a decode step reads: all but the input embedding, of which it looks up one row a token."""
        return self.layer_parameters + self.head_parameters + self.hidden

    def kv_bytes(self, number_bytes=2):
        """Bytes of keys and values that one token of context adds, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * number_bytes


MODELS = {
    model.name: model
    for model in (
        ModelShape("SmolLM2-135M", 30, 9, 3, 64, 576, 1536, 49152, tied=True),
        ModelShape("DeepSeek-R1-Distill-Qwen-1.5B", 28, 12, 2, 128, 1536, 8960, 151936, tied=False, qkv_bias=True),
        ModelShape("Llama-3-8B", 32, 32, 8, 128, 4096, 14336, 128256, tied=False),
    )
}


@dataclass(frozen=True)
class Step:
    """What a step moves and computes. tokens: that come out of it (decode) or go into it (prefill).

    weights, cache: bytes moved. held: bytes that memory must hold. weight_flops, attention_flops: FLOP.
    """

    tokens: int
    weights: float
    cache: float
    held: float
    weight_flops: float
    attention_flops: float

    @property
    def bytes(self):
        return self.weights + self.cache

    @property
    def flops(self):
        return self.weight_flops + self.attention_flops

    @property
    def intensity(self):
        """FLOP per byte moved."""
        return self.flops / self.bytes

    def floor(self, card):
        """Seconds that the step takes at least on a ``CardFacts``: its memory or its arithmetic, whichever is slower, the other one hidden."""
        return max(self.bytes / card.bandwidth, self.flops / card.fp16_flops)

    def ceiling(self, card):
        """Tokens per second that a ``CardFacts`` makes at most."""
        return self.tokens / self.floor(card)

    def fits(self, card):
        """Can the card's memory hold weights and cache? (Activations come on top.)"""
        return self.held <= card.memory_bytes


def _check(batch, tokens, weight_bytes, kv_bytes):
    for name, value in (("batch", batch), ("tokens", tokens)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")
    for name, value in (("weight_bytes", weight_bytes), ("kv_bytes", kv_bytes)):
        if not value > 0:
            raise ValueError(f"{name} must be the positive size of one number in bytes, such as 2 for fp16, got {value!r}.")


def decode_step(model, batch, tokens, *, weight_bytes=2, kv_bytes=2):
    """One new token for each of ``batch`` sequences that have ``tokens`` tokens in the cache. Sizes are bytes per number.

    Attention: each cached number meets G query heads, 2 FLOP each, for keys and for values: 4 Hq D FLOP a cached token and layer.
    """
    _check(batch, tokens, weight_bytes, kv_bytes)
    cache = batch * tokens * model.kv_bytes(kv_bytes)
    return Step(
        tokens=batch,
        weights=model.parameters_read * weight_bytes,
        cache=cache,
        held=model.parameters * weight_bytes + cache,
        weight_flops=2 * model.parameters_read * batch,
        attention_flops=4 * model.layers * model.heads * model.head_dim * batch * tokens,
    )


def prefill_step(model, batch, tokens, *, weight_bytes=2, kv_bytes=2):
    """The whole prompt of ``tokens`` tokens in one go, for ``batch`` sequences; logits for the last position only.

    Weights are read once and the cache is written once. A token attends to those before it and itself, half of the square.
    """
    _check(batch, tokens, weight_bytes, kv_bytes)
    cache = batch * tokens * model.kv_bytes(kv_bytes)
    pairs = batch * tokens * (tokens + 1) // 2
    return Step(
        tokens=batch * tokens,
        weights=model.parameters_read * weight_bytes,
        cache=cache,
        held=model.parameters * weight_bytes + cache,
        weight_flops=2 * batch * (model.layer_parameters * tokens + model.head_parameters),
        attention_flops=4 * model.layers * model.heads * model.head_dim * pairs,
    )
