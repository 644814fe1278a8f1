"""Fixtures that several test files share."""

import pytest

import pageskip_lib  # noqa: F401  (before anything imports triton: it sets the interpreter switch)


@pytest.fixture(scope="session")
def device():
    """Where the kernels of this run live: compiled on "cuda", interpreted on "cpu"."""
    return pageskip_lib.runtime.default_device()


@pytest.fixture(scope="session")
def smollm():
    """(model, tokenizer): the embedded model on the CPU in fp32, fetched if it is not there yet."""
    return pageskip_lib.load_model(device="cpu")
