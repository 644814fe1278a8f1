"""How pytest treats the notebooks and the tests that need a GPU.

Notebooks run under nbval, which compares every output but pictures. Tags on a cell change that:
`nbval-ignore-output` (run, not compared), `raises-exception` (must raise what is stored),
`gpu` (the stored output comes from a CUDA machine: run everywhere, compared only there).
"""
from functools import lru_cache

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile


@lru_cache
def has_cuda():
    import torch  # here, so that collecting the CPU tests does not pay for it

    return torch.cuda.is_available()


def pytest_configure(config):
    # Beside pyproject.toml, so that pytest can also be started inside notebooks/.
    config.option.nbval_sanitize_with = str(config.inipath.parent / config.option.nbval_sanitize_with)


def pytest_collectstart(collector):
    if isinstance(collector, IPyNbFile):
        collector.skip_compare += ("stderr",)  # warnings differ between machines


def pytest_itemcollected(item):
    if isinstance(item, IPyNbCell):
        if "gpu" in item.cell.metadata.get("tags", []) and not has_cuda():
            item.options["check"] = False
    elif item.get_closest_marker("gpu") and not has_cuda():
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
