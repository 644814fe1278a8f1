"""How long a whole model's token takes: a prediction of nine prices, fitted to recorded runs in the open.

``costs`` counts bytes, whose time is a floor. Here each kind of read has a price to begin with, whatever its size, and a rate: the matrix
products, exact attention, the selection (scores and choice), and attention to the listed pages. The ninth price is that of the small kernels
between them. Everything is added up, since in one CUDA graph nearly everything waits for what comes before it.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from .bench import records
from .checks import page_count
from .costs import MODELS, decode_step
from .decode import break_even
from .quality.policies import DENSE_LAYERS
from .summaries import entry_bytes

PARTS = ("weights", "attention", "selection", "small kernels")


@dataclass(frozen=True)
class Read:
    """What it takes to read something. start: microseconds before anything has arrived. rate: bytes per microsecond from then on."""

    start: float
    rate: float

    def __call__(self, size, times=1):
        """Microseconds of ``times`` such reads, ``size`` bytes in all."""
        return times * self.start + size / self.rate


def fit_read(points):
    """The ``Read`` whose relative errors have the least sum of squares. points: (bytes, times, microseconds), two or more of different shares.

    Raises ValueError when they leave start or rate open.
    """
    if len({size / times for size, times, _ in points}) < 2:
        raise ValueError(f"A start and a rate take two reads of different sizes at least, got {points}.")
    size, times, microseconds = torch.tensor(points, dtype=torch.float64).T
    shares = torch.stack([times, size], 1) / microseconds[:, None]
    start, per_byte = torch.linalg.lstsq(shares, torch.ones(len(points), 1, dtype=torch.float64)).solution
    return Read(start.item(), 1 / per_byte.item())


@dataclass(frozen=True)
class Prices:
    """What a machine takes for a token. products: a ``Read`` of weights; exact, selection, listed: of one layer's keys and values or summaries.

    small: microseconds of a layer's small kernels.
    """

    products: Read
    exact: Read
    selection: Read
    listed: Read
    small: float

    def on(self, card, measured):
        """A guess for another card: rates follow the bandwidth, starts stay as they are. card, measured: two ``CardFacts``."""
        reads = ("products", "exact", "selection", "listed")
        faster = card.bandwidth / measured.bandwidth
        return replace(self, **{name: replace(getattr(self, name), rate=getattr(self, name).rate * faster) for name in reads})


def product_count(layers):
    """Matrix products of a token: four a layer (to q, k and v; from attention; to gate and up; down) and the output head."""
    return 4 * layers + 1


def layer_bytes(kv_heads, dim, batch, tokens, budget, page_size, number_bytes=2):
    """(exact, selection, listed): bytes that one layer reads of its cache, of its 8-bit summaries, and of the budget's pages."""
    token = 2 * batch * kv_heads * dim * number_bytes
    summaries = batch * kv_heads * (page_count(tokens, page_size) * entry_bytes("minmax8", dim, number_bytes) + 4 * dim)
    return tokens * token, summaries, min(tokens, budget.pages * page_size) * token


def fit(steps, tokens, budget, page_size):
    """The ``Prices`` of a machine.

    steps: rows of ``bench.step``, for the three reads of a layer; all points where the step selects, and all of exact attention.
    tokens: rows of ``bench.generate``, for the products and the small kernels: one sequence at the shortest context of each model, no others.
    """
    reads = {name: [] for name in ("exact", "selection", "listed")}
    alone = {(*place(row), row["arm"]): row["microseconds"] for row in steps}
    for row in steps:
        exact, summaries, listed = layer_bytes(row["kv_heads"], row["head_dim"], row["batch"], row["tokens"], budget, page_size)
        if row["arm"] == "pageskip dense":
            reads["exact"].append((exact, 1, row["microseconds"]))
        elif row["arm"] == "pageskip step" and row["selects"]:
            reads["selection"].append((summaries, 1, alone[*place(row), "score"] + alone[*place(row), "select"]))
            reads["listed"].append((listed, 1, alone[*place(row), "attend"]))
    fitted = fitted_rows(tokens)
    products = fit_read([(row["weight_bytes_read"], product_count(row["layers"]), row["products"]) for row in fitted])
    small = sum(row["rest"] / row["layers"] for row in fitted) / len(fitted)
    return Prices(products, **{name: fit_read(points) for name, points in reads.items()}, small=small)


def fitted_machines(budget, page_size):
    """{name: (``Prices``, its card)} of the machines beside the H200 whose records of ``bench step`` and ``bench generate`` suffice for a fit in fp16.

    The card tells ``predict`` its bandwidth: the rate of its exact attention, as fitted.
    """
    found, steps = {}, records.others("step")
    for name, run in records.others("generate").items():
        rows = [row for row in run["rows"] if row["dtype"] == "float16"]
        try:
            prices = fit([row for row in steps[name]["rows"] if row["dtype"] == "float16"], rows, budget, page_size)
        except (KeyError, ValueError):  # no record of steps, or one model, or one size
            continue
        found[name] = prices, SimpleNamespace(bandwidth=1e6 * prices.exact.rate)
    return found


def place(row):
    """Which point of a record a row of ``bench.step`` belongs to."""
    return row["heads"], row["head_dim"], row["batch"], row["tokens"]


def fitted_rows(tokens):
    """The rows of ``bench.generate`` that ``fit`` looks at: one a model."""
    single = [row for row in tokens if row["batch"] == 1 and row["arm"] == "pageskip dense"]
    models = dict.fromkeys(row["model"] for row in single)
    return [min((row for row in single if row["model"] == name), key=lambda row: row["tokens"]) for name in models]


def model_named(name):
    """The ``ModelShape`` of a recorded model, by the beginning of its name. Raises ValueError for a model that ``costs`` does not know."""
    for known, shape in MODELS.items():
        if name.startswith(known):
            return shape
    raise ValueError(f"The name must begin as one of {', '.join(MODELS)}, got {name!r}.")


def predict(prices, model, batch, tokens, *, budget, page_size, card, dense_layers=DENSE_LAYERS):
    """Microseconds of one token of ``batch`` sequences, as {part of ``PARTS``: microseconds}, in fp16.

    model: a ``ModelShape``. card: its ``CardFacts``, which say from which context on the step selects (``decode.break_even``).
    dense_layers: the first so many layers read everything; ``model.layers`` of them is exact attention throughout.
    """
    weights = decode_step(model, batch, tokens).weights  # first: it checks batch and tokens
    exact, summaries, listed = layer_bytes(model.kv_heads, model.head_dim, batch, tokens, budget, page_size)
    cache = torch.empty(batch, model.kv_heads, tokens, model.head_dim, dtype=torch.float16, device="meta")
    skipping = max(0, model.layers - dense_layers) if tokens > break_even(cache, budget, page_size, card) else 0
    times = (
        prices.products(weights, product_count(model.layers)),
        (model.layers - skipping) * prices.exact(exact) + skipping * prices.listed(listed),
        skipping * prices.selection(summaries),
        model.layers * prices.small,
    )
    return dict(zip(PARTS, times))
