"""A Qwen2 with the heads of DeepSeek-R1-Distill-Qwen-1.5B runs by its name alone: loaded, decoded, captured and asked like the embedded model."""

import pytest
import torch

from pageskip_lib import Budget, dense_decode, use_pageskip
from pageskip_lib.live_model import LiveCache, prefill, step
from pageskip_lib.models import head_dim
from pageskip_lib.quality import needle
from pageskip_lib.quality.capture import capture
from pageskip_lib.quality.policies import FullPolicy, PageskipPolicy, WindowPolicy

CONTEXT = 300


@pytest.fixture
def ids(qwen):
    return qwen[1](needle.haystack("transcripts")[:2000], return_tensors="pt").input_ids[:, :CONTEXT]


def test_it_is_shaped_like_the_real_one(qwen):
    model, _ = qwen
    attention = model.model.layers[2].self_attn
    assert type(model).__name__ == "Qwen2ForCausalLM" and not hasattr(model.config, "head_dim")
    assert (attention.q_proj.out_features, attention.k_proj.out_features, attention.head_dim, head_dim(model.config)) == (12 * 128, 2 * 128, 128, 128)
    assert all(projection.bias.abs().max() > 0.1 for projection in (attention.q_proj, attention.k_proj, attention.v_proj))


@pytest.mark.parametrize("policy", [FullPolicy(), PageskipPolicy(Budget(64), dense_layers=0)], ids=lambda policy: policy.name)
def test_reading_everything_generates_transformers_own_tokens(qwen, ids, policy):
    model, _ = qwen
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **options)
    with use_pageskip(model, policy) as session:
        assert torch.equal(model.generate(ids, **options), expected)
    assert session.exact_layers == {} and len(expected[0, CONTEXT:].unique()) > 8, "a model that repeats itself would hide a wrong key"


@torch.inference_mode()
def test_a_small_budget_reads_only_the_pages_it_chose(qwen, ids):
    """Values outside the lists become NaN, which the result must not feel; inside one of them it must."""
    model, _ = qwen
    policy, calls = PageskipPolicy(Budget(6), dense_layers=0), []
    cache = LiveCache(model.config)
    prefill(model, ids[:, :-1], cache)
    with use_pageskip(model, policy, record=calls):
        chosen = step(model, ids[:, -1:], cache)
        assert [(layer, tokens) for layer, tokens, _ in calls] == [(layer, CONTEXT) for layer in range(3)]
        assert all((pages.counts == 6).all() for _, _, pages in calls)
        for layer, _, pages in calls:
            values = cache.layers[layer].values
            unread = torch.ones(2, CONTEXT, dtype=torch.bool)
            for head, listed in enumerate(pages.pages[0].tolist()):
                for page in listed:
                    unread[head, 16 * page : 16 * page + 16] = False
            values[0, unread] = float("nan")
        cache.truncate(CONTEXT - 1)
        again = step(model, ids[:, -1:], cache)
        torch.testing.assert_close(again, chosen, rtol=0, atol=0)
    cache.truncate(CONTEXT - 1)
    with use_pageskip(model, FullPolicy()):
        assert step(model, ids[:, -1:], cache).isnan().all()


@torch.inference_mode()
def test_captured_queries_and_keys_are_the_models(qwen, ids):
    model, _ = qwen
    inputs = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, n=n: inputs.update({n: args[0]}))
        for n, layer in enumerate(model.model.layers)
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    captured = capture(model, ids[0].tolist(), steps=2, every=5)
    assert captured.queries.shape == (2, 3, 1, 12, 128) and captured.keys.shape == (3, 2, CONTEXT, 128) and captured.scale == 128**-0.5
    for layer in range(3):
        for n, length in enumerate((CONTEXT - 5, CONTEXT)):
            keys, values = captured.keys[None, layer, :, :length], captured.values[None, layer, :, :length]
            out = dense_decode(captured.queries[n, layer], keys, values, scale=captured.scale).flatten()
            expected = inputs[layer][0, length - 1]
            # Two fp32 paths through up to 3 layers of 1,536 random numbers each: 256 errors of 2^-22 of the largest number; 91 were seen.
            torch.testing.assert_close(out, expected, rtol=0, atol=256 * 2**-22 * expected.abs().max().item())
    other_step = dense_decode(captured.queries[0, 2], keys, values, scale=captured.scale).flatten()
    assert (other_step - expected).abs().max() > 25 * 256 * 2**-22 * expected.abs().max(), "the tolerance would let another step's query pass"


def test_it_is_asked_like_the_embedded_model(qwen):
    """The needle's decode: an answer under every policy, and bytes counted with this model's heads."""
    model, tokenizer = qwen
    prompt = needle.plant(tokenizer, needle.haystack("transcripts"), context=CONTEXT, depth=0.5, code="7491")
    assert tokenizer.decode([prompt.body[n] for n in prompt.code_tokens]).strip() == "7491"
    cache = LiveCache(model.config)
    prefill(model, torch.tensor([prompt.body]), cache)
    policies = FullPolicy(), WindowPolicy(Budget(6)), PageskipPolicy(Budget(6))
    full, window, bound = (needle.ask(model, tokenizer, prompt, policy, cache) for policy in policies)
    steps = len(prompt.question) + needle.ANSWER_TOKENS - 1
    of_a_token = 2 * 2 * 128 * 4
    held = [len(prompt.body) + 1 + n for n in range(steps)]
    assert full["bytes_per_token"] == round(3 * of_a_token * sum(held) / steps)
    newest = [5 * 16 + (n - 1) % 16 + 1 for n in held]  # the first page and the newest five, the last of them partly filled
    assert window["bytes_per_token"] == round(of_a_token * sum(2 * n + new for n, new in zip(held, newest)) / steps)
    summaries = [2 * (2 * 128 + 4) * -(-n // 16) for n in held]  # of each head and page two vectors of bytes, and their scale
    assert bound["bytes_per_token"] == window["bytes_per_token"] + round(sum(summaries) / steps)
    assert all(isinstance(row["answer"], str) and row["answer"] for row in (full, window, bound))
