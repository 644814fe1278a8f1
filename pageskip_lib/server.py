"""``transformers serve`` with page selection: ``python -m pageskip_lib.server MODEL --budget 1024 --port 8000``.

The server, its options and its engine are transformers' own (it needs what ``pip install transformers[serving]`` brings). Its
``--attn-implementation`` takes no registered name but transformers' own, so a model enters ``use_pageskip_serving`` as the server loads it.
"""

import argparse
from contextlib import ExitStack, contextmanager
from unittest import mock
from weakref import WeakSet

from . import runtime  # noqa: F401  (before transformers)
from .quality.policies import PageskipPolicy
from .selection import Budget
from .serving import use_pageskip_serving


@contextmanager
def every_loaded_model(policy):
    """Inside this context each model that transformers' server loads decodes through ``policy``, until the context ends."""
    from transformers.cli.serving.model_manager import ModelManager

    load, inside = ModelManager.load_model_and_processor, WeakSet()
    with ExitStack() as models:

        def load_and_enter(manager, *args, **kwargs):
            model, processor = load(manager, *args, **kwargs)
            if model not in inside:
                inside.add(model)
                models.enter_context(use_pageskip_serving(model, policy))
            return model, processor

        with mock.patch.object(ModelManager, "load_model_and_processor", load_and_enter):
            yield inside


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m pageskip_lib.server", description="transformers serve, decoding through page selection.",
        epilog="All other arguments go to `transformers serve`, which always runs with --continuous-batching here.",
    )  # fmt: skip
    parser.add_argument("--budget", type=int, default=1024, metavar="TOKENS", help="tokens of the cache that a step may read (default 1024)")
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="tokens of a page (default 16)")
    options, others = parser.parse_known_args(arguments)
    try:
        policy = PageskipPolicy(Budget.for_tokens(options.budget, options.page_size), options.page_size)
    except ValueError as error:
        parser.error(str(error))
    from transformers.cli.transformers import app

    with every_loaded_model(policy):
        app(["serve", "--continuous-batching", *others])


if __name__ == "__main__":
    main()
