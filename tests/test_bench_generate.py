"""The benchmark of the whole token step: its arms do what their names say, on the same caches, and its split adds up."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pageskip_lib import costs, decode
from pageskip_lib.bench import dense, generate, records, timing
from pageskip_lib.bench.__main__ import main

TOKENS = 4096
FIRST = TOKENS - generate.SPARE  # where a measurement begins
TIMES = {generate.SERVED: 40.0, generate.EVERY: 30.0, "pageskip dense": 100.0, "SDPA": 90.0, "SDPA flash": 90.0, "SDPA cuDNN": 80.0,
    generate.NONE: 20.0, generate.PRODUCTS: 15.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_shapes_select(monkeypatch):
    """Shapes of a few megabytes, which a GPU had better read whole."""
    monkeypatch.setattr(decode, "break_even", lambda k, budget, page_size, card: budget.pages * page_size)


@pytest.fixture
def measured(monkeypatch, device):
    """(rows, calls, before) of the tiny model at 2 x 4,096; nothing is timed, every arm takes what TIMES says."""
    given = []

    def time_arms(calls, *, before=None, **options):
        given[:] = calls, before
        return {name: timing.Timing(TIMES[name], TIMES[name] - 1, TIMES[name] + 1) for name in calls}

    monkeypatch.setattr(generate, "time_arms", time_arms)
    torch.manual_seed(0)
    model = generate.random_model(generate.TINY, device, dense.DTYPES[device][0])
    rows = generate.measure_generate(model, "tiny", "random", 2, TOKENS, device)
    return rows, *given


class Operators(TorchDispatchMode):
    """Notes the operators that run, and the weights that products read."""

    def __init__(self):
        super().__init__()
        self.names, self.weights = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        if self.names[-1] in ("mm", "addmm"):
            self.weights[args[-1].data_ptr()] = args[-1].nbytes
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["SmolLM2-135M", "DeepSeek-R1-Distill-Qwen-1.5B", "Llama-3-8B"])
def test_a_random_model_has_the_shape_of_the_real_one(name):
    """Without memory: its weights are as many as costs counts, those that a step reads as well."""
    shape = costs.MODELS[name]
    model = generate.random_model(shape, "meta", torch.float16)
    assert generate.weight_bytes(model) == (2 * shape.parameters, 2 * shape.parameters_read)
    assert (model.model.layers[0].self_attn.q_proj.bias is not None) == shape.qkv_bias


def test_all_arms_share_the_caches_and_exact_ones_agree(measured):
    _, calls, before = measured
    (served,), (every,), (whole,) = (calls[name][0].__defaults__ for name in (generate.SERVED, generate.EVERY, "pageskip dense"))
    for one, other in ((served, every), (served, whole)):
        assert all(a.k is b.k and a.v is b.v for a, b in zip(one.steps, other.steps))
    logits = {}
    for name in calls:
        if name != generate.PRODUCTS:
            before()
            assert all((step.lengths == FIRST).all() for loop in (served, every, whole) for step in loop.steps)
            for loop in (served, every, whole):
                loop.tokens.fill_(3)
                for step in loop.steps:
                    step.k[:, :, FIRST] = step.v[:, :, FIRST] = float("nan")  # where each arm must put the token
            logits[name] = calls[name][0]()
    truth = logits.pop("pageskip dense")
    difference = {name: (found - truth).abs().max().item() / truth.abs().max().item() for name, found in logits.items()}
    # Two paths through 3 layers, a dozen roundings each; without some of the pages, or without attention, far more.
    assert all(value < 32 * torch.finfo(truth.dtype).eps for name, value in difference.items() if name.startswith("SDPA")), difference
    assert all(value > 2**-4 for name, value in difference.items() if not name.startswith("SDPA")), difference
    assert len([name for name in logits if name.startswith("SDPA")]) >= 1


def test_layers_that_read_everything_are_the_first_two_or_none_or_all(measured):
    """Case J3: with NaN past the budget's pages only the loops that never look there stay finite."""
    _, calls, before = measured
    before()
    for name, expected in ((generate.SERVED, [False, False, True]), (generate.EVERY, [True] * 3), ("pageskip dense", [False] * 3)):
        (loop,) = calls[name][0].__defaults__
        assert [step.selects for step in loop.steps] == expected, name
        for step, selects in zip(loop.steps, expected):
            kept = step.v.clone()
            step.v[:, :, : FIRST - 128] = float("nan")  # all but the newest pages: no list is all of those
            step.q.normal_()
            assert step._run(selects).isnan().any()
            step.v.copy_(kept)
            assert not step._run(selects).isnan().any()
    rows, _, _ = measured
    assert {row["selects"] for row in rows} == {True}


def test_the_products_are_all_of_them_and_nothing_else(measured):
    rows, calls, _ = measured
    with Operators() as seen:
        calls[generate.PRODUCTS][0]()
    assert [name for name in seen.names if name in ("mm", "addmm")] == ["addmm", "mm", "mm", "mm"] * 3 + ["mm"]
    assert set(seen.names) <= {"mm", "addmm", "t", "view", "_unsafe_view", "detach"}
    norms, biases = 7 * 256, 3 * (4 + 2 * 2) * 64
    assert sum(seen.weights.values()) == rows[0]["weight_bytes_read"] - getattr(torch, rows[0]["dtype"]).itemsize * (norms + biases)


def test_without_attention_all_the_rest_is_there(measured):
    _, calls, before = measured
    before()
    with Operators() as seen:
        calls[generate.NONE][0]()
    assert sum(name in ("mm", "addmm") for name in seen.names) == 13 and "embedding" in seen.names and "argmax" in seen.names
    assert not any("attention" in name or "logsumexp" in name or "topk" in name or "index_put" in name for name in seen.names)


def test_the_split_adds_up_and_bytes_are_counted(measured):
    rows, _, _ = measured
    by_arm, size = {row["arm"]: row for row in rows}, getattr(torch, rows[0]["dtype"]).itemsize
    for arm, row in by_arm.items():
        assert row["microseconds"] == TIMES[arm] and row["weights"] == "random"
        assert (row["kv_bytes"], row["weight_bytes"]) == (2 * 3 * 2 * 2 * TOKENS * 64 * size, size * generate.TINY.parameters)
        assert row["summary_bytes"] == 3 * 2 * 2 * (TOKENS // 64 * (2 * 64 + 4) + 4 * 64)
        if arm != generate.PRODUCTS:
            assert (row["products"], row["rest"], row["attention"]) == (15.0, 5.0, TIMES[arm] - 20.0)
    best = min(TIMES[arm] for arm in by_arm if arm not in (generate.NONE, generate.PRODUCTS, generate.SERVED, generate.EVERY))
    assert by_arm[generate.EVERY]["speed_up"] == 3.0 and by_arm[generate.EVERY]["speed_up_best"] == round(best / 30, 3)
    assert by_arm[generate.SERVED]["tokens_per_s"] == 50_000 and by_arm[generate.SERVED]["wall_microseconds"] > 0
    assert by_arm[generate.SERVED]["dense_layers"] == 2


def test_the_table_says_what_was_measured(measured):
    rows, _, _ = measured
    held = sum(rows[0][name] for name in ("weight_bytes", "kv_bytes", "summary_bytes"))
    rows = [row | (dict(peak_allocated=1.02 * held, peak_reserved=1.04 * held) if row["arm"] == generate.SERVED else {}) for row in rows]
    text = generate.table(rows)
    assert f"tiny (random weights), 3 layers, {rows[0]['dtype']}, 2 x 4,096, page 64, 32 pages" in text and "3.00x" in text
    assert "allocated at most 1.020 of it; reserved at most 1.040 of it" in text
    assert "too short to choose pages from" in generate.table([row | dict(selects=False) for row in rows])


def test_the_command_records_a_run(device, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(generate.SHAPES, device, {generate.TINY.name: [(1, 2560)]})
    monkeypatch.setattr(generate, "REPEATS", 2)
    monkeypatch.setattr(generate, "SECONDS_EACH", 0.001)
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    main(["generate", "--record", "here"])
    record = records.load("generate", "here")
    assert "1 x 2,560" in capsys.readouterr().out and "random keys" in record["settings"]["method"]
    assert {generate.SERVED, generate.EVERY, "pageskip dense", generate.NONE, generate.PRODUCTS} < {row["arm"] for row in record["rows"]}
    assert all(bool(row["kernels"]) == (device == "cuda") for row in record["rows"])


def test_what_the_readme_says_of_the_record_is_so():
    readme = " ".join((records.RECORDED.parent.parent / "README.md").read_text(encoding="utf-8").split())
    rows = {(row["batch"], row["tokens"], row["arm"]): row for row in records.load("generate", "h200")["rows"] if row["weights"] == "random"}
    served = {at: rows[*at, generate.SERVED] for at in ((32, 65536), (8, 65536), (1, 65536), (1, 262144))}
    flash, best = ([f"{row[name]:.2f}x" for row in served.values()] for name in ("speed_up", "speed_up_best"))
    milliseconds = [f"{rows[32, 65536, arm]['microseconds'] / 1000:.1f} ms" for arm in (generate.SERVED, "SDPA flash")]
    assert f"takes {milliseconds[0]} instead of {milliseconds[1]} a token of 32 x 65,536 ({flash[0]} over flash, " in readme
    assert f"{rows[32, 65536, generate.EVERY]['speed_up']:.2f}x if its first two layers" in readme
    assert f"{flash[1]} at 8 x 65,536, {flash[2]} at 1 x 65,536 and {flash[3]} at 1 x 262,144" in readme
    assert f"over the fastest exact attention {best[0]}, {best[1]}, {best[2]} and {best[3]}" in readme


@pytest.mark.gpu
def test_memory_is_that_of_weights_cache_and_summaries(device):
    """At most 5% more, once the cache is large enough for PyTorch's fixed workspaces, some 100 MB, not to count."""
    model = generate.random_model(generate.TINY, device, torch.float16)
    row = next(row for row in generate.measure_generate(model, "tiny", "random", 32, 65536, device) if row["arm"] == generate.SERVED)
    assert row["peak_allocated"] <= 1.05 * sum(row[name] for name in ("weight_bytes", "kv_bytes", "summary_bytes"))
