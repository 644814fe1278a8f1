"""The step inside a live transformers model: tiny random-weight models, in fp32, against plain transformers."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageskip_lib import bounds8, Budget, PageList, page_scores, reference, select_pages, summarize_pages  # before transformers: it imports triton
from pageskip_lib.checks import page_count
from pageskip_lib.live_model import ATTENTION, LiveCache, LiveCacheLayer, cache_argument, prefill, step, use_pageskip
from pageskip_lib.quality.needle import bytes_read
from pageskip_lib.quality.policies import POLICIES, AdaptivePolicy, FullPolicy, PageskipPolicy, RandomPolicy, WindowPolicy

from transformers import (
    DynamicCache, Gemma3ForCausalLM, Gemma3nForCausalLM, Gemma3nTextConfig, Gemma3TextConfig, Gemma4ForCausalLM, Gemma4TextConfig, LlamaConfig,
    LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache,
)  # fmt: skip

from helpers import int32, randn, same_bits

SIZES = dict(
    vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    tie_word_embeddings=False,  # Gemma ties them: at random weights it then repeats its last token, whatever attention says
)  # fmt: skip
WINDOW = 24
EVERYTHING = PageskipPolicy(Budget(64), dense_layers=0)  # 64 pages of 16 tokens: more than any prompt here
FEW = PageskipPolicy(Budget(5), dense_layers=0)

# Two fp32 paths through 4 layers: each sum of up to 256 terms rounds at 2^-24, which residuals and norms carry on.
# 64 such errors of the largest logit leave room for all of them and none for a wrong token.
CLOSE = dict(rtol=64 * 2**-22, atol=64 * 2**-22)


def make(config, model_class, device):
    torch.manual_seed(0)
    model = model_class(config).to(device).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # they start at 0, where a lost bias would not show
        elif "_proj" in name or "embed" in name:
            parameter.data *= 4  # sharper attention and logits, so that a wrong key changes the tokens
    return model


MODELS = {
    "llama": lambda: (LlamaConfig(**SIZES), LlamaForCausalLM),
    "qwen2 with biases": lambda: (Qwen2Config(**SIZES), Qwen2ForCausalLM),
}
WINDOWED = {
    "mistral": lambda: (MistralConfig(**SIZES, sliding_window=WINDOW), MistralForCausalLM),
    "qwen2": lambda: (
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2), Qwen2ForCausalLM,
    ),
    "gemma3": lambda: (
        Gemma3TextConfig(
            **SIZES, head_dim=64, sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        ), Gemma3ForCausalLM,
    ),
}  # fmt: skip
SHARING = dict(  # the last two layers have no keys: one reads those of the windowed layer 0, the other those of layer 1
    SIZES, head_dim=64, sliding_window=WINDOW, num_kv_shared_layers=2, vocab_size_per_layer_input=128, hidden_size_per_layer_input=32,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
)  # fmt: skip
SHARED = {
    "gemma3n": lambda: (Gemma3nTextConfig(**SHARING), Gemma3nForCausalLM),
    "gemma4": lambda: (Gemma4TextConfig(**SHARING, global_head_dim=64), Gemma4ForCausalLM),
}
WINDOWED_LAYERS = {"mistral": {0, 1, 2, 3}, "qwen2": {2, 3}, "gemma3": {0, 2}}


@pytest.fixture(params=MODELS)
def model(request, device):
    return make(*MODELS[request.param](), device)


@pytest.fixture
def llama(device):
    return make(*MODELS["llama"](), device)


def prompt(tokens, batch=1, seed=0, device="cpu"):
    return torch.randint(2, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed)).to(device)


def generate(model, ids, new=12, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False) | options
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()


def ragged(model):
    """Three left-padded prompts and their mask."""
    ids, mask = prompt(50, batch=3, device=model.device), torch.ones(3, 50, dtype=torch.long, device=model.device)
    for row, padding in enumerate((0, 7, 33)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return ids, mask


# --- prefill -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_prefill_is_causal_with_padding(model):
    """Case K1: a registered attention function without its mask function would see the future, or the padding."""
    ids, mask = ragged(model)
    expected = model(ids, attention_mask=mask).logits
    with use_pageskip(model, FEW):
        found = model(ids, attention_mask=mask).logits
        earlier = model(ids[:1, :20]).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)
    torch.testing.assert_close(earlier, expected[:1, :20], **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunked_prefill(llama, chunk):
    """Case K5: chunks over a cache that already holds something see all of it, and not the future."""
    ids = prompt(45, device=llama.device)
    expected = llama(ids).logits[:, -1]
    with use_pageskip(llama, EVERYTHING):
        cache = LiveCache(llama.config)
        assert torch.allclose(prefill(llama, ids, cache, chunk=chunk), expected, **CLOSE)
    assert cache.get_seq_length() == 45


@torch.inference_mode()
def test_chunks_then_several_tokens_then_one_at_a_time(model):
    """Case K5: chunks, a few tokens at once (as in speculation), single ones; every logit as in one forward."""
    ids = prompt(70, device=model.device)
    expected = model(ids).logits[0]
    with use_pageskip(model, EVERYTHING):
        cache = LiveCache(model.config)
        prefill(model, ids[:, :40], cache, chunk=13)
        at = 40
        for many in (3, 1, 1, 9, 1, 2, 1):
            found = step(model, ids[:, at : at + many], cache)
            at += many
            torch.testing.assert_close(found[0], expected[at - 1], **CLOSE)


def test_prefill_refuses_what_does_not_fit(llama):
    with use_pageskip(llama, FEW), pytest.raises(ValueError, match="1,025 tokens.*1,024"):
        prefill(llama, prompt(1025, device=llama.device), LiveCache(llama.config))


# --- generate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 60])
def test_full_budget_generates_the_same_tokens(model, tokens):
    """generate() unchanged: where the budget holds every page, token for token what plain transformers gives."""
    ids = prompt(tokens, device=model.device)
    expected = generate(model, ids, new=20)
    calls = []
    with use_pageskip(model, EVERYTHING, record=calls) as session:
        assert generate(model, ids, new=20) == expected
    assert session.exact_layers == {}
    decoded = [(layer, *lengths.tolist()) for layer, lengths, pages in calls if pages is not None]
    assert {layer for layer, _ in decoded} == {0, 1, 2, 3}, "some layer never went through the policy"
    assert max(length for _, length in decoded) == tokens + 19


def test_small_budget_reads_few_pages_and_changes_the_logits(llama):
    """The control: with few pages the model does go through the list, so the tests above cannot pass by doing nothing."""
    ids, calls = prompt(300, device=llama.device), []
    with torch.inference_mode():
        exact = llama(ids).logits[:, -1]
        with use_pageskip(llama, FEW, record=calls):
            cache = LiveCache(llama.config)
            prefill(llama, ids[:, :-1], cache)
            calls.clear()
            found = step(llama, ids[:, -1:], cache)
    assert [(layer, lengths.tolist()) for layer, lengths, _ in calls] == [(layer, [300]) for layer in range(4)]
    assert all((pages.counts == 5).all() and (pages.pages[..., 0] == 0).all() for _, _, pages in calls)
    assert not torch.allclose(found, exact, **CLOSE)


def test_generate_goes_on_in_a_prefilled_cache(llama):
    """Twice, rolled back in between, and in plain transformers."""
    ids = prompt(300, device=llama.device)
    expected, cache = generate(llama, ids), LiveCache(llama.config)
    prefill(llama, ids[:, :-1], cache, chunk=100)
    with use_pageskip(llama, EVERYTHING):
        assert generate(llama, ids, **{cache_argument(llama): cache}) == expected
        cache.truncate(299)
        assert generate(llama, ids, **{cache_argument(llama): cache}) == expected
    cache.truncate(299)
    assert generate(llama, ids, **{cache_argument(llama): cache}) == expected


@pytest.mark.parametrize("policy", [FullPolicy(), EVERYTHING, WindowPolicy(Budget(64)), RandomPolicy(Budget(64))], ids=lambda policy: policy.name)
def test_every_policy_with_room_for_all_pages(llama, policy):
    ids = prompt(40, device=llama.device)
    expected = generate(llama, ids)
    with use_pageskip(llama, policy):
        assert generate(llama, ids) == expected


def test_equal_length_batch(model):
    """A batch without padding needs no mask, so it goes through the policy."""
    ids, calls = prompt(40, batch=3, device=model.device), []
    expected = generate(model, ids)
    with use_pageskip(model, EVERYTHING, record=calls) as session:
        assert generate(model, ids) == expected
    assert session.exact_layers == {} and any(pages is not None for _, _, pages in calls)


@pytest.mark.parametrize(
    "options",
    [{}, dict(do_sample=True, top_k=5), dict(num_beams=3), dict(num_return_sequences=2, do_sample=True)],
    ids=["greedy", "sampling", "beams", "two each"],
)
def test_ragged_batch_generates_the_same_tokens(model, options):
    """Case K1: left padding is neither attended nor summarised, whatever generate() does with the rows."""
    ids, mask = ragged(model)
    torch.manual_seed(1)
    expected, calls = generate(model, ids, new=40, attention_mask=mask, **options), []
    with use_pageskip(model, EVERYTHING, record=calls) as session:
        torch.manual_seed(1)
        assert generate(model, ids, new=40, attention_mask=mask, **options) == expected
    assert session.exact_layers == {} and len(calls) == 4 * 39
    rows = len(expected) * options.get("num_beams", 1)
    lengths = torch.tensor([50, 43, 17]).repeat_interleave(rows // 3) + 39
    assert torch.equal(calls[-1][2].counts.cpu(), ((lengths + 15) // 16).int()[:, None].expand(rows, 2)), "pages of the row's own tokens"


def test_ragged_rows_choose_what_they_choose_alone(model):
    """A small budget: every row generates what its prompt gives by itself, from the same pages."""
    ids, mask = prompt(300, batch=3, device=model.device), torch.ones(3, 300, dtype=torch.long, device=model.device)
    padding = (0, 37, 130)
    for row, left in enumerate(padding):
        ids[row, :left], mask[row, :left] = 0, 0
    together, alone, calls = [], [], []
    with use_pageskip(model, FEW, record=calls):
        together = generate(model, ids, attention_mask=mask)
        at_once = [pages for _, _, pages in calls]
        for row, left in enumerate(padding):
            calls.clear()
            alone += generate(model, ids[row : row + 1, left:])
            assert all(torch.equal(many.pages[row], one.pages[0]) for many, (_, _, one) in zip(at_once, calls, strict=True))
    assert together == alone


@pytest.mark.parametrize("policy", [FullPolicy(), FEW, WindowPolicy(Budget(5), dense_layers=0)], ids=["all", "pageskip", "window"])
def test_recorded_bytes_of_a_ragged_batch_are_those_of_its_rows_alone(llama, policy):
    """Padding that the cache leaves out is not read, in pages, summaries or whole rows; each record keeps the lengths of its own step."""
    ids, mask = prompt(150, batch=3, device=llama.device), torch.ones(3, 150, dtype=torch.long, device=llama.device)
    together, alone = [], []
    for row, left in enumerate((0, 37, 130)):
        ids[row, :left], mask[row, :left] = 0, 0
        with use_pageskip(llama, policy, record=alone):
            generate(llama, ids[row : row + 1, left:], new=8)
    with use_pageskip(llama, policy, record=together):
        generate(llama, ids, new=8, attention_mask=mask)
    assert [lengths.tolist() for _, lengths, _ in together[::4]] == [[150 + n, 113 + n, 20 + n] for n in range(1, 8)]
    read = lambda calls: [bytes_read(call, policy, 2, 64, 4) for call in calls]  # noqa: E731
    apart = torch.tensor(read(alone)).view(3, -1).sum(0)
    assert read(together) == (apart // 3).tolist()


@pytest.mark.parametrize("kind", ["minmax", "minmax8", "mean_std"])
@torch.inference_mode()
def test_poisoned_padding_is_never_felt(llama, kind):
    """Case A8 in a model: where the padding's keys and values are NaN, in every layer, the real tokens do not notice."""
    ids, mask = ragged(llama)
    with use_pageskip(llama, PageskipPolicy(Budget(4), dense_layers=0, kind=kind)) as session:
        expected = generate(llama, ids, new=40, attention_mask=mask, suppress_tokens=[0])
        llama.model.embed_tokens.weight[0] = float("nan")
        assert llama(ids, attention_mask=mask).logits[1, :7].isnan().all(), "the padding was not poisoned"
        assert generate(llama, ids, new=40, attention_mask=mask, suppress_tokens=[0]) == expected
    assert session.exact_layers == {}


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 5, 16, 49])
def test_ragged_prompts_in_chunks(model, chunk):
    """Case K5: chunks that are all padding for some rows, part of it for others, and one token at a time after them."""
    ids, mask = ragged(model)
    ids, mask = torch.cat([ids, prompt(20, batch=3, seed=1, device=model.device)], 1), torch.cat([mask, torch.ones_like(mask[:, :20])], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits
    with use_pageskip(model, EVERYTHING) as session:
        cache, at = LiveCache(model.config), 0
        for many in [chunk] * (50 // chunk) + [50 % chunk] * (50 % chunk > 0) + [1, 1, 7, 1, 3, 1, 1, 5]:
            given = dict(attention_mask=mask[:, : at + many], position_ids=positions[:, at : at + many])
            found = model(ids[:, at : at + many], **given, **{cache_argument(model): cache}).logits
            real = mask[:, at : at + many].bool()
            torch.testing.assert_close(found[real], expected[:, at : at + many][real], **CLOSE)
            at += many
            assert all(layer.lengths.tolist() == [at, max(0, at - 7), max(0, at - 33)] for layer in cache.layers)
    assert at == 70 and set(session.exact_layers.values()) <= {"a mask that is not padding on the left"}


@torch.inference_mode()
def test_other_masks_stay_exact_and_are_listed(llama):
    """A hole in the middle, as padding after a first answer leaves it, in a cache with padding on the left and in one without."""
    ids, mask = ragged(llama)
    mask[:, 40:44] = 0
    expected, calls = generate(llama, ids, attention_mask=mask), []
    with use_pageskip(llama, FEW, record=calls) as session:
        assert generate(llama, ids, attention_mask=mask) == expected
        assert generate(llama, ids[:1], attention_mask=mask[:1]) == expected[:1]
    assert session.exact_layers == {layer: "a mask that is not padding on the left" for layer in range(4)}
    assert calls == []


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_4d_mask(llama, dtype):
    """Made by hand: boolean ones are understood as padding, those that are added to the scores only where they fill the cache."""
    ids, mask = ragged(llama)
    expected = llama(ids, attention_mask=mask).logits[:, -1]
    full = torch.ones(50, 50, dtype=torch.bool, device=ids.device).tril()[None, None] & mask[:, None, None].bool()
    if dtype != torch.bool:
        full = torch.zeros(full.shape, device=ids.device).masked_fill(~full, torch.finfo(dtype).min)
    with use_pageskip(llama, EVERYTHING) as session:
        cache = LiveCache(llama.config)
        for new in (slice(0, 49), slice(49, 50)):
            given = dict(attention_mask=full[:, :, new, : new.stop], position_ids=torch.arange(50, device=ids.device)[None, new])
            found = llama(ids[:, new], **given, **{cache_argument(llama): cache}).logits[:, -1]
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (session.exact_layers == {}) == (dtype == torch.bool)
    assert cache.layers[0].lengths.tolist() == [50, 43, 17]


@torch.inference_mode()
def test_padding_that_was_left_out_cannot_come_back(llama):
    ids, mask = ragged(llama)
    with use_pageskip(llama, EVERYTHING):
        cache = LiveCache(llama.config)
        given = {cache_argument(llama): cache}
        llama(ids, attention_mask=mask, **given)
        with pytest.raises(ValueError, match="give attention_mask with every step"):
            llama(ids[:, -1:], **given)
        with pytest.raises(ValueError, match="counts tokens that were padding when they were cached"):
            llama(ids[:, -1:], attention_mask=torch.ones(3, 51, device=ids.device), **given)
        assert cache.get_seq_length() == 50


@torch.inference_mode()
def test_a_ragged_cache_goes_on_outside(llama):
    """Plain transformers gets the padding back in its place, and inside again it is left out again."""
    ids, mask = ragged(llama)
    expected = llama(ids, attention_mask=mask).logits
    cache = LiveCache(llama.config)

    def read(start, stop):
        given = dict(attention_mask=mask[:, :stop], position_ids=torch.arange(start, stop, device=ids.device)[None])
        found = llama(ids[:, start:stop], **given, **{cache_argument(llama): cache}).logits
        torch.testing.assert_close(found[mask[:, start:stop].bool()], expected[:, start:stop][mask[:, start:stop].bool()], **CLOSE)

    with use_pageskip(llama, EVERYTHING):
        read(0, 40)
    read(40, 46)
    with use_pageskip(llama, EVERYTHING) as session:
        for n in range(46, 50):
            read(n, n + 1)
    assert session.exact_layers == {} and cache.layers[0].lengths.tolist() == [50, 43, 17]


@pytest.mark.parametrize("policy", [EVERYTHING, FEW], ids=["all pages", "few pages"])
def test_static_cache(llama, policy):
    """Case K2: a StaticCache hands over its whole buffer; its empty part must never be attended."""
    ids = prompt(100, device=llama.device)
    expected = generate(llama, ids)
    static = dict(cache_implementation="static", disable_compile=True)  # compiling would take minutes on a GPU
    assert generate(llama, ids, **static) == expected
    with use_pageskip(llama, policy) as session:
        assert generate(llama, ids, **static) == expected
    assert set(session.exact_layers.values()) <= {"a mask that is not padding on the left"}


@torch.inference_mode()
def test_static_cache_filled_by_hand(llama):
    """Case K2: 30 of 256 places in use."""
    ids = prompt(31, device=llama.device)
    expected = llama(ids).logits[:, -1]
    with use_pageskip(llama, EVERYTHING):
        cache = StaticCache(config=llama.config, max_cache_len=256)
        prefill(llama, ids[:, :30], cache)
        torch.testing.assert_close(step(llama, ids[:, 30:], cache), expected, **CLOSE)


@torch.inference_mode()
def test_dynamic_cache_that_holds_something(llama):
    """A cache that was filled before the context: not ours, so its summaries are made anew, and the result is right."""
    ids = prompt(60, device=llama.device)
    expected = llama(ids).logits[:, -1]
    cache = DynamicCache(config=llama.config)
    step(llama, ids[:, :59], cache)
    with use_pageskip(llama, EVERYTHING):
        torch.testing.assert_close(step(llama, ids[:, 59:], cache), expected, **CLOSE)
    assert type(cache) is DynamicCache


@pytest.mark.parametrize(
    "options",
    [dict(num_beams=2), dict(num_beams=3, num_return_sequences=3), dict(prompt_lookup_num_tokens=3), dict(do_sample=True, top_k=5)],
    ids=["2 beams", "3 beams returned", "prompt lookup", "sampling"],
)
def test_other_ways_to_generate(model, options):
    """Case K6: beams reorder the cache, speculation crops it; both as in plain transformers."""
    ids = torch.cat([prompt(20, device=model.device)] * 2, dim=1)  # a repetition, for the lookup to find
    torch.manual_seed(1)
    expected = generate(model, ids, **options)
    with use_pageskip(model, EVERYTHING):
        torch.manual_seed(1)
        assert generate(model, ids, **options) == expected


def test_beams_with_few_pages_choose_as_from_summaries_made_anew(llama):
    """Case K6: after every reordering the stored summaries choose what a cache that stores none chooses."""

    class Plain(DynamicCache):
        """Not ours, so every step summarises all of its keys."""

    ids = prompt(200, device=llama.device)
    policy = PageskipPolicy(Budget(5), dense_layers=0, kind="minmax")  # exact bounds: the channels of minmax8 depend on the first keys
    found = []
    for cache in (LiveCache(llama.config), Plain(config=llama.config)):
        calls = []
        with use_pageskip(llama, policy, record=calls):
            tokens = generate(llama, ids, new=40, num_beams=3, **{cache_argument(llama): cache})
        found.append((tokens, [(layer, lengths.tolist(), pages.pages.tolist()) for layer, lengths, pages in calls]))
    assert found[0] == found[1]
    assert len({str(pages) for _, _, pages in found[0][1]}) > 20, "lists that hardly change would hide old summaries"


# --- sliding windows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_window_layers_stay_exact_and_are_listed(name, device):
    """Cases G7 and K4: no page left of the window is attended; the other layers go through the policy."""
    model = make(*WINDOWED[name](), device)
    ids = prompt(3 * WINDOW, device=device)
    expected, calls = generate(model, ids, new=2 * WINDOW), []
    with use_pageskip(model, EVERYTHING, record=calls) as session:
        assert generate(model, ids, new=2 * WINDOW) == expected
    assert len(set(expected[0])) > 3, "a model that repeats itself would hide a wrong key"
    assert set(session.exact_layers) == WINDOWED_LAYERS[name]
    assert set(session.exact_layers.values()) == {"sliding-window layer"}
    assert {layer for layer, _, _ in calls} == set(range(4)) - WINDOWED_LAYERS[name]


@pytest.mark.parametrize("rows", ["one", "ragged"])
@pytest.mark.parametrize("name", SHARED)
def test_layers_with_the_keys_of_another_stay_exact_and_are_listed(name, rows, device):
    """Case K4: they have no place in the cache and get the other layer's keys, padding back in place; that layer itself goes through the policy."""
    model = make(*SHARED[name](), device)
    assert [module.is_kv_shared_layer for module in model.modules() if hasattr(module, "is_kv_shared_layer")] == [False, False, True, True]
    ids, mask = ragged(model) if rows == "ragged" else (prompt(50, device=device), torch.ones(1, 50, dtype=torch.long, device=device))
    expected, calls = generate(model, ids, new=2 * WINDOW, attention_mask=mask), []
    with use_pageskip(model, EVERYTHING, record=calls) as session:
        assert generate(model, ids, new=2 * WINDOW, attention_mask=mask) == expected
    assert len(set(expected[0])) > 3, "a model that repeats itself would hide a wrong key"
    assert session.exact_layers == {0: "sliding-window layer", 2: "sliding-window layer", 3: "keys of another layer"}
    assert [layer for layer, _, _ in calls] == [1] * (2 * WINDOW - 1) and all(pages is not None for _, _, pages in calls)


def test_unsupported_head_dim_stays_exact(device):
    """Case K4: a width that the kernels lack."""
    model = make(LlamaConfig(**SIZES | dict(head_dim=48)), LlamaForCausalLM, device)
    ids = prompt(40, device=device)
    expected = generate(model, ids)
    with use_pageskip(model, FEW) as session:
        assert generate(model, ids) == expected
    assert session.exact_layers == {layer: "head dim 48" for layer in range(4)}


# --- entering and leaving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_model_is_restored(llama, attention, error):
    """Also when what runs inside is interrupted."""
    llama.set_attn_implementation(attention)
    ids = prompt(40, device=llama.device)
    expected, hooks = generate(llama, ids), len(llama._forward_pre_hooks)
    try:
        with use_pageskip(llama, FEW):
            assert llama.config._attn_implementation == ATTENTION and len(llama._forward_pre_hooks) == hooks + 1
            generate(llama, ids)
            if error:
                raise error
    except KeyboardInterrupt:
        pass
    assert llama.config._attn_implementation == attention and len(llama._forward_pre_hooks) == hooks
    assert not any(getattr(module, "pageskip_session", None) for module in llama.modules())
    assert generate(llama, ids) == expected
    with use_pageskip(llama, EVERYTHING):
        assert generate(llama, ids) == expected


def test_nested_use_is_refused(llama):
    """And the outer session goes on."""
    ids = prompt(40, device=llama.device)
    expected = generate(llama, ids)
    with use_pageskip(llama, EVERYTHING) as session:
        with pytest.raises(RuntimeError, match="inside another use_pageskip already"):
            with use_pageskip(llama, FEW):
                pass
        assert next(module for module in llama.modules() if hasattr(module, "layer_idx")).pageskip_session is session
        assert generate(llama, ids) == expected
    assert llama.config._attn_implementation == "sdpa"


def test_two_models_at_once(device):
    models = [make(*MODELS[name](), device) for name in MODELS]
    ids = prompt(40, device=device)
    expected = [generate(model, ids) for model in models]
    with use_pageskip(models[0], EVERYTHING), use_pageskip(models[1], EVERYTHING):
        assert [generate(model, ids) for model in models] == expected


def test_without_a_cache(llama):
    """use_cache=False recomputes everything in one forward each, which is prefill and stays exact."""
    ids = prompt(40, device=llama.device)
    expected, calls = generate(llama, ids, new=4), []
    with use_pageskip(llama, FEW, record=calls):
        assert generate(llama, ids, new=4, use_cache=False) == expected
    assert calls == []


def test_cache_argument(llama):
    import inspect

    assert cache_argument(llama) in inspect.signature(llama.forward).parameters


# --- the cache and its summaries ---------------------------------------------------------------------------------------


def fill(layer, tokens, seed, dtype=torch.float32, device="cpu", batch=2):
    """Append random keys and values; what update returned."""
    return layer.update(*(randn(batch, 2, tokens, 64, seed=seed + n, dtype=dtype, device=device) for n in (0, 10_000)))


def assert_summary_is_current(layer, page_size=16, **options):
    """What a rebuild from the cached keys gives; for minmax bit for bit, and what the reference says."""
    keys, lengths = layer.keys.contiguous(), layer.lengths
    found, rebuilt = layer.summary(page_size, **options), summarize_pages(keys, page_size, lengths=lengths, **options)
    assert found.page_size == page_size and torch.equal(found.lengths, lengths)
    assert (found.kind, found.bound_size, found.pages) == (rebuilt.kind, rebuilt.bound_size, rebuilt.pages)
    held = torch.arange(page_count(keys.shape[2], found.bound_size), device=keys.device) * found.bound_size < lengths[:, None]
    entries = lambda field: field.transpose(1, 2)[held]  # noqa: E731  (past a row's length an entry may hold anything)
    if found.kind == "minmax8":
        exact = summarize_pages(keys, page_size, lengths=lengths, **options | dict(kind="minmax"))
        codes = bounds8.encode(exact.kmin, exact.kmax, found.channel)  # in the channels that the first keys chose
        assert all(same_bits(entries(getattr(found, name)), entries(code)) for name, code in zip(("kmin", "kmax", "scale"), codes))
        return
    if found.kind != "minmax":
        for name, field in found.fields.items():  # sums, which a GPU may add up in another order for another number of pages
            torch.testing.assert_close(entries(field), entries(rebuilt.fields[name]), rtol=2**-20, atol=2**-20)
        return
    assert same_bits(entries(found.kmin), entries(rebuilt.kmin)) and same_bits(entries(found.kmax), entries(rebuilt.kmax))
    for name, bound in zip(("kmin", "kmax"), reference.minmax_summary(keys, found.bound_size, lengths)):
        assert torch.equal(entries(found.fields[name]).cpu().double(), entries(bound.to(keys.device)).cpu())


@pytest.mark.parametrize(
    "page_size, options", [(16, {}), (64, {}), (64, dict(bound_size=8)), (16, dict(kind="mean_radius")), (16, dict(kind="mean_std", bound_size=8)),
     (16, dict(kind="minmax8")), (64, dict(kind="minmax8", bound_size=8))],
)  # fmt: skip
def test_summaries_stay_current_token_by_token(page_size, options, device):
    """Cases G1 and G3: across page boundaries and past the first buffer (256 tokens), each step equal to a rebuild."""
    layer = LiveCacheLayer()
    fill(layer, 240, seed=0, device=device)
    assert_summary_is_current(layer, page_size, **options)
    for token in range(40):
        keys, values = fill(layer, 1, seed=token + 1, device=device)
        assert keys.shape == values.shape == (2, 2, 241 + token, 64)
        if token % 3 or token > 30:  # also when some steps never asked for the summary
            assert_summary_is_current(layer, page_size, **options)


def test_update_returns_all_that_was_appended(device):
    """Growing the buffers loses nothing."""
    layer, parts = LiveCacheLayer(), []
    for seed, tokens in enumerate((1, 200, 55, 1, 300, 2)):
        parts.append([randn(2, 2, tokens, 64, seed=seed + n, device=device) for n in (0, 100)])
        keys, values = layer.update(*parts[-1])
        assert same_bits(keys, torch.cat([part[0] for part in parts], 2)) and same_bits(values, torch.cat([part[1] for part in parts], 2))
        assert_summary_is_current(layer)
    assert layer.get_seq_length() == 559


def test_summary_of_a_chunk(device):
    """Case K5: several tokens at once, with whole pages inside and both ends partial."""
    layer = LiveCacheLayer()
    for seed, tokens in enumerate((5, 50, 9, 16, 48, 1)):
        fill(layer, tokens, seed, device=device)
        assert_summary_is_current(layer)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 47, 48, 50])
def test_truncate_then_append_other_keys(length, device):
    """Case K6: pages that are cut lose their removed keys (these are huge), in every later summary."""
    layer = LiveCacheLayer()
    fill(layer, 50, seed=0, device=device)
    layer.keys[:, :, length:] *= 1000
    assert_summary_is_current(layer)
    layer.truncate(length)
    assert layer.get_seq_length() == length == layer.keys.shape[2] == layer.values.shape[2]
    if length:
        assert_summary_is_current(layer)
    for seed in range(1, 20):
        fill(layer, 1, seed, device=device)
        assert_summary_is_current(layer)


@pytest.mark.parametrize("length", [-1, 51])
def test_truncate_refuses_other_lengths(length, device):
    layer = LiveCacheLayer()
    fill(layer, 50, seed=0, device=device)
    with pytest.raises(ValueError, match=f"length must lie between 0 and the 50 cached tokens, got {length}"):
        layer.truncate(length)


@pytest.mark.parametrize("removed, left", [(0, 50), (-1, 49), (-18, 32), (-50, 0), (-99, 0)])
def test_crop_as_transformers_does(removed, left, device):
    """Case K6: a negative number removes so many tokens."""
    layer = LiveCacheLayer()
    fill(layer, 50, seed=0, device=device)
    layer.summary(16)
    layer.crop(removed)
    assert layer.get_seq_length() == left
    fill(layer, 3, seed=1, device=device)
    assert_summary_is_current(layer)


def test_crop_of_an_empty_layer():
    layer = LiveCacheLayer()
    layer.crop(-3)
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize(
    "change, rows",
    [
        (lambda layer: layer.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda layer: layer.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
    ],
    ids=["reorder to one", "swap", "repeat", "select"],
)
@pytest.mark.parametrize("kind, padding", [("minmax", None), ("minmax", [0, 9]), ("minmax8", [20, 3])])
def test_rows_that_move_take_their_summaries_along(change, rows, kind, padding, device):
    """Case K6."""
    layer = LiveCacheLayer()
    layer.padding = None if padding is None else torch.tensor(padding, device=device)
    fill(layer, 40, seed=0, device=device)
    layer.summary(16, kind=kind)
    keys, values, lengths = layer.keys.clone(), layer.values.clone(), layer.lengths.tolist()
    change(layer)
    assert same_bits(layer.keys, keys[rows]) and same_bits(layer.values, values[rows])
    assert layer.lengths.tolist() == [lengths[row] for row in rows]
    assert_summary_is_current(layer, kind=kind)
    fill(layer, 10, seed=1, device=device, batch=len(rows))
    assert_summary_is_current(layer, kind=kind)


def test_reset_forgets_everything(device):
    layer = LiveCacheLayer()
    fill(layer, 40, seed=0, device=device)
    layer.summary(16)
    layer.reset()
    assert layer.get_seq_length() == 0
    fill(layer, 20, seed=1, dtype=torch.float16, device=device, batch=3)
    assert layer.keys.shape == (3, 2, 20, 64) and layer.keys.dtype == torch.float16
    assert_summary_is_current(layer)


def test_page_sizes_and_kinds_in_turn(device):
    """One cache, three policies: the summaries never mix."""
    layer = LiveCacheLayer()
    for seed in range(6):
        fill(layer, 21, seed, device=device)
        assert_summary_is_current(layer, 16)
        assert_summary_is_current(layer, 64)
        assert_summary_is_current(layer, 64, kind="mean", bound_size=16)


@given(
    st.lists(
        st.one_of(st.tuples(st.just("append"), st.integers(1, 40)), st.tuples(st.sampled_from(["truncate", "crop", "look"]), st.integers(0, 40))),
        max_size=12,
    ),
    st.sampled_from([None, [0, 0], [2, 0], [1, 30]]),
    st.sampled_from(["minmax", "minmax8"]),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_any_history_gives_current_summaries(history, padding, kind):
    """Cases G1 and K6 at random: appends, truncations, crops, with and without a summary between, and with padding that was left out."""
    layer = LiveCacheLayer()
    layer.padding = None if padding is None else torch.tensor(padding)
    fill(layer, 3 if padding is None else max(padding) + 1, seed=0)
    for seed, (what, n) in enumerate(history, 1):
        if what == "append":
            fill(layer, n, seed)
        elif what == "truncate":
            layer.truncate(max(1, layer.get_seq_length() - n))
        elif what == "crop":
            layer.crop(-min(n, layer.get_seq_length() - 1))
        else:
            assert_summary_is_current(layer, kind=kind)
    assert_summary_is_current(layer, kind=kind)


def test_rows_are_stored_without_their_padding(device):
    """And aligned() puts real tokens back where they were, past the first buffer, after a crop, with rows that are all padding at first."""
    layer, parts = LiveCacheLayer(), []
    layer.padding = torch.tensor([0, 300, 7], device=device)
    for seed, tokens in enumerate((20, 200, 95, 1, 1, 40)):
        parts.append([randn(3, 2, tokens, 64, seed=seed + n, device=device) for n in (0, 100)])
        held = layer.get_seq_length()
        layer.padding = torch.where(layer.padding >= held, torch.tensor([0, 300, 7], device=device), layer.padding)
        layer.update(*parts[-1])
        if tokens == 95:
            layer.crop(-5)
            parts[-1] = [part[:, :, :-5] for part in parts[-1]]
    whole = [torch.cat(kind, 2) for kind in zip(*parts)]
    assert layer.lengths.tolist() == [352, 52, 345]
    for stored, back, expected in zip((layer.keys, layer.values), layer.aligned(), whole):
        for row, left in enumerate((0, 300, 7)):
            assert same_bits(stored[row, :, : 352 - left], expected[row, :, left:]) and same_bits(back[row, :, left:], expected[row, :, left:])
    for options in (dict(), dict(kind="minmax8"), dict(page_size=64, bound_size=8)):
        assert_summary_is_current(layer, **options)


@torch.inference_mode()
def test_summaries_inside_a_model_equal_a_rebuild(llama):
    """Cases G8 and G1: after a live run each layer's summaries are those of its cached (rotated) keys."""
    ids = prompt(50, device=llama.device)
    with use_pageskip(llama, FEW):
        cache = LiveCache(llama.config)
        prefill(llama, ids[:, :30], cache)
        for token in range(30, 50):
            step(llama, ids[:, token : token + 1], cache)
            for layer in cache.layers:
                assert_summary_is_current(layer)


@torch.inference_mode()
def test_the_bound_holds_on_the_keys_that_attention_reads(model, monkeypatch):
    """Case G8: what the rotation returns, caught on its way, never exceeds the bound on its page; summaries of the unturned keys would break it."""
    rotary = sys.modules[type(model).__module__]
    before, turned, bounds = [], [], []
    real = rotary.apply_rotary_pos_emb

    def caught(q, k, *rest, **options):
        before.append((q, k))
        turned.append(real(q, k, *rest, **options))
        return turned[-1]

    class Watched(PageskipPolicy):
        def score(self, q, keys, summary):
            bounds.append(page_scores(q, summary(kind="minmax"), group="none"))
            return super().score(q, keys, summary)

    monkeypatch.setattr(rotary, "apply_rotary_pos_emb", caught)
    ids, cache = prompt(150, device=model.device), LiveCache(model.config)
    with use_pageskip(model, Watched(Budget(64), dense_layers=0)):
        prefill(model, ids[:, :140], cache)
        for token in range(140, 150):
            step(model, ids[:, token : token + 1], cache)
    assert len(turned) == 4 * 11 and len(bounds) == 4 * 10
    broken = 0
    for layer in range(4):
        keys, unturned = (torch.cat([k for _, k in calls[layer::4]], 2) for calls in (turned, before))
        for n, (q, _) in enumerate(turned[layer::4][1:]):
            read, summary = 141 + n, summarize_pages(unturned[:, :, : 141 + n], 16)
            best = reference.best_key(q[:, :, 0], keys[:, :, :read], 16)
            slack = reference.score_error(q[:, :, 0], summarize_pages(keys[:, :, :read], 16))
            assert (bounds[4 * n + layer].cpu() >= best - slack).all()
            broken += int((page_scores(q[:, :, 0], summary, group="none").cpu() < best - slack).sum())
    assert broken, "the rotation changed too little to tell"


@torch.inference_mode()
def test_cache_truncate_rolls_the_model_back(model):
    """Case K6: decode, roll back, decode other tokens: as if the first ones had never been."""
    ids, other = prompt(60, device=model.device), prompt(60, seed=1, device=model.device)
    other[:, :40] = ids[:, :40]
    expected = model(other).logits[0]
    with use_pageskip(model, EVERYTHING):
        cache = LiveCache(model.config)
        prefill(model, ids[:, :40], cache)
        for token in range(40, 55):
            step(model, ids[:, token : token + 1], cache)
        cache.truncate(40)
        for token in range(40, 60):
            torch.testing.assert_close(step(model, other[:, token : token + 1], cache)[0], expected[token], **CLOSE)


def test_sliding_layers_cannot_be_rolled_back(device):
    cache = LiveCache(WINDOWED["gemma3"]()[0])
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "LiveCacheLayer"] * 2
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer layer cannot be rolled back"):
        cache.truncate(0)


# --- policies ----------------------------------------------------------------------------------------------------------


def choose(policy, layer_idx=5, tokens=160, device="cpu"):
    q, keys = randn(1, 4, 64, device=device), randn(1, 2, tokens, 64, seed=1, device=device)
    return policy.choose(layer_idx, q, keys, int32([tokens], device), lambda **options: summarize_pages(keys, policy.page_size, **options))


@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_the_forced_pages_and_the_budget(name, device):
    """Cases G5 and G6 for all of them, so that a comparison at equal budget is one."""
    if name == "full":
        assert choose(FullPolicy(), device=device) is None
        return
    pages = choose(POLICIES[name](Budget(5, sink=1, local=2)), device=device)
    assert isinstance(pages, PageList) and (pages.counts == 5).all()
    for head in pages.pages[0].tolist():
        assert head == sorted(set(head)) and {0, 8, 9} <= set(head)


@pytest.mark.parametrize("layer_idx, dense", [(0, True), (1, True), (2, False)])
def test_first_layers_read_everything(layer_idx, dense):
    for policy in (PageskipPolicy(Budget(5)), AdaptivePolicy(Budget(5)), WindowPolicy(Budget(5)), RandomPolicy(Budget(5))):
        assert (choose(policy, layer_idx) is None) == dense


def test_window_policy_keeps_the_newest_pages():
    assert choose(WindowPolicy(Budget(4))).pages.tolist() == [[[0, 7, 8, 9]] * 2]


def test_random_policy_is_decided_by_its_seed():
    drawn = {seed: [choose(policy).pages.tolist() for policy in [RandomPolicy(Budget(5), seed=seed)] for _ in range(6)] for seed in (0, 1)}
    again = RandomPolicy(Budget(5), seed=0)
    assert drawn[0] == [choose(again).pages.tolist() for _ in range(6)]
    assert drawn[0] != drawn[1] and drawn[0][0] != drawn[0][1]


def test_policy_refuses_other_page_sizes():
    for policy in (PageskipPolicy, AdaptivePolicy, WindowPolicy, RandomPolicy):
        with pytest.raises(ValueError, match="page_size must be one of"):
            policy(Budget(5), page_size=48)


def test_policy_takes_kind_bound_size_and_group():
    """The lists are those of the scores that the options name; the defaults are the bound in 8 bits, the largest over the group."""
    q, keys = randn(1, 4, 64), randn(1, 2, 640, 64, seed=1)
    lengths = torch.tensor([640], dtype=torch.int32)
    lists = []
    for options in ({}, dict(kind="minmax"), dict(kind="mean_std"), dict(bound_size=8), dict(group="sum"), dict(kind="mean", group="softmax_sum")):
        scores = dict(kind="minmax8", bound_size=None, group="max") | options
        summary = summarize_pages(keys, 16, kind=scores["kind"], bound_size=scores["bound_size"])
        expected = select_pages(page_scores(q, summary, group=scores["group"]), Budget(8), lengths, 16)
        lists.append(choose(PageskipPolicy(Budget(8), **options), tokens=640).pages)
        assert torch.equal(lists[-1], expected.pages)
    assert any(not torch.equal(one, lists[0]) for one in lists[2:])


@pytest.mark.parametrize("name, value", [("kind", "median"), ("bound_size", 32), ("group", "none")])
def test_policy_refuses_other_options(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        PageskipPolicy(Budget(5), **{name: value})


@pytest.mark.parametrize("options", [dict(), dict(kind="minmax"), dict(bound_size=8), dict(kind="mean")], ids=str)
def test_the_adaptive_policy_lists_what_its_definition_says(options):
    """By hand: softmax over pages for each query head, mean over the group, every page from ``least`` on, the best of them up to the budget."""
    q, keys = randn(1, 4, 64), randn(1, 2, 640, 64, seed=1)
    q[:, :2] *= 4
    summary = summarize_pages(keys, 16, **dict(kind="minmax8") | options)
    shares = torch.softmax(page_scores(q, summary, group="none") / 8, dim=-1).view(1, 2, 2, 40).mean(2)[0]
    least = shares.quantile(0.7).item()
    budget = Budget(14, sink=1, local=2)
    forced, expected = {0, 38, 39}, []
    for head in shares:
        rivals = sorted((page for page in range(1, 38) if head[page] >= least), key=lambda page: -head[page])
        expected.append(sorted(forced | set(rivals[:11])))
    assert min(map(len, expected)) < 14 == max(map(len, expected)), "one list should end at the threshold, the other at the budget"
    policy = AdaptivePolicy(budget, least=least, **options)
    pages = policy.choose(5, q, keys, int32([640]), lambda **wanted: summarize_pages(keys, 16, **wanted))
    assert [[page for page in head if page >= 0] for head in pages.pages[0].tolist()] == expected
    assert pages.counts[0].tolist() == [len(head) for head in expected]


def test_a_peaked_head_reads_less_than_a_flat_one():
    """The two KV heads see the same keys; the first has a query that points at one page, the second one that tells nothing."""
    keys = randn(1, 1, 640, 64).expand(1, 2, 640, 64).contiguous()
    keys[:, :, 163] = 3 * keys[:, :, 163]
    q = torch.cat([2 * keys[:, :1, 163], 0.01 * randn(1, 1, 64, seed=2)], dim=1)
    pages = AdaptivePolicy(Budget(30), least=0.01).choose(5, q, keys, int32([640]), lambda **options: summarize_pages(keys, 16, **options))
    assert pages.pages[0, 0, :4].tolist() == [0, 10, 38, 39] and pages.counts.tolist() == [[4, 30]]


@pytest.mark.parametrize("least", [-0.1, 1.5, float("nan")])
def test_adaptive_refuses_what_is_no_share(least):
    with pytest.raises(ValueError, match=f"least must be a share of the attention, 0 to 1, got {least}"):
        AdaptivePolicy(Budget(5), least=least)


@torch.inference_mode()
def test_lists_of_different_lengths_run_in_the_model(llama):
    """With least 0 the adaptive policy is exact where the budget holds all; above it the lists of one step differ in length and are still read."""
    ids, calls = prompt(300, device=llama.device), []
    exact = llama(ids).logits[:, -1]
    with use_pageskip(llama, AdaptivePolicy(Budget(64), dense_layers=0, least=0.0)):
        cache = LiveCache(llama.config)
        prefill(llama, ids[:, :-1], cache)
        torch.testing.assert_close(step(llama, ids[:, -1:], cache), exact, **CLOSE)
    with use_pageskip(llama, AdaptivePolicy(Budget(64), dense_layers=0, least=0.05), record=calls):
        cache.truncate(299)
        found = step(llama, ids[:, -1:], cache)
    counts = torch.stack([pages.counts[0] for _, _, pages in calls])
    assert len(counts.unique()) > 1 and counts.min() >= 3 and counts.max() < 19
    assert found.isfinite().all() and not torch.allclose(found, exact, **CLOSE)
