"""Where kernels run: the interpreter's switch, the choice of a backend, and one sentence for each reason they cannot run."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy
import pytest
import torch

from pageskip_lib import PageList, dense_decode, page_scores, runtime, sparse_decode, summarize_pages

from helpers import make_qkv

NEW_NUMPY = tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 5)

TRY_BOTH = """
import json, torch
from pageskip_lib import dense_decode, runtime
q, k, v = torch.ones(1, 2, 64), torch.ones(1, 1, 3, 64), torch.ones(1, 1, 3, 64)
found = {"torch": dense_decode(q, k, v, backend="torch").sum().round().item(), "auto": dense_decode(q, k, v).sum().round().item()}
try:
    found["triton"] = dense_decode(q, k, v, backend="triton").sum().round().item()
except RuntimeError as error:
    found["triton"] = str(error)
print(json.dumps(found | {"interpreted": runtime.INTERPRETED, "kernels": runtime.machine().kernels}))
"""

NO_TRITON_HERE = """
import sys
from dataclasses import replace

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""


def in_a_fresh_python(before="", **environment):
    """Run TRY_BOTH after the line ``before`` in a new process that has no interpreter switch set; what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-c", before + TRY_BOTH]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_without_triton():
    """The package imports, PyTorch computes, and kernels are refused in one sentence."""
    found = in_a_fresh_python(NO_TRITON_HERE, CUDA_VISIBLE_DEVICES="")  # torch itself wants triton where there is a GPU
    assert found == {"torch": 128.0, "auto": 128.0, "triton": runtime.NO_TRITON, "interpreted": False, "kernels": runtime.NO_TRITON}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA GPU kernels are compiled, and the order does not matter")
@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed")
def test_triton_imported_first():
    """Case I4: the interpreter's switch is read while triton is imported; afterwards it is too late, and that is said."""
    found = in_a_fresh_python("import triton")
    assert found == {"torch": 128.0, "auto": 128.0, "triton": runtime.TOO_LATE, "interpreted": False, "kernels": runtime.TOO_LATE}


@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(NEW_NUMPY, reason="NumPy 2.5 refuses int() of one-element arrays, which Triton's interpreter calls; the pins have 2.2")
def test_the_switch_works_everywhere():
    """TRITON_INTERPRET=1 runs kernels on CPU tensors, on a machine with a GPU too; triton may then come first."""
    found = in_a_fresh_python("import triton", TRITON_INTERPRET="1")
    assert found["triton"] == 128.0 and found["interpreted"]


@pytest.mark.skipif(not runtime.HAS_TRITON, reason="Triton is not installed")
def test_this_session_was_in_time():
    """Case I4: without a GPU these very tests run interpreted, with one compiled."""
    assert runtime.kernel_problem(runtime.default_device()) is None
    assert runtime.INTERPRETED or torch.cuda.is_available()


@pytest.mark.parametrize(
    "setting, sentence",
    [(dict(HAS_TRITON=False), runtime.NO_TRITON), (dict(_IN_TIME=False), runtime.TOO_LATE), (dict(INTERPRETED=False), runtime.NEEDS_CUDA)],
)
def test_each_reason_is_one_sentence(setting, sentence, monkeypatch):
    if not runtime.HAS_TRITON and "HAS_TRITON" not in setting:
        monkeypatch.setattr(runtime, "HAS_TRITON", True)
    for name, value in setting.items():
        monkeypatch.setattr(runtime, name, value)
    assert runtime.kernel_problem("cpu") == sentence
    assert sentence.count(". ") == 0 and sentence.endswith(".")
    with pytest.raises(RuntimeError) as caught:
        dense_decode(*make_qkv(1, 2, 1, 3, 64), backend="triton")
    assert str(caught.value) == sentence
    assert runtime.resolve_backend("auto", torch.zeros(1)) == "torch"


@pytest.mark.gpu
def test_cpu_tensors_on_a_gpu_machine():
    """`auto` takes PyTorch for them; asking for Triton is refused with what to do."""
    if runtime.INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    inputs = make_qkv(1, 2, 1, 3, 64)
    assert dense_decode(*inputs).device.type == "cpu"
    with pytest.raises(RuntimeError, match="move the tensors with .cuda()"):
        dense_decode(*inputs, backend="triton")


@pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are compiled here, and take bfloat16")
def test_the_interpreter_refuses_bfloat16():
    """Case I1: its dot multiplies bit patterns (triton-lang/triton#11584), so every function with a kernel says no."""
    q, k, v = make_qkv(1, 2, 1, 20, 64, dtype=torch.bfloat16)
    pages, summary = PageList.from_rows([[[0]]]), summarize_pages(k, 16, backend="torch")
    calls = (
        lambda: dense_decode(q, k, v, backend="triton"),
        lambda: sparse_decode(q, k, v, pages, page_size=16, backend="triton"),
        lambda: summarize_pages(k, 16, backend="triton"),
        lambda: page_scores(q, summary, backend="triton"),
    )
    for call in calls:
        with pytest.raises(ValueError, match="bfloat16 as bit patterns.*float16 or float32.*backend='torch'"):
            call()
    assert dense_decode(q, k, v, backend="torch").dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["cuda", "Triton", "", None, 0])
def test_unknown_backends(backend):
    with pytest.raises(ValueError, match="^backend must be 'auto', 'torch' or 'triton', got "):
        runtime.resolve_backend(backend, torch.zeros(1))


def test_automatic_backend(device):
    expected = "triton" if device == "cuda" and runtime.HAS_TRITON else "torch"
    assert runtime.resolve_backend("auto", torch.zeros(1, device=device)) == expected
    assert runtime.resolve_backend("torch", torch.zeros(1, device=device)) == "torch"


def test_card(device):
    """What the launch rules read: a GPU's own numbers, or a stand-in for the CPU that has a few of everything."""
    card = runtime.card(device)
    assert card.sms >= 1 and card.name is not None
    if device == "cuda":
        assert card.sms == torch.cuda.get_device_properties(0).multi_processor_count and card.l2_bytes > 0
    else:
        assert card == runtime.card(torch.device("cpu")) and card.l2_bytes == 0


def test_machine_describes_itself(device):
    machine = runtime.machine()
    assert machine.device == device and machine.torch == torch.__version__
    assert machine.as_dict()["cores"] == os.cpu_count()
    for word in (machine.torch, machine.python, machine.kernels, "SMs" if device == "cuda" else "CPU cores"):
        assert word in str(machine)
    assert "\n" not in str(machine)
    json.dumps(machine.as_dict())


def test_the_machines_line_says_whether_its_versions_were_tested():
    found = runtime.machine()
    inside = replace(found, python="3.12.1", torch="2.11.0+cu130", triton="none", transformers="5.24.1")
    assert "(tested versions); kernels" in str(inside)
    outside = replace(inside, torch="2.9.1", triton="4.0")
    assert outside.verdict() == "torch is tested from 2.11 to 2.14, triton is tested from 3.6 to 3.8"
