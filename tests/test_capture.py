"""A captured set is what the model really computed, wherever it was cut, and survives the disk."""

import torch
import pytest
from safetensors.torch import save_file

from pageskip_lib import dense_decode, load_model  # noqa: F401  (before transformers: it imports triton)
from pageskip_lib.live_model import LiveCache, prefill, step
from pageskip_lib.quality import capture as module
from pageskip_lib.quality.capture import Captured, capture, patched_sdpa
from pageskip_lib.quality.needle import haystack

from helpers import same_bits
from test_live_model import WINDOWED, WINDOWED_LAYERS, make, prompt


@pytest.fixture(scope="module")
def run(smollm):
    """(ids, what capture made of them, {(step, layer): input of the output projection} of plain transformers)."""
    model, tokenizer = smollm
    ids = tokenizer(haystack("transcripts")[:4000]).input_ids[:300]
    captured = capture(model, ids, steps=3, every=7, context="a test")
    inputs = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, n=n: inputs.update({n: args[0]})) for n, layer in enumerate(model.model.layers)
    ]  # fmt: skip
    with torch.inference_mode():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return ids, captured, inputs


def test_shapes_lengths_and_provenance(run):
    ids, captured, _ = run
    assert captured.queries.shape == (3, 30, 1, 9, 64) and captured.keys.shape == captured.values.shape == (30, 3, 300, 64)
    assert captured.lengths.tolist() == [286, 293, 300] and captured.ids.tolist() == ids
    assert captured.layers == list(range(30)) and captured.kv_heads == [0, 1, 2] and captured.scale == 64**-0.5
    assert captured.provenance["model"] == "SmolLM2-135M-Instruct" and captured.provenance["context"] == "a test"
    assert {"date", "torch", "transformers", "dtype", "device"} <= set(captured.provenance)


def test_it_is_what_the_model_computed(run):
    """Attention over the captured tensors is what one plain causal forward fed to its output projections, in every layer and step."""
    _, captured, inputs = run
    for layer in range(30):
        for n, length in enumerate(captured.lengths.tolist()):
            keys, values = captured.keys[None, layer, :, :length], captured.values[None, layer, :, :length]
            out = dense_decode(captured.queries[n, layer], keys, values, scale=captured.scale)
            torch.testing.assert_close(out.flatten(), inputs[layer][0, length - 1], rtol=0, atol=1e-4)
    shift = dense_decode(captured.queries[1, 5], captured.keys[None, 5], captured.values[None, 5], scale=captured.scale)
    assert (shift.flatten() - inputs[5][0, 292]).abs().max() > 1e-3, "the tolerance would let a wrong length pass"


def test_layers_and_heads_are_cut_out_of_the_whole(smollm, run):
    ids, whole, _ = run
    part = capture(smollm[0], ids, steps=3, every=7, layers=[21, 5], kv_heads=[1])
    assert part.layers == [5, 21] and part.kv_heads == [1]
    assert same_bits(part.queries, whole.queries[:, [5, 21], :, 3:6]) and same_bits(part.keys, whole.keys[[5, 21], 1:2])
    assert same_bits(part.values, whole.values[[5, 21], 1:2])


def test_the_spy_in_sdpas_place_sees_the_same(smollm, run):
    ids, captured, _ = run
    model = smollm[0]
    original, cache = torch.nn.functional.scaled_dot_product_attention, LiveCache(model.config)
    with torch.inference_mode(), patched_sdpa() as calls:
        prefill(model, torch.tensor([ids[:-1]]), cache)
        assert calls == []  # several queries a call: not a decode step
        step(model, torch.tensor([ids[-1:]]), cache)
    assert torch.nn.functional.scaled_dot_product_attention is original
    assert len(calls) == 30
    for layer, (q, k) in enumerate(calls):
        assert k.shape == (1, 3, 300, 64), "expanded to the query heads"
        torch.testing.assert_close(q, captured.queries[-1, layer], rtol=0, atol=1e-4)
        torch.testing.assert_close(k[0], captured.keys[layer], rtol=0, atol=1e-4)


def test_the_spy_leaves_when_the_code_fails():
    original = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(KeyError), patched_sdpa():
        raise KeyError
    assert torch.nn.functional.scaled_dot_product_attention is original


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_with_a_window_are_not_captured(name):
    """Their decode is exact and never asks the policy; asking for one is refused."""
    model = make(*WINDOWED[name](), "cpu")
    left = sorted(set(range(4)) - WINDOWED_LAYERS[name])
    ids = prompt(60)[0]
    if left:
        assert capture(model, ids, steps=2, every=1).layers == left
    with pytest.raises(ValueError, match="layers must be among"):
        capture(model, ids, steps=2, every=1, layers=sorted(WINDOWED_LAYERS[name]))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(steps=0), "steps and every must be 1 or more"),
        (dict(steps=5, every=20), "need at least 82 tokens, got 60"),
        (dict(kv_heads=[2]), r"kv_heads must be among \[0, 1\]"),
        (dict(layers=[4]), r"layers must be among \[0, 1, 2, 3\]"),
    ],
)
def test_bad_wishes_are_refused(change, words):
    from transformers import LlamaConfig, LlamaForCausalLM
    from test_live_model import SIZES

    model = make(LlamaConfig(**SIZES), LlamaForCausalLM, "cpu")
    with pytest.raises(ValueError, match=words):
        capture(model, prompt(60)[0], **dict(steps=2, every=8) | change)


def test_saved_and_reloaded(run, tmp_path):
    captured = run[1]
    captured.save(tmp_path / "set.safetensors")
    again = Captured.load(tmp_path / "set.safetensors")
    assert all(same_bits(getattr(captured, name), getattr(again, name)) for name in module.TENSORS)
    assert all(getattr(captured, name) == getattr(again, name) for name in module.FACTS)


def test_a_file_that_is_no_set_is_named(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\0\0\0")
    for name in ("other", "torn"):
        with pytest.raises(ValueError, match=f"^{name}.safetensors is not a captured set"):
            Captured.load(tmp_path / f"{name}.safetensors")


def test_the_shipped_set_is_small_and_says_where_it_is_from():
    captured = Captured.load()
    assert module.SHIPPED.stat().st_size < 3.3e6
    assert captured.queries.shape == (8, 6, 1, 3, 64) and captured.keys.shape == (6, 1, 2048, 64) and captured.keys.dtype == torch.float16
    assert captured.layers == [0, 1, 5, 8, 13, 21] and captured.provenance["context"] == "transcripts, seed 0"


def test_the_shipped_set_is_the_embedded_models(smollm):
    """The same tokens through the model in fp32: what ships differs by fp16's rounding only."""
    shipped = Captured.load()
    ids = shipped.ids.tolist()[:200]
    cache = LiveCache(smollm[0].config)
    with torch.inference_mode():
        prefill(smollm[0], torch.tensor([ids]), cache)
    for n, layer in enumerate(shipped.layers):
        keys = cache.layers[layer].keys[0, shipped.kv_heads]
        assert (shipped.keys[n, :, :200].float() - keys).norm() / keys.norm() < 0.02, layer
