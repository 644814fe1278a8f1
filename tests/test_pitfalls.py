"""The bandwidth traps: their bytes add up, their arms compute attention, and the wrong baseline is caught. Nothing here judges speed."""

import itertools

import pytest
import torch

from pageskip_lib import PageList, dense_decode, reference, runtime, sparse_decode, summarize_pages
from pageskip_lib.bench import pitfalls, records
from pageskip_lib.bench.__main__ import main
from pageskip_lib.bench.dense import check_arm
from pageskip_lib.bench.peers import Arm, each
from pageskip_lib.bench.pitfalls import HEADS

DEVICE = runtime.default_device()
DTYPE = pitfalls.default_dtype(DEVICE)


def inputs(batch, tokens):
    ((q, kv),) = pitfalls._sets(batch, tokens, 1, DEVICE, DTYPE)
    return q, *kv


def test_the_bytes_of_a_cache():
    assert pitfalls.kv_bytes(1, 1, torch.float16) == 2 * 2 * 128 * 2
    assert pitfalls.kv_bytes(32, 65536, torch.float16) == 2**31
    q, k, v = inputs(3, 128)
    assert pitfalls.kv_bytes(3, 128, DTYPE) == k.nbytes + v.nbytes


def test_the_bytes_of_a_sparse_step_are_those_of_its_pages():
    q = torch.zeros(2, 12, 128, dtype=torch.float16)
    pages = PageList.from_rows([[[0, 3, 7], [1]], [[2, 4], [0, 1, 2]]])
    listed_pages, list_entries, counts = 3 + 1 + 2 + 3, 2 * 2 * 3, 4
    expected = listed_pages * 64 * 2 * 128 * 2 + 4 * list_entries + 4 * counts + 2 * (2 * 12 * 128 * 2)
    assert pitfalls.sparse_bytes(q, pages, 64) == expected


def test_the_bytes_of_short_sequences_do_not_grow_with_the_capacity():
    q, lengths = torch.zeros(2, 12, 128, dtype=torch.float16), torch.tensor([10, 30], dtype=torch.int32)
    for capacity in (64, 4096):
        k = torch.zeros(2, 2, capacity, 128, dtype=torch.float16)
        assert pitfalls.length_bytes(q, k, lengths) == 40 * 1024 + 8 + 2 * (2 * 12 * 128 * 2)


def test_what_is_not_counted_is_not_read():
    """NaN in every byte that the honest count leaves out changes nothing."""
    q, k, v = inputs(1, 4096)
    pages = pitfalls.random_pages(1, HEADS[1], 4096, DEVICE, seed=3)
    clean = sparse_decode(q, k, v, pages, page_size=pitfalls.PAGE)
    listed = torch.zeros(1, HEADS[1], 4096 // pitfalls.PAGE, dtype=torch.bool, device=DEVICE).scatter_(2, pages.pages.long(), True)
    unread = ~listed.repeat_interleave(pitfalls.PAGE, dim=2)
    assert unread.any()
    k[unread], v[unread] = float("nan"), float("nan")
    assert torch.equal(sparse_decode(q, k, v, pages, page_size=pitfalls.PAGE), clean)


def test_random_pages_are_a_page_list():
    pages = pitfalls.random_pages(2, HEADS[1], 4096, DEVICE, seed=0)
    assert pages.pages.shape == (2, HEADS[1], pitfalls.BUDGET.pages) and (pages.counts == pitfalls.BUDGET.pages).all()
    for listed in pages.pages.flatten(0, 1).tolist():
        assert listed == sorted(set(listed)) and 0 <= listed[0] and listed[-1] < 64
    assert not torch.equal(pages.pages, pitfalls.random_pages(2, HEADS[1], 4096, DEVICE, seed=1).pages)
    q, k, v = inputs(2, 4096)
    truth, _ = reference.attention(q, k, v, pages=pages, page_size=pitfalls.PAGE)
    out = sparse_decode(q, k, v, pages, page_size=pitfalls.PAGE).double().cpu()
    assert (out - truth).abs().max() < 4 * torch.finfo(DTYPE).eps


def test_the_step_is_exact_when_every_page_fits_the_budget():
    q, k, v = inputs(1, 1024)
    assert torch.equal(pitfalls.sparse_step(q, k, v, summarize_pages(k, pitfalls.PAGE)), dense_decode(q, k, v))


def test_a_rotation_outgrows_the_largest_cache():
    largest = max(pitfalls.cache_sizes(DEVICE).values(), default=pitfalls.UNKNOWN_CACHE)
    for size in (1 << 18, 1 << 24, 1 << 31):
        sets = pitfalls.sets_to_outgrow(DEVICE, size)
        assert sets >= 3 and sets * size >= 3 * largest


def test_the_datasheet_is_that_of_the_card_and_of_no_other():
    assert pitfalls.datasheet("NVIDIA H200") == 4800 and pitfalls.datasheet("NVIDIA GeForce RTX 4090") == 1008
    assert pitfalls.datasheet("NVIDIA GeForce RTX 4090 Laptop GPU") is None and pitfalls.datasheet("AMD EPYC") is None


def test_warm_repeats_one_input_and_cold_takes_all(monkeypatch):
    read, given = [], {}
    monkeypatch.setattr(pitfalls, "read_once", lambda kv, out: read.append(kv.data_ptr()))
    monkeypatch.setattr(pitfalls, "sets_to_outgrow", lambda device, size: 5)
    monkeypatch.setattr(pitfalls, "_rows", lambda arms, *a, **more: given.update(arms) or [])
    pitfalls.measure("cache", [(1, 64)])
    for arm, different in (("read warm", 1), ("read cold", 5)):
        read.clear()
        for call in given[arm]:
            call()
        assert len(read) == 5 and len(set(read)) == different


def test_the_flag_that_sees_one_key_is_caught():
    q, k, v = inputs(2, 128)
    out, truth = pitfalls.causal(q, k, v).double().cpu(), reference.attention(q, k, v)[0]
    first_value = pitfalls.expanded(v)[:, :, 0].double().cpu()
    assert (out - first_value).abs().max() < 4 * torch.finfo(DTYPE).eps
    assert (out - truth).abs().max() > 1
    with pytest.raises(RuntimeError, match="is_causal is off by"):
        check_arm(Arm("is_causal", each(pitfalls.causal)), HEADS, DTYPE, DEVICE)


def test_every_other_baseline_is_attention():
    for name, (before, call) in pitfalls.baselines(DEVICE).items():
        if name != "SDPA, is_causal":
            check_arm(Arm(name, each(lambda q, k, v: call(q, before(k), before(v)))), HEADS, DTYPE, DEVICE)  # noqa: B023


def test_expanded_gives_each_query_head_its_own_copy():
    _, k, _ = inputs(1, 64)
    whole, group = pitfalls.expanded(k), HEADS[0] // HEADS[1]
    assert whole.nbytes == group * k.nbytes
    assert all(torch.equal(whole[:, head], k[:, head // group]) for head in range(HEADS[0]))


def test_an_arm_that_cannot_run_says_so():
    def broken():
        raise RuntimeError("no room\nstack")

    def refuses_b(arms):
        if "b" in arms:
            raise RuntimeError("not in a graph")
        return {name: pitfalls.summary([1, 2]) for name in arms}

    rows = pitfalls._rows({"a": [int], "b": [int], "c": [broken]}, 1, 64, DTYPE, timer=refuses_b, touched={"a": 3000})
    assert pitfalls.pick(rows, arm="a")["gb_per_s"] == 3000 / 1.5 / 1e3
    assert pitfalls.pick(rows, arm="b")["error"] == "not in a graph" and pitfalls.pick(rows, arm="c")["error"] == "no room"
    assert "no room" in pitfalls.table([dict(row, trap="x") for row in rows])


@pytest.fixture(scope="module")
def small():
    """Every trap at small sizes, as the notebook measures them."""
    shapes = dict(cache=[(1, 512)], launch=[(1, 64)], sync=[(1, 1024)], bytes=[(1, 4096)], baseline=[(1, 256)])
    return list(itertools.chain.from_iterable(pitfalls.measure(trap, shapes[trap]) for trap in pitfalls.TRAPS))


def test_every_arm_is_timed_but_the_wrong_one(small):
    assert {row["trap"] for row in small} == set(pitfalls.TRAPS)
    failed = [row for row in small if "error" in row]
    assert [row["arm"] for row in failed] == ["SDPA, is_causal"] and "microseconds" not in failed[0]
    for row in small:
        if "error" not in row:
            assert 0 < row["low"] <= row["microseconds"] <= row["high"], row
        if "gb_per_s" in row:
            assert row["gb_per_s"] == pytest.approx(row["bytes_touched"] / row["microseconds"] / 1e3)


def test_the_clock_that_stops_early_never_shows_more(small):
    submitted, awaited = (pitfalls.pick(small, arm=arm) for arm in ("submitted", "awaited"))
    assert submitted["microseconds"] <= awaited["microseconds"] and submitted["bytes_touched"] == awaited["bytes_touched"]


def test_few_pages_touch_few_bytes(small):
    for arm in ("page list", "short lengths"):
        row = pitfalls.pick(small, arm=arm)
        assert row["kv_bytes"] / row["bytes_touched"] == pytest.approx(2, rel=0.05)  # 32 of 64 pages, or half the tokens


def test_unknown_names_are_refused(small):
    with pytest.raises(ValueError, match="trap must be one of sync, cache, .* got 'l2'"):
        pitfalls.measure("l2")
    with pytest.raises(ValueError, match="0 rows, not one"):
        pitfalls.pick(small, arm="none")


def test_the_command_prints_and_records(monkeypatch, tmp_path, capsys):
    tiny = dict(cache=[(1, 512)], launch=[(1, 64)], sync=[(1, 256)], bytes=[(1, 2048)], baseline=[(1, 256)])
    monkeypatch.setitem(pitfalls.SHAPES, DEVICE, tiny)
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    main(["pitfalls", "--record", "here"])
    printed = capsys.readouterr().out
    recorded = records.load("pitfalls", "here")
    assert "read warm" in printed and "is off by" in printed and recorded["settings"]["method"] in printed
    assert {"machine", "date", "dtype", "heads", "caches", "datasheet_gb_per_s"} <= set(recorded["settings"])
    assert len(printed.strip().splitlines()) == len(recorded["rows"]) + 3  # header, machine and method, the file


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_recorded_runs_are_possible_where_they_claim_to_be(name):
    """Cold rates stay below what the vendor promises; every trap's flattering number is above it, or above its honest version."""
    run = records.load("pitfalls", name)
    rows, limit = run["rows"], run["settings"]["datasheet_gb_per_s"]
    cold = [row["gb_per_s"] for row in rows if row["arm"].endswith("cold")]
    assert limit is None or max(cold) < limit
    limit = limit or max(cold)
    assert max(row["gb_per_s"] for row in rows if row["arm"].endswith("warm")) > limit
    assert pitfalls.pick(rows, arm="submitted")["gb_per_s"] > limit
    for row in rows:
        if row["trap"] == "bytes":
            assert row["gb_per_s"] < limit < row["kv_bytes"] / row["microseconds"] / 1e3
