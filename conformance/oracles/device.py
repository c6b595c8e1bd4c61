"""The device on which oracles run models whose results are rounded: the rank's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_CPU = torch.device("cpu")
_device = _CPU


def replica_device() -> torch.device:
    """Return where a replica's model and data belong: the device of the innermost `on_device`, else the CPU.

    Models of whole numbers need not go there: they give the same on every device.
    """
    return _device


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Have oracles compute on `device` within the block."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before
