"""Known bugs of page-skipping decode, from the summary to the result: offsets past 2^31, captured graphs, ties, sinks, very many pages."""

import inspect
import os
import pkgutil
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import pageskip_lib
from pageskip_lib import (
    Budget, PageList, dense_decode, page_scores, reference, runtime, scores, select_pages, sparse, sparse_decode,
    summaries, summarize_pages,
)  # fmt: skip
from pageskip_lib.bench import records
from pageskip_lib.decode import DecodeStep
from pageskip_lib.quality.capture import Captured
from pageskip_lib.quality.recall import Layer, Setting, measure

from helpers import assert_is_attention, each_backend, far_apart, int32, make_qkv, randn, same_bits, waiting_fails

INF, NAN = float("inf"), float("nan")


def chosen(q, summary, budget, backend):
    """The page lists that a step makes of a summary, as [B][Hkv] lists."""
    found = select_pages(page_scores(q, summary, backend=backend), budget, summary.lengths, summary.page_size, backend=backend)
    return [[head[:count] for head, count in zip(*row)] for row in zip(found.pages.tolist(), found.counts.tolist())]


# --- offsets past 2^31 elements (the keys', the values', one summary's and the scores' are beside each kernel's own tests) ----


@each_backend
@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "head"])
def test_query_offsets_past_2_to_31(backend, axis, device, tmp_path):
    """Case B4 for the score and for the kernel that walks a list (sgl-project/sglang#20389, Dao-AILab/flash-attention#2260)."""
    q, k, v = make_qkv(3, 3, 1, 40, 64, dtype=torch.float16, device=device)
    far, summary = far_apart(q, axis, tmp_path), summarize_pages(k, 16)
    pages = PageList.from_rows([[[0, 2]], [[1]], [[0, 1, 2]]], device)
    near, found = (page_scores(queries, summary, group="none", backend=backend) for queries in (q, far))
    # PyTorch's matrix product may take another algorithm for other strides: 128 products in fp32.
    assert same_bits(found, near) if backend == "triton" else torch.allclose(found, near, rtol=128 * 2**-24, atol=1e-4)
    near, found = (sparse_decode(queries, k, v, pages, page_size=16, backend=backend) for queries in (q, far))
    assert same_bits(found, near)


@each_backend
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "page"])
@pytest.mark.parametrize("kind", ["mean_radius", "mean_std", "mean"])
def test_summary_offsets_past_2_to_31(backend, axis, kind, device, tmp_path):
    """Case B1 for the other kinds: each field has strides of its own, and the radius has one fewer."""
    q, k = randn(3, 3, 64, dtype=torch.float16, device=device), randn(3, 3, 40, 64, seed=1, dtype=torch.float16, device=device)
    summary = summarize_pages(k, 16, kind=kind)
    near = page_scores(q, summary, backend=backend)
    for name, field in summary.fields.items():
        far = summaries.PageSummary(kind, 16, summary.lengths, **summary.fields | {name: far_apart(field, axis, tmp_path)})
        found = page_scores(q, far, backend=backend)
        # Other strides, another order of the sums: of 64 products, and of the query's norm.
        assert torch.allclose(found, near, rtol=128 * 2**-24, atol=1e-4), name


@each_backend
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "token"])
def test_a_step_past_2_to_31(backend, axis, device, tmp_path):
    """Cases B1 and B4 for the append: it writes where the token belongs, and nowhere 2^32 elements before it."""
    _, k, v = make_qkv(3, 3, 3, 40, 64, dtype=torch.float16, device=device)
    given = [randn(3, 3, 64, seed=seed, dtype=torch.float16, device=device) for seed in (5, 6, 7)]
    outs, caches = [], []
    for keys, values in ((k, v), (far_apart(k, axis, tmp_path), far_apart(v, axis, tmp_path))):
        step = DecodeStep(keys, values, int32([33, 20, 39], device), Budget(2, sink=0, local=1), heads=3, page_size=16, backend=backend)
        outs.append(step(*given).clone())
        caches.append((keys, values, step.summary.kmin, step.summary.kmax, step.lengths))
    assert same_bits(*outs)
    assert all(same_bits(near, far) for near, far in zip(*caches))
    assert torch.equal(caches[1][0][2, :, 39], given[1][2]) and torch.equal(caches[1][1][2, :, 39], given[2][2])


@pytest.mark.gpu
def test_more_than_2_to_31_scores(device):
    """Cases B4 and G14: the last sequence's scores and pages are those of a batch of one (ml-explore/mlx-lm#1454)."""
    batch, heads, pages = 1025, 64, 32768
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    fields = {name: randn(1, 8, pages, 64, seed=seed, dtype=torch.float16, device=device) for seed, name in enumerate(("kmin", "kmax"))}
    full = torch.full((batch,), pages * 16, dtype=torch.int32, device=device)
    wide = summaries.PageSummary("minmax", 16, full, **{name: field.expand(batch, -1, -1, -1) for name, field in fields.items()})
    q = randn(batch, heads, 64, seed=2, dtype=torch.float16, device=device)
    found = page_scores(q, wide, group="none")
    assert found.numel() > 2**31
    alone = page_scores(q[-1:], summaries.PageSummary("minmax", 16, full[-1:], **fields), group="none")
    assert same_bits(found[-1:], alone) and alone.std() > 0
    lists = [select_pages(each, Budget(32), full[-1:].expand(len(each)), 16, backend="triton") for each in (found, alone)]
    assert torch.equal(lists[0].pages[-1:], lists[1].pages) and (lists[0].counts == 32).all()


@pytest.mark.gpu
def test_summaries_of_more_than_2_to_31_elements(device):
    """Case B1 for what the summary writes: 8-token entries of 513 sequences."""
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    k = randn(1, 8, 32768, 128, dtype=torch.float16, device=device)
    found, alone = (summarize_pages(keys, 16, bound_size=8) for keys in (k.expand(513, -1, -1, -1), k))
    assert found.kmin.numel() > 2**31
    for row in (0, 511, 512):
        assert same_bits(found.kmin[row], alone.kmin[0]) and same_bits(found.kmax[row], alone.kmax[0])


# --- CUDA graphs -------------------------------------------------------------------------------------------------------


def test_nothing_tunes_itself():
    """Case E4: a kernel that times its variants when it is first called would do so inside a capture (triton-lang/triton#10596)."""
    for module in pkgutil.walk_packages(pageskip_lib.__path__, "pageskip_lib."):
        if not module.name.endswith("__main__"):
            source = inspect.getsource(import_module(module.name))
            assert "autotune" not in source and "triton.heuristics" not in source, module.name


FIRST_CALL = """
import torch
from pageskip_lib import Budget
from pageskip_lib.decode import DecodeStep
def step():
    generator = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(2, 2, 4096, 96, dtype=torch.float16, device="cuda", generator=generator) for _ in range(2))
    return DecodeStep(k, v, torch.tensor([700, 63], dtype=torch.int32, device="cuda"), Budget(8), heads=6, page_size=32)
captured, eager = step().capture(), step()
for seed in range(3):
    torch.manual_seed(seed)
    given = [torch.randn(2, heads, 96, dtype=torch.float16, device="cuda") for heads in (6, 2, 2)]
    assert torch.equal(captured(*given), eager(*given))
assert captured.lengths.tolist() == eager.lengths.tolist() == [703, 66]
print("captured first")
"""


@pytest.mark.gpu
def test_a_capture_as_the_very_first_call(tmp_path):
    """Case E4: nothing has been compiled before, in this process or any other, so ``capture`` has to see to it outside of the graph."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0 and "captured first" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed")
def test_the_host_never_reads_a_tensor(monkeypatch):
    """Case E5: CUDA tensors without memory, which raise when their values are asked for; kernels are noted down, not launched."""
    card = runtime.Card("none", sms=132, l2_bytes=60 << 20, shared_bytes=227 << 10, dependent_launch=True)
    kernels = {module: mock.MagicMock() for module in ("summaries", "scores", "selection", "sparse")}
    for (name, kernel), attribute in zip(kernels.items(), ("_minmax_kernel", "_score_kernel", "_select_kernel", "_sparse_kernel")):
        monkeypatch.setattr(import_module(f"pageskip_lib.{name}"), attribute, kernel)
    for name in (*kernels, "bounds8"):
        if name != "summaries":
            monkeypatch.setattr(import_module(f"pageskip_lib.{name}"), "card", lambda device: card)
    monkeypatch.setattr(sparse, "splits_for", lambda *shape: 1)
    with FakeTensorMode():
        q, k = (torch.empty(shape, dtype=torch.float16, device="cuda") for shape in ((2, 8, 128), (2, 2, 4096, 128)))
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
        summary = summarize_pages(k, 64, lengths=lengths, backend="triton")
        for group in ("max", "sum", "none"):
            page_scores(q, summary, group=group, backend="triton")
        pages = select_pages(page_scores(q, summary, backend="triton"), Budget(32), lengths, 64, row_budgets=lengths, backend="triton")
        assert sparse_decode(q, k, k, pages, page_size=64, lengths=lengths, backend="triton").shape == q.shape
        with pytest.raises(RuntimeError):
            lengths.tolist()
    assert {name: kernel.__getitem__.call_count for name, kernel in kernels.items()} == dict(summaries=1, scores=4, selection=1, sparse=1)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(device):
    """Case E5: PyTorch raises at each synchronisation; every kind, group and part of the step, and the step itself."""
    q, k, v = make_qkv(2, 6, 2, 4096, 96, dtype=torch.float16, device=device)
    lengths = int32([4000, 77], device)
    step = DecodeStep(k.clone(), v.clone(), lengths.clone(), Budget(8), heads=6)

    def everything():
        for kind in summaries.KINDS:
            summary = summarize_pages(k, 64, lengths=lengths, kind=kind)
            for group in scores.GROUPS:
                found = page_scores(q, summary, group=group)
        found = page_scores(q, summary)
        for backend in ("triton", "torch"):
            pages = select_pages(found, Budget(8), lengths, 64, backend=backend)
        sparse_decode(q, k, v, pages, page_size=64, lengths=lengths)
        step(q, k[:, :, 0], v[:, :, 0])

    everything()  # compiles what there is to compile
    with waiting_fails():
        everything()


@pytest.mark.gpu
def test_a_thousand_replays_allocate_nothing(device):
    """Case E5: not even for a moment (sgl-project/sglang#29666)."""
    q, k, v = make_qkv(2, 6, 2, 4096, 96, dtype=torch.float16, device=device)
    step = DecodeStep(k, v, int32([2000, 10], device), Budget(8), heads=6).capture()
    given = [q, k[:, :, 0].clone(), v[:, :, 0].clone()]
    step(*given)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(1000):
        step(*given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert step.lengths.tolist() == [3001, 1011]


# --- very many pages ---------------------------------------------------------------------------------------------------


def assert_reads_its_list_only(step, given):
    """One call of the step equals fp64 attention over the pages that scores in fp64 choose, and NaN in all others changes nothing."""
    q, k_new, v_new = given
    lengths = step.lengths + 1
    keys, values = step.k.clone(), step.v.clone()
    for row, length in enumerate(step.lengths.tolist()):
        keys[row, :, length], values[row, :, length] = k_new[row], v_new[row]
    truth = reference.page_score(q, summarize_pages(keys, step.page_size, lengths=lengths))
    grouped = truth.unflatten(1, (keys.shape[1], -1)).amax(2).float()
    rows = reference.select(grouped, step.budget, lengths, step.page_size)
    pages = PageList.from_rows(rows, q.device)
    held = torch.zeros(grouped.shape, dtype=torch.bool)
    for row, heads in enumerate(rows):
        for head, listed in enumerate(heads):
            held[row, head, listed] = True
    unread = ~held.repeat_interleave(step.page_size, dim=2)[:, :, : step.v.shape[2]].to(step.v.device)
    step.v[unread] = NAN
    out = step(*given)
    assert unread.any() and out.isfinite().all()
    expected, lse = sparse_decode(q, keys, values, pages, page_size=step.page_size, lengths=lengths, backend="torch", return_lse=True)
    assert_is_attention((expected, lse), q, keys, values, lengths=lengths, pages=pages, page_size=step.page_size)
    torch.testing.assert_close(out, expected, rtol=2**-9, atol=2**-12)


@pytest.mark.parametrize("pages", [8200, pytest.param(16384, marks=pytest.mark.gpu), pytest.param(32768, marks=pytest.mark.gpu)])
def test_a_step_over_very_many_pages_still_selects(pages, device):
    """Case E8: scratch sized for 8,192 pages would turn the selection off, or its end (mit-han-lab/Quest's csrc/topk.cu)."""
    tokens = pages * 16
    _, k, v = make_qkv(1, 2, 1, tokens, 64, dtype=torch.float16, device=device)
    step = DecodeStep(k, v, int32([tokens - 1], device), Budget(8), heads=2, page_size=16)
    assert step.selects
    q, k_new, v_new = (randn(1, heads, 64, seed=seed, dtype=torch.float16, device=device) for seed, heads in ((7, 2), (8, 1), (9, 1)))
    k[:, :, (pages - 5) * 16] = 4 * q[:, :1]  # the best page lies past the first 8,192
    step.set_lengths(step.lengths.clone())  # the cache was written to, so it is summarised anew
    assert_reads_its_list_only(step, (q, k_new, v_new))


@each_backend
def test_scores_of_very_many_pages(backend, device):
    """Case E8 for the score and the selection: the best of 8,200 pages lies past the first 8,192."""
    q, k = randn(1, 2, 64, device=device), randn(1, 1, 8200 * 16, 64, seed=1, device=device)
    k[:, :, 8195 * 16 + 5] = 9 * q[:, :1]
    summary = summarize_pages(k, 16, backend="torch")
    ((listed,),) = chosen(q, summary, Budget(4), backend)
    assert listed == [0, 8195, 8198, 8199]


# --- ties, forced pages and the sink, from the keys on -------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("kind", summaries.KINDS)
def test_equal_keys_give_the_lowest_pages(backend, kind, device):
    """Cases F1 and F6: pages that hold the same keys tie, in every block of scores and any batch, again and again."""
    # Whole numbers, a mean and a deviation of whole numbers: no order of the sums rounds anything.
    q, centre, offset = ((2 * randn(*shape, 64, seed=seed, device=device)).round() for seed, shape in enumerate(((2, 4), (1, 1, 1), (1, 1, 1))))
    k = torch.cat([centre + offset, centre - offset], dim=2).repeat(2, 2, 8 * 150, 1)
    for batch in (1, 2, 2):
        summary = summarize_pages(k[:batch], 16, kind=kind, backend="torch")
        assert chosen(q[:batch], summary, Budget(8), backend) == [[[0, 1, 2, 3, 4, 5, 148, 149]] * 2] * batch


@each_backend
def test_forced_pages_that_also_score_best_are_listed_once(backend, device):
    """Case F5: the sink and the newest pages hold copies of the query, and the places they do not need go to the next best."""
    q, k = randn(1, 1, 64, device=device), 0.1 * randn(1, 1, 20 * 16, 64, seed=1, device=device)
    for page, size in ((0, 3), (19, 3), (18, 3), (7, 2), (12, 1)):
        k[:, :, page * 16 + 5] = size * q
    assert chosen(q, summarize_pages(k, 16, backend=backend), Budget(5), backend) == [[[0, 7, 12, 18, 19]]]


def sink_among_distractors(device):
    """q, k, v with 40 pages of 16. One key of page 0 takes nearly all the mass, fifteen opposite ones pull its mean below every other page's."""
    q = torch.zeros(1, 1, 64, device=device)
    q[..., 0] = 24.0
    k, v = 0.1 * randn(1, 1, 640, 64, seed=1, device=device), randn(1, 1, 640, 64, seed=2, device=device)
    k[:, :, :16, 0], k[:, :, 16:, 0] = -4.0, 1.0
    k[:, :, 0, 0] = 8.0
    return q, k, v


@each_backend
def test_the_sink_is_kept_whatever_outscores_it(backend, device):
    """Case G5: scored by mean keys, the page that holds the mass is the last choice of all (ml-explore/mlx-lm#1443, #1552)."""
    q, k, v = sink_among_distractors(device)
    summary, exact = summarize_pages(k, 16, kind="mean", backend=backend), dense_decode(q, k, v, backend="torch")
    score = page_scores(q, summary, backend=backend)
    assert score.argmin().item() == 0
    near, far = (
        sparse_decode(q, k, v, select_pages(score, Budget(8, sink=sink), None, 16, backend=backend), page_size=16, backend=backend)
        for sink in (1, 0)
    )
    assert (near - exact).abs().max() < 1e-3 < 0.5 < (far - exact).abs().max()


@each_backend
def test_the_bound_finds_the_sink_by_itself(backend, device):
    """Case G5: with minmax and mean_radius the same page comes first, forced or not."""
    q, k, _ = sink_among_distractors(device)
    for kind in ("minmax", "mean_radius"):
        assert page_scores(q, summarize_pages(k, 16, kind=kind, backend=backend), backend=backend).argmax().item() == 0


# --- many heads and pages against fp64 -----------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("group", ["max", "sum"])
def test_selected_pages_of_2048_are_those_of_fp64(backend, group, device):
    """Case G14: equal sets but for ties within the rounding of the scores, and no row of scores is constant."""
    q, k = randn(2, 8, 64, device=device), randn(2, 2, 2048 * 16, 64, seed=1, device=device)
    summary = summarize_pages(k, 16, backend="torch")
    score = page_scores(q, summary, group=group, backend=backend)
    assert (score.std(dim=-1) > 1).all()
    found = select_pages(score, Budget(512), summary.lengths, 16, backend=backend).pages.cpu().long()
    each = reference.page_score(q, summary).unflatten(1, (2, 4))
    truth = each.amax(2) if group == "max" else each.sum(2)
    rows = reference.select(truth.float(), Budget(512), summary.lengths, 16)
    error = 4 * float(reference.score_error(q, summary).max())
    for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        mine, right = set(found[row, head].tolist()), set(rows[row][head])
        edge = min(truth[row, head, page].item() for page in right if 0 < page < 2046)
        assert len(mine) == 512 and len(mine ^ right) <= 2
        assert all(abs(truth[row, head, page].item() - edge) <= error for page in mine ^ right)


# --- outlier channels of real keys -------------------------------------------------------------------------------------


def test_real_keys_have_outlier_channels_and_every_kind_is_measured_on_them():
    """Case G13: some channels of the captured keys are three times as wide as the usual one; each kind is measured on them."""
    captured = Captured.load()
    widest = captured.keys.float().abs().amax(2)  # [layers, Hkv, D]
    assert (widest.amax(-1) / widest.median(-1).values).max() > 3
    layer = Layer(captured, len(captured.keys) - 1)
    for kind in summaries.KINDS:
        (result,) = measure(layer, Setting("pageskip", 16, kind, 16, "max"), [1 / 4])
        assert (0 < result["mass"]).all() and (result["mass"] <= 1 + 1e-9).all(), kind


@pytest.mark.parametrize("name", records.names("recall"))
def test_recorded_recall_reports_every_kind(name):
    """Case G13: the bound, the radius and the standard deviation side by side."""
    assert {row["kind"] for row in records.load("recall", name)["rows"]} >= {"minmax", "minmax8", "mean_radius", "mean_std"}


@each_backend
def test_constant_scores_are_reported_in_debug_mode(backend, device, monkeypatch):
    """Case G14: a reduction that returns zeros chooses the lowest pages without a word, unless somebody asks."""
    scores = randn(2, 3, 40, device=device)
    scores[1, 2, 1:17] = 0.0
    lengths = int32([640, 300], device)  # 19 pages are held by the second: the sink, 16 to choose from, two local ones
    for debug, raises in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("PAGESKIP_DEBUG", debug)
        with pytest.raises(ValueError, match="sequence 1, KV head 2 are 0 for every page") if raises else nullcontext():
            select_pages(scores, Budget(8), lengths, 16, backend=backend)
        select_pages(scores, Budget(19), lengths, 16, backend=backend)  # room for all: nothing is chosen
    scores[1, 2, 16] = 1e-30
    select_pages(scores, Budget(8), lengths, 16, backend=backend)
    select_pages(scores, Budget(8), int32([640, 0], device), 16, backend=backend)
