"""The arithmetic of notebook 01 against things that count for themselves: PyTorch's parameters, its FLOP counter, tensors' bytes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pageskip_lib import dense_decode
from pageskip_lib.bench import records
from pageskip_lib.cards import CARDS
from pageskip_lib.costs import MODELS, ModelShape, decode_step, prefill_step

SMOL, DEEPSEEK, LLAMA = MODELS.values()


def built(shape, device="meta"):
    """The same shape as a transformers model; on "meta" its parameters take no memory and can be counted."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    config = (Qwen2Config if shape.qkv_bias else LlamaConfig)(
        hidden_size=shape.hidden, intermediate_size=shape.feed_forward, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocabulary, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_a_real_model(shape):
    model = built(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    looked_up = 0 if shape.tied else model.get_input_embeddings().weight.numel()
    assert shape.parameters - looked_up == shape.parameters_read


def test_published_sizes():
    """As the models' cards say: 134.5M, 1.78B, 8.03B."""
    assert [round(shape.parameters / 1e6, 1) for shape in MODELS.values()] == [134.5, 1777.1, 8030.3]


def test_the_embedded_shape_is_the_embedded_model(smollm):
    model, _ = smollm
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (30, 9, 3, 64)
    assert sum(p.numel() for p in model.parameters()) == SMOL.parameters


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_attention_flops_and_bytes_of_a_real_call(shape):
    batch, tokens = 2, 48
    q = torch.randn(batch, shape.heads, shape.head_dim)
    k, v = (torch.randn(batch, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
    with FlopCounterMode(display=False) as counter:
        dense_decode(q, k, v, backend="torch")
    step = decode_step(shape, batch, tokens, kv_bytes=4)
    assert counter.get_total_flops() * shape.layers == step.attention_flops
    assert (k.nbytes + v.nbytes) * shape.layers == step.cache
    assert step.attention_flops / step.cache == shape.group / 2  # fp32; twice that in fp16


def test_weight_flops_are_the_matrix_products_of_a_real_model():
    """Every weight matrix meets every sequence once in a decode step; in a prefill the layers meet every token, the head the last."""
    shape = ModelShape("tiny", 2, 4, 2, 8, 32, 64, 100, tied=True)
    model = built(shape, device="cpu").eval()
    norms = 2 * 2 * 32  # their weights scale, which is no matrix product; a last norm of 32 beside those of the layers

    def products(ids):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(ids, use_cache=False, logits_to_keep=1)
        return counter.get_flop_counts()["Global"][torch.ops.aten.mm]

    assert products(torch.ones(5, 1, dtype=torch.long)) == decode_step(shape, 5, 1).weight_flops - 2 * 5 * (norms + 32)
    assert products(torch.ones(3, 7, dtype=torch.long)) == prefill_step(shape, 3, 7).weight_flops - 2 * 3 * 7 * norms


def test_prefill_attention_is_the_sum_over_its_tokens():
    one_by_one = sum(decode_step(DEEPSEEK, 2, tokens).attention_flops for tokens in range(1, 11))
    assert prefill_step(DEEPSEEK, 2, 10).attention_flops == one_by_one


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    card = CARDS["H200"]
    decode, prefill = decode_step(DEEPSEEK, 32, 65536), prefill_step(DEEPSEEK, 1, 4096)
    assert decode.floor(card) == decode.bytes / card.bandwidth > decode.flops / card.fp16_flops
    assert prefill.floor(card) == prefill.flops / card.fp16_flops > prefill.bytes / card.bandwidth
    assert decode.ceiling(card) == 32 / decode.floor(card)
    assert decode.fits(card) and not decode.fits(CARDS["RTX 4090"])


def test_weights_count_for_every_sequence_and_cache_for_each():
    one, many = decode_step(LLAMA, 1, 1024), decode_step(LLAMA, 64, 1024)
    assert many.weights == one.weights and many.cache == 64 * one.cache
    assert many.weight_flops / many.weights == 64 and many.attention_flops / many.cache == LLAMA.group == 4
    assert decode_step(LLAMA, 1, 1024, kv_bytes=1).cache * 2 == one.cache


@pytest.mark.parametrize("batch, tokens, sizes", [(0, 5, {}), (1.0, 5, {}), (1, -1, {}), (1, 5, dict(kv_bytes=0)), (1, 5, dict(weight_bytes=-2))])
def test_bad_input_is_one_sentence(batch, tokens, sizes):
    for step in (decode_step, prefill_step):
        with pytest.raises(ValueError, match=r"must be .*, got .*\.$"):
            step(SMOL, batch, tokens, **sizes)


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, (int, float)) else []


def test_reported_figures_name_their_source_and_all_appear_in_the_notebook():
    from test_notebook_contract import NOTEBOOKS, read, texts

    post = records.reported("rtx4090_post")
    assert "Don't read the haystack" in post["source"] and "not measured by this project" in post["note"]
    shown = "\n".join(texts(o) for cell in read(NOTEBOOKS / "01_memory_wall.ipynb").cells for o in cell.get("outputs", []))
    missing = [number for number in numbers({k: v for k, v in post.items() if k != "rig"}) if f"{number:,}" not in shown]
    assert not missing, f"01_memory_wall shows no {missing}"
    assert post["source"] in shown and all(value in shown for value in post["rig"].values())


def test_what_nobody_reported_is_named_with_what_there_is():
    with pytest.raises(ValueError, match="data/reported has no moon.json; it has .*rtx4090_post"):
        records.reported("moon")
