"""The whole model's token step: token for token what transformers generates, and what it launches between the products."""

import pytest
import torch
from torch.nn.functional import linear

from pageskip_lib import Budget, CacheFull, DecodeStep, fused  # before transformers: it imports triton
from pageskip_lib.live_model import use_pageskip
from pageskip_lib.loop import DecodeLoop, empty_caches, joined
from pageskip_lib.quality.needle import haystack
from pageskip_lib.quality.policies import PageskipPolicy

from helpers import each_backend, each_backend_and_dtype, int32, randn, same_bits, waiting_fails
from test_live_model import MODELS, WINDOWED, generate, make, prompt

EVERYTHING = Budget(64)


@pytest.fixture(params=MODELS)
def model(request, device):
    return make(*MODELS[request.param](), device)


@pytest.fixture
def qwen2(device):
    return make(*MODELS["qwen2 with biases"](), device)


def make_loop(model, batch=1, capacity=128, budget=EVERYTHING, **options):
    return DecodeLoop(model, empty_caches(model, batch, capacity), budget, **dict(page_size=16, dense_layers=0) | options)


# --- between the products ----------------------------------------------------------------------------------------------


def close(found, expected, dtype, sums=8):
    """fp32 arithmetic with a few roundings (``sums`` of them at most beside the last), then one rounding to dtype."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=sums * 2**-23 * scale)


@each_backend_and_dtype
@pytest.mark.parametrize("size", [1, 100, 576, 1536])
def test_residual_and_norm(backend, dtype, size, device):
    residual, x, weight = (randn(*shape, seed=seed, dtype=dtype, device=device) for seed, shape in enumerate([(3, size), (3, size), (size,)]))
    summed = (residual.double() + x.double()).to(dtype)
    for given, hidden in ((None, residual.clone()), (x, summed)):
        truth = hidden.double() / (hidden.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        close(fused.add_norm(residual, given, weight, 1e-5, backend), truth, dtype)
        assert same_bits(residual, hidden)


@each_backend_and_dtype
@pytest.mark.parametrize("heads, kv_heads, dim", [(1, 1, 64), (9, 3, 64), (6, 2, 80), (12, 2, 128)])
def test_rotary_embedding(backend, dtype, heads, kv_heads, dim, device):
    """Pairs (x[i], x[i + D/2]) turn by the angle of the position; values stay, bit for bit; nothing lands in another head."""
    projected = randn(2, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    angle = randn(2, dim // 2, seed=1, device=device).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k, v = (torch.full((2, count, dim), float("nan"), dtype=dtype, device=device) for count in (heads, kv_heads, kv_heads))
    fused.rotate(projected, cos, sin, q, k, v, backend)
    given = projected.view(2, -1, dim)
    pairs = torch.view_as_complex(torch.stack(given.double().chunk(2, dim=-1), dim=-1))
    turn = torch.complex(cos.double(), sin.double())[:, None, : dim // 2]
    turned = torch.cat([(pairs * turn).real, (pairs * turn).imag], dim=-1)
    close(q, turned[:, :heads], dtype)
    close(k, turned[:, heads : heads + kv_heads], dtype)
    assert same_bits(v, given[:, heads + kv_heads :])


@each_backend_and_dtype
@pytest.mark.parametrize("size", [1, 100, 1025])
def test_gate(backend, dtype, size, device):
    gate_up = 4 * randn(3, 2 * size, dtype=dtype, device=device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(fused.gated(gate_up, backend), gate / (1 + torch.exp(-gate)) * up, dtype)


def test_projections_are_joined_in_place_and_once(qwen2):
    """The model computes what it did, holds what it did, and a second loop finds the projections side by side already."""
    ids, attention = prompt(20, device=qwen2.device), qwen2.model.layers[1].self_attn
    logits, x = qwen2(ids).logits, randn(1, 256, device=qwen2.device)
    apart = torch.cat([projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=-1)
    first, second = make_loop(qwen2), make_loop(qwen2)
    torch.testing.assert_close(linear(x, *first.layers[1].qkv), apart, rtol=2**-20, atol=2**-20 * apart.abs().max().item())
    assert torch.equal(qwen2(ids).logits, logits)
    for one, other in zip(first.layers, second.layers):
        for name in ("qkv", "out", "gate_up", "down"):
            for a, b in zip(getattr(one, name), getattr(other, name)):
                assert a is b is None or a.data_ptr() == b.data_ptr() and a.shape == b.shape
    weight = first.layers[1].qkv[0]
    weight[256:384] = 0
    assert not attention.k_proj.weight.any() and attention.q_proj.weight.any() and attention.v_proj.weight.any()


def test_tensors_that_only_look_adjacent_are_moved():
    """Neighbours in the wrong order, with a gap, or of another allocation."""
    whole = torch.arange(12.0).view(6, 2)
    for parts in ([whole[2:4], whole[:2]], [whole[:2], whole[4:]], [whole[:2], whole[2:4].clone()]):
        expected = torch.cat(parts)
        assert torch.equal(joined(parts), expected) and all(part.data_ptr() != whole.data_ptr() for part in parts)
    assert joined([whole[:2], whole[2:6]]).data_ptr() == whole.data_ptr()


# --- token for token ----------------------------------------------------------------------------------------------------


@each_backend
def test_a_full_budget_generates_transformers_own_tokens(model, backend):
    """Prompts of different lengths in one batch, each as if it were alone; and going on where the last call ended."""
    new = 12 if backend == "torch" or model.device.type == "cuda" else 3  # the interpreter needs a second a token
    prompts = [prompt(length, seed=length, device=model.device)[0] for length in (45, 3, 31)]
    expected = [generate(model, ids[None], new)[0] for ids in prompts]
    loop = make_loop(model, batch=3, capacity=64, backend=backend)
    loop.prefill(prompts)
    made = torch.cat([loop.generate(1), loop.generate(new - 1)], dim=1)
    assert made.tolist() == expected and len({token for row in expected for token in row}) > new // 2
    for step, layer in zip(loop.steps, range(4)):
        assert step.lengths.tolist() == [45 + new, 3 + new, 31 + new] and step.room == 64 - 45 - new, layer


def test_the_embedded_model_generates_transformers_own_tokens(smollm):
    model, tokenizer = smollm
    ids = tokenizer(haystack("transcripts")[:3000], return_tensors="pt").input_ids[:, :200]
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, min_new_tokens=16, do_sample=False)
    expected = model.generate(ids, **options)[:, 200:]
    loop = DecodeLoop(model, empty_caches(model, 1, 256), EVERYTHING, page_size=16)
    loop.prefill(ids)
    assert torch.equal(loop.generate(16), expected) and len(expected.unique()) > 8


def test_a_qwen2_with_the_real_ones_heads_generates_transformers_own_tokens(qwen):
    model, tokenizer = qwen
    ids = tokenizer(haystack("transcripts")[:2000], return_tensors="pt").input_ids[:, :300]
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0)
    loop = DecodeLoop(model, empty_caches(model, 1, 320), EVERYTHING, page_size=16, dense_layers=1)
    loop.prefill(ids)
    assert torch.equal(loop.generate(16), model.generate(ids, **options)[:, 300:])


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_a_small_budget_generates_the_tokens_of_the_same_policy(model, dense_layers, monkeypatch):
    """By exact bounds the rules are the same. Codes of 8 bits are scaled by the prompt here, by the prompt and one token there.

    The first tokens lie within the budget, the later ones past it, where it must matter which pages are read.
    """
    monkeypatch.setattr("pageskip_lib.decode.break_even", lambda k, budget, page_size, card: budget.pages * page_size)
    budget, ids = Budget(4), prompt(60, device=model.device)
    exact = generate(model, ids, 40)
    with use_pageskip(model, PageskipPolicy(budget, kind="minmax", dense_layers=dense_layers)):
        expected = generate(model, ids, 40)
    loop = make_loop(model, budget=budget, kind="minmax", dense_layers=dense_layers)
    loop.prefill(list(ids))
    assert not loop.selects
    assert loop.generate(40).tolist() == expected != exact
    assert loop.selects


def test_dense_layers_read_everything(qwen2):
    """With all layers dense a budget of one page more than the forced ones changes nothing."""
    ids = prompt(90, device=qwen2.device)
    loop = make_loop(qwen2, budget=Budget(4), dense_layers=4)
    loop.prefill(list(ids))
    assert loop.generate(12).tolist() == generate(qwen2, ids, 12) and not loop.selects


def test_only_layers_that_may_choose_pages_do(qwen2, monkeypatch):
    """A layer that reads everything could also list everything: the same tokens, later."""
    monkeypatch.setattr("pageskip_lib.decode.break_even", lambda k, budget, page_size, card: budget.pages * page_size)
    seen, run = [], DecodeStep._run
    monkeypatch.setattr(DecodeStep, "_run", lambda step, selects: seen.append(selects) or run(step, selects))
    loop = make_loop(qwen2, budget=Budget(4), dense_layers=1)
    loop.prefill(list(prompt(63, device=qwen2.device)))
    loop.generate(2)
    assert seen == [False] * 4 + [False, True, True, True]


def test_lengths_can_be_put_back(qwen2):
    """The same tokens again, from the caches as they were."""
    loop = make_loop(qwen2, batch=2)
    loop.prefill(list(prompt(50, batch=2, device=qwen2.device)))
    first = loop.generate(8)
    loop.set_lengths(int32([50, 50], qwen2.device))
    loop.tokens.copy_(first[:, 0])
    assert torch.equal(loop.generate(8), first)


def test_one_call_is_one_token_and_returns_its_logits(qwen2):
    ids = prompt(30, device=qwen2.device)
    loop = make_loop(qwen2)
    loop.prefill(list(ids))
    ids = torch.cat([ids, loop.tokens[:, None]], dim=1)
    logits, expected = loop(), qwen2(ids).logits[:, -1]
    # As in test_live_model: two fp32 paths through 4 layers.
    torch.testing.assert_close(logits, expected, rtol=64 * 2**-22, atol=64 * 2**-22 * expected.abs().max().item())
    assert torch.equal(loop.tokens, expected.argmax(-1))


def test_what_does_not_fit_is_refused(qwen2, device):
    loop = make_loop(qwen2, batch=2, capacity=40)
    ids = prompt(38, device=device)[0]
    for wrong in ([ids], [ids, prompt(41, device=device)[0]], [ids, ids[:0]], [ids, ids[None]]):
        with pytest.raises(ValueError, match="prompts must be 2 tensors of 1 to 40"):
            loop.prefill(wrong)
    loop.prefill([ids, ids[:5]])
    before = loop.tokens.clone()
    with pytest.raises(CacheFull, match="room for 2 more, not 3"):
        loop.generate(3)
    assert loop.steps[0].lengths.tolist() == [38, 5] and torch.equal(loop.tokens, before)
    loop.generate(2)
    with pytest.raises(CacheFull, match="room for 0 more"):
        loop()
    with pytest.raises(ValueError, match="caches must hold k and v of 4 layers"):
        DecodeLoop(qwen2, empty_caches(qwen2, 1, 64)[:3], EVERYTHING)
    with pytest.raises(ValueError, match="caches must hold"):
        DecodeLoop(qwen2, [(k.half(), v.half()) for k, v in empty_caches(qwen2, 1, 64)], EVERYTHING)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="CUDA graph needs Triton kernels on a CUDA GPU"):
            loop.capture()


@pytest.mark.parametrize("name, error", [("mistral", TypeError), ("qwen2", ValueError), ("gemma3", TypeError)])
def test_models_that_the_loop_does_not_know_are_refused(name, error, device):
    model = make(*WINDOWED[name](), device)
    with pytest.raises(error, match="model must"):
        make_loop(model)


def test_layers_that_were_exchanged_are_refused(qwen2):
    class Adapted(torch.nn.Linear):
        pass

    qwen2.model.layers[2].mlp.up_proj = Adapted(256, 256, bias=False)
    with pytest.raises(TypeError, match="nn.Linear, neither quantised nor adapted, got Adapted as model.layers.2.mlp.up_proj"):
        make_loop(qwen2)
    other = make(*MODELS["llama"](), "cpu")
    other.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="hidden_act 'silu'"):
        make_loop(other)


# --- captured -----------------------------------------------------------------------------------------------------------


def captured_and_replayed(call):
    """``call`` on a side stream, then in a CUDA graph, then replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "part", ["embedding", "rotary angles", "norm", "product", "rotate", "attend to all", "attend to pages", "gate", "head", "argmax"]
)
@torch.no_grad()
def test_every_part_of_the_token_step_can_be_captured(part, qwen2):
    """When the whole cannot be, this says which part waits for the host."""
    model = qwen2.half()
    loop = make_loop(model, batch=2, budget=Budget(4))
    loop.set_lengths(int32([100, 90], model.device))
    layer, x = loop.layers[1], randn(2, 256, dtype=torch.float16, device=model.device)
    positions = layer.step.lengths.long()[:, None]
    cos, sin = (angle[:, 0] for angle in model.model.rotary_emb(x, positions))
    parts = {
        "embedding": lambda: model.model.embed_tokens(loop.tokens),
        "rotary angles": lambda: model.model.rotary_emb(x, loop.steps[0].lengths.long()[:, None]),
        "norm": lambda: fused.add_norm(x, x.clone(), layer.input_norm.weight, 1e-6, "triton"),
        "product": lambda: linear(x, *layer.qkv),
        "rotate": lambda: fused.rotate(linear(x, *layer.qkv), cos, sin, layer.step.q, layer.step.k_new, layer.step.v_new, "triton"),
        "attend to all": lambda: layer.step._run(selects=False),
        "attend to pages": lambda: layer.step._run(selects=True),
        "gate": lambda: fused.gated(linear(x, *layer.gate_up), "triton"),
        "head": lambda: model.lm_head(x),
        "argmax": lambda: loop.tokens.copy_(model.lm_head(x).argmax(-1)),
    }
    captured_and_replayed(parts[part])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_captured_loop_equals_an_eager_one(model, dtype, monkeypatch):
    """From prompts within the budget to lengths far past it and back: tokens, logits, caches and summaries, bit for bit."""
    monkeypatch.setattr("pageskip_lib.decode.break_even", lambda k, budget, page_size, card: budget.pages * page_size)
    model = model.to(dtype)
    prompts = [prompt(length, seed=length, device=model.device)[0] for length in (40, 3)]
    eager, captured = (make_loop(model, batch=2, budget=Budget(4), dense_layers=1) for _ in range(2))
    for loop in (eager, captured):
        loop.prefill(prompts)
    captured.capture()
    assert torch.equal(eager.tokens, captured.tokens) and captured.steps[0].lengths.tolist() == [40, 3] and len(captured._graphs) == 2
    for n in range(60):
        assert eager.selects == captured.selects == (40 + n >= 64)
        expected, found = eager(), captured()
        assert same_bits(found, expected), f"token {n}: logits differ by up to {(found.float() - expected.float()).abs().max().item():.1e}"
        assert torch.equal(eager.tokens, captured.tokens), f"token {n}"
    for n, (one, other) in enumerate(zip(eager.steps, captured.steps)):
        for row, length in enumerate((100, 63)):
            for a, b in ((one.k, other.k), (one.v, other.v)):
                assert same_bits(a[row, :, :length], b[row, :, :length]), f"layer {n}"
        assert all(torch.equal(a, b) for a, b in zip(one._state(), other._state())), f"layer {n}"
    for loop in (eager, captured):
        loop.set_lengths(int32([40, 3], model.device))
        loop.tokens.fill_(7)
    assert torch.equal(eager.generate(50), captured.generate(50))


@pytest.mark.gpu
def test_a_captured_loop_never_waits_for_the_gpu(qwen2, monkeypatch):
    """Nor does it allocate: a hundred replays, some of either graph, between two looks at the memory."""
    monkeypatch.setattr("pageskip_lib.decode.break_even", lambda k, budget, page_size, card: budget.pages * page_size)
    loop = make_loop(qwen2.half(), batch=2, capacity=512, budget=Budget(4))
    loop.prefill([prompt(40, device="cuda")[0], prompt(3, device="cuda")[0]])
    loop.capture()
    loop.generate(2)
    before = torch.cuda.memory_allocated()
    with waiting_fails():
        made = loop.generate(100)
    assert torch.cuda.memory_allocated() <= before + made.nbytes + 512 and len(made.unique()) > 3  # a model with random weights soon repeats itself
