"""Buffers of every dtype and layout that a module can have; their values encode the rank that wrote them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.models.integers import integers

#: Buffers by name: shape and dtype. `turned` is stored transposed; `hidden` is not part of the state dict.
BUFFERS: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
    "table": ((3, 2), torch.float32),
    "doubles": ((2,), torch.float64),
    "halves": ((3,), torch.float16),
    "brains": ((3,), torch.bfloat16),
    "phase": ((2,), torch.complex64),
    "count": ((), torch.int64),
    "bytes": ((5,), torch.uint8),
    "mask": ((4,), torch.bool),
    "nothing": ((0, 2), torch.float32),
    "turned": ((2, 3), torch.float32),
    "hidden": ((2,), torch.float32),
}


def buffer_value(name: str, *key: object) -> Tensor:
    """Return a value for buffer `name` that depends on `key`."""
    shape, dtype = BUFFERS[name]
    value = integers(*shape, key=("buffer", name, *key), largest=1 if dtype is torch.bool else 40)
    return (value.abs() if dtype is torch.uint8 else value > 0 if dtype is torch.bool else value).to(dtype)
