"""What fits into this machine's memory, by arithmetic and before anything is allocated: a small card leaves the large points of a benchmark out."""

from ..runtime import default_device, free_memory

WORKSPACE = 1 << 29  # bytes beside the data: graphs, and what cuBLAS, cuDNN and compiled code set aside
SLACK = 1.05  # of the data: PyTorch hands memory out in blocks


class NotHere(RuntimeError):
    """A measurement that this machine cannot make; the sentence says why."""


def split(points, needs, label):
    """(the points that fit, a sentence for each that does not). needs, label: bytes that a point takes, and its name, both of a point."""
    free, fit, left_out = free_memory(default_device()), [], []
    for point in points:
        need = SLACK * needs(point) + WORKSPACE
        if need <= free:
            fit.append(point)
        else:
            left_out.append(f"{label(point)}: takes {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free")
    return fit, left_out
