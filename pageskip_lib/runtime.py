"""What machine is this, and can Triton kernels run on it.

Import ``triton`` and ``tl`` from here, never directly: without a CUDA GPU the
kernels run in Triton's interpreter, and that switch (``TRITON_INTERPRET``) is
read while triton is being imported, so it has to be set first.
"""

import math
import os
import platform
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch

# Oldest and newest release of each that tests and notebooks have passed on.
TESTED = {"python": ("3.11", "3.13"), "torch": ("2.11", "2.14"), "triton": ("3.6", "3.8"), "transformers": ("5.17", "5.24")}
NO_TRITON = (
    "Triton has no build for this platform, so kernels cannot run here; "
    "the PyTorch backend (backend='torch') gives the same results."
)
TOO_LATE = (
    "Triton was imported before pageskip_lib, so its interpreter could not be switched on; "
    "restart Python and import pageskip_lib first (transformers imports triton too)."
)
NEEDS_CUDA = (
    "On a machine with a CUDA GPU, Triton kernels take CUDA tensors; move the tensors with .cuda(), "
    "or start Python with TRITON_INTERPRET=1 to run the kernels in the interpreter on CPU tensors."
)


def _switch_interpreter_on():
    """Set TRITON_INTERPRET where no GPU can run a kernel; False when it is too late for that."""
    wanted = os.environ.get("TRITON_INTERPRET", "") not in ("", "0") or not torch.cuda.is_available()
    if not wanted:
        return True
    imported = sys.modules.get("triton")
    if imported and not imported.knobs.runtime.interpret:
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    return True


_IN_TIME = _switch_interpreter_on()

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    # Just enough for the kernels' files to import; calling a kernel is refused before it gets here.
    triton = SimpleNamespace(jit=lambda function=None, **options: function or (lambda function: function))
    tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))

INTERPRETED = HAS_TRITON and _IN_TIME and os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


def kernel_problem(device):
    """Why Triton kernels cannot run on tensors of ``device`` ("cpu", "cuda:0", ...), in one sentence, or None."""
    if not HAS_TRITON:
        return NO_TRITON
    if not _IN_TIME:
        return TOO_LATE
    if torch.device(device).type == "cpu" and not INTERPRETED:
        return NEEDS_CUDA
    return None


def resolve_backend(backend, tensor):
    """Turn a public ``backend`` argument into "triton" or "torch" for the device and dtype of ``tensor``.

    ``auto`` is Triton for CUDA tensors and PyTorch for CPU tensors. Raises ``ValueError`` for an unknown
    name and for bf16 in the interpreter, ``RuntimeError`` where kernels cannot run.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend must be 'auto', 'torch' or 'triton', got {backend!r}.")
    if backend == "auto":
        backend = "triton" if tensor.is_cuda and HAS_TRITON else "torch"
    if backend == "torch":
        return backend
    problem = kernel_problem(tensor.device)
    if problem:
        raise RuntimeError(problem)
    if INTERPRETED and tensor.dtype == torch.bfloat16:
        # The interpreter holds bf16 as raw 16-bit integers, and its dot multiplies those (triton-lang/triton#11584).
        raise ValueError(
            "Triton's interpreter multiplies bfloat16 as bit patterns; use float16 or float32 here, or backend='torch'."
        )
    return backend


def default_device():
    """"cuda" where a CUDA GPU is usable, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory(device):
    """Bytes that this process can still allocate on ``device``: of the GPU, or of the machine (infinity where the system does not say)."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)


@dataclass(frozen=True)
class Card:
    """What the launch rules read of a device.

    sms: streaming multiprocessors. l2_bytes: its L2 cache. shared_bytes: shared memory that one program can have.
    dependent_launch: can a kernel be launched before the one it depends on has ended (Hopper and newer)? bandwidth: of the memory by its
    clock and width, bytes/s; 0 where the driver does not say.
    """

    name: str
    sms: int
    l2_bytes: int
    shared_bytes: int
    dependent_launch: bool
    bandwidth: float = 0.0


def _cpu_name():
    """"AMD EPYC" and the like; the architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@lru_cache
def card(device):
    """The ``Card`` behind a torch device. A CPU stands in as a tiny card, so that the interpreter sees several splits."""
    device = torch.device(device)
    if device.type != "cuda":
        return Card(name=_cpu_name(), sms=4, l2_bytes=0, shared_bytes=99 * 1024, dependent_launch=False)
    found = torch.cuda.get_device_properties(device)
    return Card(
        name=found.name,
        sms=found.multi_processor_count,
        l2_bytes=found.L2_cache_size,
        # CUDA keeps 1 KB of it for each program, AMD nothing.
        shared_bytes=found.shared_memory_per_multiprocessor - (1024 if torch.version.cuda else 0),
        dependent_launch=torch.version.cuda is not None and found.major >= 9,
        bandwidth=2 * getattr(found, "memory_clock_rate", 0) * 1e3 * getattr(found, "memory_bus_width", 0) / 8,  # kHz, two bits a clock
    )


@dataclass(frozen=True)
class Machine:
    """One line about this machine, for captions and recorded results."""

    device: str
    name: str
    cores: int
    sms: int
    l2_bytes: int
    python: str
    torch: str
    triton: str
    transformers: str
    kernels: str

    def __str__(self):
        gpu = f"{self.sms} SMs, {self.l2_bytes / 1e6:.1f} MB L2" if self.device == "cuda" else f"{self.cores} CPU cores"
        return (
            f"{self.name} ({gpu}), Python {self.python}, torch {self.torch}, Triton {self.triton}, "
            f"transformers {self.transformers} ({self.verdict()}); kernels: {self.kernels}"
        )

    def verdict(self):
        """"tested versions", or which of them lie outside of what was tested."""
        release = lambda version: tuple(int(part) for part in version.split(".")[:2])  # noqa: E731
        installed = {name: getattr(self, name) for name in TESTED if getattr(self, name) != "none"}
        beyond = [name for name, version in installed.items() if not release(TESTED[name][0]) <= release(version) <= release(TESTED[name][1])]
        return ", ".join(f"{name} is tested from {TESTED[name][0]} to {TESTED[name][1]}" for name in beyond) or "tested versions"

    def as_dict(self):
        return asdict(self)


def machine():
    """Describe this machine: device, versions, and how kernels run ("compiled", "interpreted" or why not at all)."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(package):
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    device = default_device()
    this_card = card(device)
    return Machine(
        device=device,
        name=this_card.name,
        cores=os.cpu_count() or 1,
        sms=this_card.sms,
        l2_bytes=this_card.l2_bytes,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=installed("triton"),
        transformers=installed("transformers"),
        kernels=kernel_problem(device) or ("interpreted" if INTERPRETED else "compiled"),
    )
