"""pageskip: don't read most of the KV cache. Import this before triton or transformers (see runtime.py)."""

from . import runtime  # first: it sets Triton's interpreter switch
from .cache import CacheFull, PagedKVCache
from .decode import DecodeStep
from .dense import decode_workspace, dense_decode
from .merge import Workspace, merge_partials
from .models import ModelUnavailable, load_model
from .scores import page_scores
from .selection import Budget, PageList, select_pages
from .sparse import sparse_decode
from .summaries import PageSummary, summarize_pages

__all__ = [
    "Budget",
    "CacheFull",
    "DecodeLoop",
    "DecodeStep",
    "ModelUnavailable",
    "PageList",
    "PageSummary",
    "PagedKVCache",
    "Workspace",
    "decode_workspace",
    "dense_decode",
    "load_model",
    "merge_partials",
    "page_scores",
    "runtime",
    "select_pages",
    "sparse_decode",
    "summarize_pages",
    "use_pageskip",
    "use_pageskip_serving",
]


def __getattr__(name):
    """What imports transformers is loaded on first use: it takes seconds that kernels can do without."""
    if name == "use_pageskip":
        from .live_model import use_pageskip

        return use_pageskip
    if name == "use_pageskip_serving":
        from .serving import use_pageskip_serving

        return use_pageskip_serving
    if name == "DecodeLoop":
        from .loop import DecodeLoop

        return DecodeLoop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
