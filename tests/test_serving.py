"""use_pageskip_serving: requests that share one engine get what each gets alone, whoever joins, leaves, or held its blocks before."""

import gc
import threading
from functools import partial

import pytest
import torch
from helpers import each_backend, same_bits
from test_live_model import EVERYTHING, FEW, MODELS, SIZES, WINDOWED, WINDOWED_LAYERS, make
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from pageskip_lib import Budget, load_model, page_scores, select_pages, serving, summarize_pages, use_pageskip, use_pageskip_serving
from pageskip_lib.quality.needle import haystack, is_right, plant
from pageskip_lib.quality.policies import CoarsePolicy, FullPolicy, PageskipPolicy, WindowPolicy

BLOCK = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"  # its name from 5.18 on, and before
LENGTHS = (50, 3, 120, 1, 77, 33, 200)
FEW_EXACT = PageskipPolicy(Budget(5), dense_layers=1, kind="minmax")  # no channels, which every cache sizes by its own first keys


@pytest.fixture
def llama(device):
    return make(*MODELS["llama"](), device)


def prompts(*lengths, vocabulary=128):
    return [torch.randint(2, vocabulary, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def options(new=20, block=64, blocks=16, batch=128, **more):
    """Small on purpose: prompts are prefilled in pieces beside others that decode, and blocks have to be waited for."""
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=batch, max_memory_percent=0.5, **{BLOCK: block}, **more)
    return dict(generation_config=generation, continuous_batching_config=config)


def answers(model, inputs, **sizes):
    results = list(model.generate_batch(inputs, **options(**sizes)).values())
    assert [result.error for result in results] == [None] * len(inputs)
    return [result.generated_tokens for result in results]


def alone(model, ids, policy, new=20):
    """The tokens that ``generate`` makes of one prompt inside ``use_pageskip``."""
    ids = torch.tensor([ids], device=model.device)
    with use_pageskip(model, policy):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


class Watched:
    """A policy and the serving module's ``sparse_decode`` in one: compares what was scored with the keys that are then read."""

    reads, kind, page_size, bound_size, dense_layers = "summaries", "minmax", 16, 16, 0

    def __init__(self, monkeypatch, budget=5):
        self.budget, self.checked, self.stale, self.rows = Budget(budget), 0, 0, set()
        self.decode = serving.sparse_decode
        monkeypatch.setattr(serving, "sparse_decode", self.sparse_decode)

    def choose(self, layer_idx, q, keys, lengths, summary):
        self.summary = summary()
        return PageskipPolicy(self.budget, kind="minmax", dense_layers=0).choose(layer_idx, q, keys, lengths, summary)

    def sparse_decode(self, q, k, v, pages, *, page_size, lengths, table, scale):
        keys = k[table.long().clamp(min=0)].transpose(1, 2).flatten(2, 3)
        truth = summarize_pages(keys, page_size, lengths=lengths)
        held = (torch.arange(table.shape[1], device=q.device) * page_size < lengths[:, None])[:, None, :, None]
        for name in ("kmin", "kmax"):
            self.stale += not same_bits(getattr(self.summary, name) * held, getattr(truth, name) * held)
        assert int(pages.counts.max()) <= self.budget.pages
        self.checked, self.rows = self.checked + 1, self.rows | {len(lengths)}
        return self.decode(q, k, v, pages, page_size=page_size, lengths=lengths, table=table, scale=scale)


# --- the same answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("name", MODELS)
def test_with_every_page_the_answers_are_the_engines(name, block, device):
    """Requests of one to 200 tokens through few blocks, some prefilled in pieces while others decode."""
    model = make(*MODELS[name](), device)
    sizes = dict(block=block, blocks=max(2, 512 // block))
    expected = answers(model, prompts(*LENGTHS), **sizes)
    with use_pageskip_serving(model, EVERYTHING) as session:
        assert answers(model, prompts(*LENGTHS), **sizes) == expected
    assert session.exact_layers == {}


@pytest.mark.parametrize("policy", [FullPolicy(), PageskipPolicy(Budget(64), 32, 0, "mean_radius"), PageskipPolicy(Budget(64), 32, 0, "minmax8", 8)])
def test_policies_that_read_everything(policy, llama):
    expected = answers(llama, prompts(50, 90))
    with use_pageskip_serving(llama, policy):
        assert answers(llama, prompts(50, 90)) == expected


def test_a_request_gets_what_it_gets_alone(llama):
    """Under a budget that is too small, so that the pages matter: the engine's answers are those of generate() one by one."""
    inputs = prompts(*LENGTHS)
    with use_pageskip_serving(llama, FEW_EXACT):
        found = answers(llama, inputs)
    assert found == [alone(llama, ids, FEW_EXACT) for ids in inputs]
    assert found != answers(llama, inputs)


@each_backend
@pytest.mark.parametrize("kind", ["minmax8", "minmax"])
def test_the_kernels_walk_the_engines_blocks(kind, backend, llama, monkeypatch):
    """Its pool has other strides than ours, and between a layer's pages lie those of other layers."""

    class Policy(PageskipPolicy):
        def choose(self, layer_idx, q, keys, lengths, summary):
            if layer_idx < self.dense_layers:
                return None
            scores = page_scores(q, summary(kind=self.kind, bound_size=self.bound_size), backend=backend)
            return select_pages(scores, self.budget, lengths, self.page_size, backend=backend)

    policy = PageskipPolicy(Budget(5), 16, 1, kind)
    with use_pageskip_serving(llama, policy):
        expected = answers(llama, prompts(100, 130, 20), new=4)
    for name in ("dense_decode", "sparse_decode", "BlockSummaries"):
        monkeypatch.setattr(serving, name, partial(getattr(serving, name), backend=backend))
    with use_pageskip_serving(llama, Policy(Budget(5), 16, 1, kind)):
        assert answers(llama, prompts(100, 130, 20), new=4) == expected


@pytest.mark.parametrize("name", WINDOWED)
def test_windowed_layers_stay_the_engines(name, device):
    model = make(*WINDOWED[name](), device)
    expected = answers(model, prompts(50, 90, 3))
    with use_pageskip_serving(model, EVERYTHING) as session:
        assert answers(model, prompts(50, 90, 3)) == expected
    assert session.exact_layers == dict.fromkeys(WINDOWED_LAYERS[name], "sliding-window layer")


def test_attention_unlike_plain_attention_stays_the_engines(device):
    config = LlamaConfig(**SIZES | dict(num_attention_heads=8, num_key_value_heads=4))  # D = 32
    model = make(config, LlamaForCausalLM, device)
    expected = answers(model, prompts(50, 90))
    with use_pageskip_serving(model, FEW) as session:
        assert answers(model, prompts(50, 90)) == expected
    assert session.exact_layers == dict.fromkeys(range(4), "head dim 32")


# --- summaries of blocks that change hands -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_summaries_are_those_of_the_keys(name, device, monkeypatch):
    """Every row that decodes, at every layer and step, while requests join, leave, and take over each other's blocks; beside windowed layers too."""
    model, policy = make(*(MODELS | WINDOWED)[name](), device), Watched(monkeypatch)
    with use_pageskip_serving(model, policy):
        for lengths in (LENGTHS, LENGTHS[::-1]):  # two engines, one after the other
            answers(model, prompts(*lengths), blocks=6)
    assert policy.checked > 100 and policy.stale == 0
    assert len(policy.rows) > 2  # rows joined and left


def test_summaries_that_outlive_a_block_are_noticed(llama, monkeypatch):
    """The test above on purpose with a mistake: pages that were summarised for an earlier request are taken as known."""
    policy, update, seen = Watched(monkeypatch), serving.BlockSummaries.update, {}

    def careless(self, pages, page, slot, held):
        full = {int(number) for number, count in zip(slot, held) if count == 16}
        known = seen.setdefault(self, set())
        fresh = torch.tensor([int(number) not in known for number in slot], device=slot.device)
        known |= full
        if fresh.any():
            update(self, pages, page[fresh], slot[fresh], held[fresh])

    monkeypatch.setattr(serving.BlockSummaries, "update", careless)
    with use_pageskip_serving(llama, policy):
        answers(llama, prompts(*LENGTHS), blocks=6)
    assert policy.stale > 0


def test_a_shared_prefix_brings_its_summaries(llama, monkeypatch):
    matched, search = [], PagedAttentionCache.search_prefix_match
    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", lambda *a, **k: matched.append(search(*a, **k)) or matched[-1])
    first, second = prompts(150, 30)
    second = first[:140] + second
    policy = Watched(monkeypatch)
    with use_pageskip_serving(llama, policy), llama.continuous_batching_context_manager(**options(new=8)) as manager:
        found = []
        for ids in (first, second, second):
            manager.add_request(ids, max_new_tokens=8)
            while (result := manager.get_result(timeout=60)) is not None and not result.is_finished():
                pass
            assert result.error is None
            found.append(result.generated_tokens)
    assert max(matched) >= 128
    assert policy.stale == 0
    monkeypatch.undo()
    few = PageskipPolicy(Budget(5), dense_layers=0, kind="minmax")
    assert found == [alone(llama, ids, few, new=8) for ids in (first, second, second)]


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(block=24), "must hold whole pages of 16 tokens, but hold 24"),
        (dict(use_cuda_graph=True), "without use_cuda_graph"),
        (dict(use_cuda_graph=(False, True)), "without use_cuda_graph"),
        (dict(use_async_batching=True), "without use_async_batching"),
        (dict(decode_compile_config=CompileConfig()), "without decode_compile_config"),
        (dict(cpu_offload_space=0.1), "without cpu_offload_space"),
    ],
)
def test_engines_that_would_pass_the_summaries_by(sizes, message, llama):
    with use_pageskip_serving(llama, FEW), pytest.raises(ValueError, match=message):
        llama.generate_batch(prompts(30), **options(**sizes))


def test_a_policy_that_needs_the_keys_is_refused(llama):
    """The engine's keys lie in blocks of many requests: what such a policy would get has their sizes, not their numbers."""
    with pytest.raises(ValueError, match="coarse ranks pages by the keys"), use_pageskip_serving(llama, CoarsePolicy(Budget(6), 16)):
        pass


def test_several_sequences_a_request_are_refused(llama):
    given = options()
    given["generation_config"].num_return_sequences = 2
    with use_pageskip_serving(llama, FEW), pytest.raises(ValueError, match="num_return_sequences must be 1"):
        llama.generate_batch(prompts(30), **given)


def test_an_engine_from_before_is_refused(llama):
    """Its blocks were written while nobody summarised them."""
    with llama.continuous_batching_context_manager(**options(), persistent_manager=True) as manager:
        with use_pageskip_serving(llama, FEW):
            manager.add_request(prompts(30)[0], max_new_tokens=3)
            assert "was made before" in manager.get_result(timeout=60).error
    llama._cached_continuous_batching_manager = manager
    with use_pageskip_serving(llama, FEW), pytest.raises(RuntimeError, match="keeps an engine from before"):
        llama.generate_batch(prompts(30), **options())
    llama.destroy_cached_continuous_batching_manager()


def test_only_the_engine_may_ask_the_model(llama):
    with use_pageskip_serving(llama, FEW), pytest.raises(RuntimeError, match="through generate_batch"):
        llama(torch.tensor([prompts(30)[0]], device=llama.device))


def test_contexts_do_not_nest(llama):
    with use_pageskip(llama, FEW), pytest.raises(RuntimeError, match="inside another"), use_pageskip_serving(llama, FEW):
        pass
    with use_pageskip_serving(llama, FEW), pytest.raises(RuntimeError, match="inside another"), use_pageskip(llama, FEW):
        pass


def test_a_policy_that_asks_for_other_summaries(llama, monkeypatch):
    monkeypatch.setattr(PageskipPolicy, "score", lambda self, q, keys, summary: page_scores(q, summary(kind="mean")))
    with use_pageskip_serving(llama, FEW):
        (result,) = llama.generate_batch(prompts(100), **options()).values()
    assert "The summaries kept are of kind 'minmax8'" in result.error


def test_everything_is_as_before_afterwards(llama):
    before, begin = llama.config._attn_implementation, llama.init_continuous_batching
    expected = answers(llama, prompts(40))
    with pytest.raises(KeyError), use_pageskip_serving(llama, FEW):
        raise KeyError
    assert llama.config._attn_implementation == before and llama.init_continuous_batching == begin
    assert not llama._forward_pre_hooks and not llama._forward_hooks
    assert answers(llama, prompts(40)) == expected
    assert threading.active_count() < 20


def test_leaving_waits_for_an_engine_that_runs(llama):
    """Afterwards its blocks would be read by an attention function that knows nothing of them."""
    given, (ids,) = options(), prompts(90)
    with use_pageskip_serving(llama, FEW_EXACT):
        manager = llama.init_continuous_batching(given["generation_config"], given["continuous_batching_config"])
        manager.start()
        manager.add_request(ids, max_new_tokens=20)
    assert not manager.is_running()
    assert manager.get_result(timeout=60).generated_tokens == alone(llama, ids, FEW_EXACT)


def test_nothing_of_an_engine_is_kept(llama):
    with use_pageskip_serving(llama, FEW) as session:
        answers(llama, prompts(40))
        gc.collect()
        assert not session.summaries


# --- a real model --------------------------------------------------------------------------------------------------------


def found_codes(model, tokenizer, policy, codes, context):
    """For each code, planted in a haystack of its own: does its request answer with it? All requests at once."""
    prompts = [plant(tokenizer, haystack("transcripts"), context=context, depth=0.3, code=code, seed=seed) for seed, code in enumerate(codes)]
    sizes = dict(new=6, block=256, blocks=2 * len(codes) * (context // 256 + 1), batch=512)
    with use_pageskip_serving(model, policy):
        texts = [tokenizer.decode(tokens) for tokens in answers(model, [prompt.body + prompt.question for prompt in prompts], **sizes)]
    return [is_right(text, code) for text, code in zip(texts, codes)]


CODES = ("7491", "2856")
QUARTER = Budget.for_tokens(0.25 * 800, 16)


def test_needles_are_found_under_a_budget_and_not_by_a_window(smollm):
    assert found_codes(*smollm, FullPolicy(16), CODES, 800) == [True, True]
    assert found_codes(*smollm, PageskipPolicy(QUARTER, 16), CODES, 800) == [True, True]
    assert found_codes(*smollm, WindowPolicy(QUARTER, 16), CODES, 800) == [False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_needles_on_the_gpu(dtype, monkeypatch):
    """The same through the compiled kernels, summaries included."""
    launched, launch = [], serving.BlockSummaries._launch
    monkeypatch.setattr(serving.BlockSummaries, "_launch", lambda *given: launched.append(1) or launch(*given))
    model, tokenizer = load_model(device="cuda", dtype=dtype)
    assert found_codes(model, tokenizer, PageskipPolicy(QUARTER, 16), CODES, 800) == [True, True]
    assert len(launched) > 28 * 5
    assert found_codes(model, tokenizer, WindowPolicy(QUARTER, 16), CODES, 800) == [False, False]
