"""The device that computes a truth, the rank's own, and the number of threads."""

import contextlib
from collections.abc import Iterator

import torch

_CPU = torch.device("cpu")
_device = _CPU


def replica_device() -> torch.device:
    """Return the device of a replica's model and data: that of the innermost `on_device`, else the CPU."""
    return _device


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Compute truths on `device` within the block."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Compute with one thread, as every rank does, and restore the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
