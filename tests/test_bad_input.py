"""Wrong input: the right exception, one sentence that names the argument, and no kernel launched."""

import pytest
import torch

from pageskip_lib import (
    Budget, PageList, Workspace, decode_workspace, dense, dense_decode, merge, merge_partials, page_scores, scores, select_pages,
    sparse, sparse_decode, summaries, summarize_pages,
)  # fmt: skip

from helpers import Unlaunchable, each_backend, int32

KERNELS = ((dense, "_dense_kernel"), (sparse, "_sparse_kernel"), (merge, "_merge_kernel"), (summaries, "_minmax_kernel"), (scores, "_score_kernel"))


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, Unlaunchable())


@pytest.fixture
def good(device):
    """Arguments that every function accepts: 2 sequences, 4 query heads, 2 KV heads, 40 tokens, D = 64."""
    cpu = dict(
        q=torch.zeros(2, 4, 64),
        k=torch.zeros(2, 2, 40, 64),
        v=torch.zeros(2, 2, 40, 64),
        lengths=int32([40, 17]),
        scores=torch.zeros(2, 2, 3),
        outs=torch.zeros(3, 2, 4, 64),
        lses=torch.zeros(3, 2, 4),
    )
    return {name: tensor.to(device) for name, tensor in cpu.items()}


def refuses(error, *words, call):
    """``call()`` raises exactly ``error`` with one line that contains every one of ``words``."""
    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError, IndexError)) as caught:
        call()
    message = str(caught.value)
    assert caught.type is error, f"{caught.type.__name__}: {message}"
    assert "\n" not in message and message.endswith("."), message
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} missing in: {message}"


def tokens_last(x):
    """Same shape, but the last dimension has a stride."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


# (the argument, what takes its place, the exception, words of the sentence): for every function that takes q, k, v.
ATTENTION = {
    "q is a list": ("q", lambda x: x.tolist(), TypeError, ("q must be a torch tensor", "[B, Hq, D]", "list")),
    "k is None": ("k", lambda x: None, TypeError, ("k must be a torch tensor", "NoneType")),
    "v is a list": ("v", lambda x: x.tolist(), TypeError, ("v must be a torch tensor", "list")),
    "q has 4 dimensions": ("q", lambda x: x[:, :, None], ValueError, ("q must have shape [B, Hq, D]", "[2, 4, 1, 64]")),
    "k has 3 dimensions": ("k", lambda x: x[0], ValueError, ("k must have shape [B, Hkv, T, D]", "[2, 40, 64]")),
    "v has 5 dimensions": ("v", lambda x: x[None], ValueError, ("v must have shape [B, Hkv, T, D]", "[1, 2, 2, 40, 64]")),
    "q is int": ("q", lambda x: x.int(), TypeError, ("q must be float16, bfloat16 or float32", "int32")),
    "q is fp64": ("q", lambda x: x.double(), TypeError, ("q must be float16, bfloat16 or float32", "float64")),
    "k has another dtype": ("k", lambda x: x.half(), TypeError, ("k must have q's dtype", "float32", "float16")),
    "v has another dtype": ("v", lambda x: x.half(), TypeError, ("v must have k's dtype", "float32", "float16")),
    "k has another batch size": ("k", lambda x: x[:1], ValueError, ("k must have q's batch size 2", "[1, 2, 40, 64]")),
    "k has another head dim": ("k", lambda x: x[..., :32], ValueError, ("k must have q's head dim 64", "[2, 2, 40, 32]")),
    "v is shorter than k": ("v", lambda x: x[:, :, :39], ValueError, ("v must have k's shape [2, 2, 40, 64]", "[2, 2, 39, 64]")),
    "v has another head dim": ("v", lambda x: x[..., :32], ValueError, ("v must have k's shape", "[2, 2, 40, 32]")),
    "q's last dimension has a stride": ("q", tokens_last, ValueError, ("q must be contiguous in its last dimension", "stride 4")),
    "k's last dimension has a stride": ("k", tokens_last, ValueError, ("k must be contiguous in its last dimension", "stride 40")),
    "v's last dimension has a stride": ("v", tokens_last, ValueError, ("v must be contiguous in its last dimension", "stride 40")),
    "lengths is a list": ("lengths", lambda x: x.tolist(), TypeError, ("lengths must be a torch tensor", "list")),
    "lengths is int64": ("lengths", lambda x: x.long(), TypeError, ("lengths must be int32", "int64")),
    "lengths is a float": ("lengths", lambda x: x.float(), TypeError, ("lengths must be int32", "float32")),
    "lengths has an entry too few": ("lengths", lambda x: x[:1], ValueError, ("lengths must have one entry for each of the 2", "1")),
    "lengths is a scalar": ("lengths", lambda x: x[0], ValueError, ("lengths must have shape [B]", "[]")),
}
BAD_LENGTHS = {"past the cache": [41, 17], "negative": [40, -1]}


@pytest.fixture(params=["dense_decode", "sparse_decode"])
def attention(request, device):
    pages = PageList.from_rows([[[0, 1], [0]]] * 2, device)

    def call(arguments, **options):
        inputs = {name: arguments[name] for name in ("q", "k", "v", "lengths")} | options
        if request.param == "dense_decode":
            return dense_decode(**inputs)
        return sparse_decode(**({"pages": pages, "page_size": 16} | inputs))

    return call


@each_backend
@pytest.mark.parametrize("what", ATTENTION)
def test_attention_inputs(what, backend, good, attention):
    name, change, error, words = ATTENTION[what]
    good[name] = change(good[name])
    refuses(error, *words, call=lambda: attention(good, backend=backend))


@each_backend
@pytest.mark.parametrize("heads, kv_heads", [(4, 3), (2, 4), (4, 0), (0, 2)])
def test_heads_that_do_not_divide(heads, kv_heads, backend, good, attention):
    """Case C1: any group is fine, half a group is not."""
    good["q"], good["k"], good["v"] = good["q"].new_zeros(2, heads, 64), *(good["k"].new_zeros(2, kv_heads, 40, 64) for _ in range(2))
    refuses(ValueError, "query heads must be a multiple", f"{heads} query and {kv_heads} KV", call=lambda: attention(good, backend=backend))


@each_backend
@pytest.mark.parametrize("dim", [1, 32, 63, 112, 512])
def test_unsupported_head_dims(dim, backend, good, attention):
    """Case C6: 112 and others are refused, never padded silently."""
    good["q"], good["k"], good["v"] = good["q"].new_zeros(2, 4, dim), *(good["k"].new_zeros(2, 2, 40, dim) for _ in range(2))
    refuses(ValueError, "head dim", "(64, 80, 96, 128, 192, 256)", str(dim), call=lambda: attention(good, backend=backend))


@each_backend
@pytest.mark.parametrize("values", BAD_LENGTHS.values(), ids=BAD_LENGTHS)
def test_lengths_that_do_not_fit(values, backend, good, attention):
    """Checked where reading them costs nothing: on the CPU."""
    if good["lengths"].is_cuda:
        pytest.skip("on a GPU the kernels clamp lengths, since reading them would stall the stream")
    good["lengths"] = int32(values)
    refuses(ValueError, "lengths must lie between 0 and", "40 tokens", str(values), call=lambda: attention(good, backend=backend))


def test_unknown_backend(good, attention):
    for wrong in ("cuda", "", None, 3):
        refuses(ValueError, "backend must be 'auto', 'torch' or 'triton'", repr(wrong), call=lambda: attention(good, backend=wrong))


@each_backend
@pytest.mark.parametrize("scale", ["large", [1.0]])
def test_scale_that_is_no_number(scale, backend, good, attention):
    with pytest.raises((TypeError, ValueError), match="scale"):
        attention(good, scale=scale, backend=backend)


@pytest.mark.parametrize("function", ["dense", "sparse"])
def test_workspace(function, good):
    """One that does not fit is refused before the kernel, which would write past its end."""
    pages = PageList.from_rows([[[0]] * 2] * 2, good["q"].device)
    inputs = {name: good[name] for name in "qkv"} | dict(backend="triton")
    call = dense_decode if function == "dense" else lambda **given: sparse_decode(**given, pages=pages, page_size=16)
    refuses(TypeError, "workspace must be a Workspace", "dict", call=lambda: call(**inputs, workspace={}))
    wider = decode_workspace(torch.zeros(3, 4, 64, device=good["q"].device), good["k"])
    refuses(ValueError, "workspace is for q of [3, 4, 64]", "[2, 4, 64]", call=lambda: call(**inputs, workspace=wider))
    half = decode_workspace(good["q"].half(), good["k"].half())
    refuses(ValueError, "float16", "float32", call=lambda: call(**inputs, workspace=half))
    if function == "dense":
        one = Workspace(good["q"], 1)
        refuses(ValueError, "holds 1 splits and this call makes 2", call=lambda: call(**inputs, splits=2, workspace=one))


@each_backend
@pytest.mark.parametrize("splits", [0, -1, 4097, 2.0, "4", True])
def test_splits(splits, backend, good):
    inputs = {name: good[name] for name in ("q", "k", "v")}
    refuses(ValueError, "splits must be an int from 1 to 4096", repr(splits), call=lambda: dense_decode(**inputs, splits=splits, backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "lengths"])
def test_devices_that_differ(name, good, attention):
    good[name] = good[name].cpu()
    refuses(ValueError, f"{name} must", "cpu", call=lambda: attention(good))


# --- sparse_decode -----------------------------------------------------------------------------------------------------

PAGE_LISTS = {
    "page numbers are int64": (lambda p, c: (p.long(), c), TypeError, ("pages.pages must be int32", "int64")),
    "counts are int64": (lambda p, c: (p, c.long()), TypeError, ("pages.counts must be int32", "int64")),
    "page numbers have 2 dimensions": (lambda p, c: (p[0], c), ValueError, ("pages.pages must have shape [B, Hkv, K]", "[2, 2]")),
    "counts have 1 dimension": (lambda p, c: (p, c[0]), ValueError, ("pages.counts must have shape [B, Hkv]", "[2]")),
    "one KV head": (lambda p, c: (p[:, :1], c), ValueError, ("pages.pages must start with", "(2, 2)", "[2, 1, 2]")),
    "counts of one KV head": (lambda p, c: (p, c[:, :1]), ValueError, ("pages.counts must start with", "(2, 2)", "[2, 1]")),
    "page numbers are a list": (lambda p, c: (p.tolist(), c), TypeError, ("pages.pages must be a torch tensor", "list")),
}


def list_call(good, pages, counts, **options):
    inputs = {name: good[name] for name in ("q", "k", "v", "lengths")}
    return lambda: sparse_decode(**inputs, pages=PageList(pages, counts), **({"page_size": 16} | options))


@each_backend
@pytest.mark.parametrize("what", PAGE_LISTS)
def test_page_lists(what, backend, good, device):
    change, error, words = PAGE_LISTS[what]
    pages = change(int32([[[0, 1], [0, -1]]] * 2, device), int32([[2, 1]] * 2, device))
    refuses(error, *words, call=list_call(good, *pages, backend=backend))


@each_backend
@pytest.mark.parametrize("wrong", [-2, 3, 2**30])
def test_page_numbers_that_do_not_exist(wrong, backend, good, device):
    """40 tokens are 3 pages of 16."""
    if device == "cuda":
        pytest.skip("on a GPU the kernel masks what lies past the length")
    call = list_call(good, int32([[[0, 1], [0, wrong]]] * 2), int32([[2, 2]] * 2), backend=backend)
    refuses(ValueError, "pages.pages must hold page numbers from 0 to 2", str(wrong), call=call)


@each_backend
@pytest.mark.parametrize("count", [3, -1])
def test_counts_that_do_not_fit_the_list(count, backend, good, device):
    """A row cannot list more pages than the list has columns."""
    if device == "cuda":
        pytest.skip("on a GPU the kernel clamps counts")
    call = list_call(good, int32([[[0, 1], [0, 1]]] * 2), int32([[2, count]] * 2), backend=backend)
    refuses(ValueError, "pages.counts", str(count), call=call)


@each_backend
@pytest.mark.parametrize("wrong", [None, [[0, 1]], "all", torch.zeros(2, 2, 1, dtype=torch.int32)], ids=["None", "list", "str", "tensor"])
def test_pages_that_are_no_page_list(wrong, backend, good):
    inputs = {name: good[name] for name in ("q", "k", "v")}
    refuses(TypeError, "pages must be a PageList", type(wrong).__name__, call=lambda: sparse_decode(**inputs, pages=wrong, page_size=16, backend=backend))


@pytest.mark.parametrize("page_size", [0, 1, 8, 48, 256, -16, "64", None, 64.0, True])
def test_page_sizes(page_size, good, device):
    """Every function that takes one refuses the same ones."""
    pages = int32([[[0]] * 2] * 2, device), int32([[1, 1]] * 2, device)
    calls = (
        list_call(good, *pages, page_size=page_size),
        lambda: summarize_pages(good["k"], page_size),
        lambda: select_pages(good["scores"], Budget(3), good["lengths"], page_size),
        lambda: Budget.for_tokens(2048, page_size),
    )
    for call in calls:
        refuses(ValueError, "page_size must be one of (16, 32, 64, 128)", repr(page_size), call=call)


# --- merge_partials ----------------------------------------------------------------------------------------------------

PARTS = {
    "outs is a list": ("outs", lambda x: x.tolist(), TypeError, ("outs must be a torch tensor", "list")),
    "lses is None": ("lses", lambda x: None, TypeError, ("lses must be a torch tensor", "NoneType")),
    "outs has 3 dimensions": ("outs", lambda x: x[0], ValueError, ("outs must have shape [S, B, Hq, D]", "[2, 4, 64]")),
    "lses has 4 dimensions": ("lses", lambda x: x[..., None], ValueError, ("lses must have shape [S, B, Hq]", "[3, 2, 4, 1]")),
    "another number of parts": ("lses", lambda x: x[:2], ValueError, ("lses must have the shape of outs", "[2, 2, 4]", "[3, 2, 4, 64]")),
    "int outs": ("outs", lambda x: x.int(), TypeError, ("outs must be a float tensor", "int32")),
    "half lses": ("lses", lambda x: x.half(), TypeError, ("lses float32", "float16")),
}


@each_backend
@pytest.mark.parametrize("what", PARTS)
def test_parts(what, backend, good):
    name, change, error, words = PARTS[what]
    good[name] = change(good[name])
    refuses(error, *words, call=lambda: merge_partials(good["outs"], good["lses"], backend=backend))


@each_backend
def test_no_parts(backend, good):
    refuses(ValueError, "outs must hold at least one part", call=lambda: merge_partials(good["outs"][:0], good["lses"][:0], backend=backend))


@pytest.mark.gpu
def test_parts_on_two_devices(good):
    refuses(ValueError, "lses must be on outs' device", "cpu", call=lambda: merge_partials(good["outs"], good["lses"].cpu()))


# --- summarize_pages, page_scores, select_pages ------------------------------------------------------------------------

KEYS = {name: case for name, case in ATTENTION.items() if case[0] == "lengths"} | {
    "k is None": ATTENTION["k is None"],
    "k has 3 dimensions": ATTENTION["k has 3 dimensions"],
    "k's last dimension has a stride": ATTENTION["k's last dimension has a stride"],
    "k is fp64": ("k", lambda x: x.double(), TypeError, ("k must be float16, bfloat16 or float32", "float64")),
    "head dim 32": ("k", lambda x: x[..., :32], ValueError, ("head dim", "(64, 80, 96, 128, 192, 256)", "32")),
}


@each_backend
@pytest.mark.parametrize("what", KEYS)
def test_keys_to_summarise(what, backend, good):
    name, change, error, words = KEYS[what]
    good[name] = change(good[name])
    refuses(error, *words, call=lambda: summarize_pages(good["k"], 16, lengths=good["lengths"], backend=backend))


def test_summary_options(good):
    refuses(ValueError, "kind must be one of", "'median'", call=lambda: summarize_pages(good["k"], 16, kind="median"))
    for wrong in (0, 4, 12, 32, "8", 8.0, True):
        words = "bound_size must be a power of two from 8 to the page size 16", repr(wrong)
        refuses(ValueError, *words, call=lambda: summarize_pages(good["k"], 16, bound_size=wrong))
    refuses(ValueError, "backend must be", "'numpy'", call=lambda: summarize_pages(good["k"], 16, backend="numpy"))


QUERIES = {name: case for name, case in ATTENTION.items() if case[0] == "q"} | {
    "another dtype than the summary": ("q", lambda x: x.half(), TypeError, ("summary.kmin must have q's dtype", "float16", "float32")),
    "another batch size": ("q", lambda x: x[:1], ValueError, ("summary.kmin must have q's batch size 1", "[2, 2, 3, 64]")),
    "another head dim": ("q", lambda x: x[..., :32], ValueError, ("summary.kmin must have q's head dim 32",)),
    "half a group": ("q", lambda x: x[:, :3], ValueError, ("query heads must be a multiple", "3 query and 2 KV")),
}


@each_backend
@pytest.mark.parametrize("what", QUERIES)
def test_queries_to_score(what, backend, good):
    name, change, error, words = QUERIES[what]
    summary = summarize_pages(good["k"], 16, backend="torch")
    refuses(error, *words, call=lambda: page_scores(change(good["q"]), summary, backend=backend))


@each_backend
def test_score_options(backend, good):
    summary = summarize_pages(good["k"], 16, backend="torch")
    for wrong in ("mean", None, 0):
        refuses(ValueError, "group must be one of", repr(wrong), call=lambda: page_scores(good["q"], summary, group=wrong, backend=backend))
    refuses(ValueError, "backend must be", "'numpy'", call=lambda: page_scores(good["q"], summary, backend="numpy"))
    for name in ("kmax", "kmin"):
        setattr(summary, name, tokens_last(getattr(summary, name)))
        refuses(ValueError, f"summary.{name} must be contiguous", call=lambda: page_scores(good["q"], summary, backend=backend))


FIELDS = {
    "no radius": ("mean_radius", dict(radius=None), TypeError, ("summary.radius must be a torch tensor", "NoneType")),
    "another number of entries": (
        "minmax", dict(kmax=torch.zeros(2, 2, 2, 64)), ValueError, ("summary.kmax must go with summary.kmin [2, 2, 3, 64]", "[2, 2, 2, 64]"),
    ),
    "a radius for another batch": (
        "mean_radius", dict(radius=torch.zeros(1, 2, 3)), ValueError, ("summary.radius must go with summary.mean", "[1, 2, 3]"),
    ),
    "a std with a radius' shape": (
        "mean_std", dict(std=torch.zeros(2, 2, 3)), ValueError, ("summary.std must have shape [B, Hkv, S, D]", "[2, 2, 3]"),
    ),
    "a std of another dtype": (
        "mean_std", dict(std=torch.zeros(2, 2, 3, 64).half()), TypeError, ("summary.std must have q's dtype", "float16"),
    ),
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("what", FIELDS)
def test_fields_of_a_summary(what, backend, good, device):
    kind, change, error, words = FIELDS[what]
    summary = summarize_pages(good["k"], 16, kind=kind, backend="torch")
    for name, value in change.items():
        setattr(summary, name, value if value is None else value.to(device))
    refuses(error, *words, call=lambda: page_scores(good["q"], summary, backend=backend))


def test_a_summary_of_no_kind(good):
    refuses(ValueError, "kind must be one of", "'median'", call=lambda: summaries.PageSummary("median", 16, good["lengths"]))
    refuses(ValueError, "page_size must be one of", "17", call=lambda: summaries.PageSummary("mean", 17, good["lengths"]))
    refuses(ValueError, "bound_size must be", "64", call=lambda: summaries.PageSummary("mean", 32, good["lengths"], bound_size=64))


@each_backend
def test_summary_that_is_none(backend, good):
    for wrong in (None, good["k"]):
        refuses(TypeError, "summary must be a PageSummary", type(wrong).__name__, call=lambda: page_scores(good["q"], wrong, backend=backend))


SELECTIONS = {
    "scores is a list": (dict(scores=[[0.0]]), TypeError, ("scores must be a torch tensor", "list")),
    "scores has 2 dimensions": (dict(scores=torch.zeros(2, 3)), ValueError, ("scores must have shape [B, Hkv, N]", "[2, 3]")),
    "scores is int": (dict(scores=torch.zeros(2, 2, 3, dtype=torch.int32)), TypeError, ("scores must be a float tensor", "int32")),
    "budget is an int": (dict(budget=8), TypeError, ("budget must be a Budget", "int")),
    "budget is None": (dict(budget=None), TypeError, ("budget must be a Budget", "NoneType")),
    "lengths is a list": (dict(lengths=[1, 2]), TypeError, ("lengths must be a torch tensor", "list")),
    "lengths is int64": (dict(lengths=torch.tensor([1, 2])), TypeError, ("lengths must be int32", "int64")),
    "lengths has an entry too many": (dict(lengths=int32([1, 2, 3])), ValueError, ("lengths must have one entry for each of the 2", "3")),
}


@pytest.mark.parametrize("what", SELECTIONS)
def test_selections(what, good, device):
    change, error, words = SELECTIONS[what]
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    arguments = dict(scores=good["scores"], budget=Budget(3), lengths=good["lengths"], page_size=16) | change
    refuses(error, *words, call=lambda: select_pages(**arguments))


@pytest.mark.parametrize("values", [[49, 1], [1, -1]])
def test_lengths_past_the_scores(values, good):
    """3 pages of 16 hold 48 tokens."""
    if good["scores"].is_cuda:
        pytest.skip("on a GPU lengths are not read")
    refuses(ValueError, "lengths must lie between 0 and", "48", str(values), call=lambda: select_pages(good["scores"], Budget(3), int32(values), 16))
