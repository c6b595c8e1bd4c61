"""Buffers of every dtype and layout that a module can have; their values encode the rank that wrote them."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.models.integers import integers

#: Every dtype of torch by name.
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
}

#: Dtypes that gloo does not send, and (b)complex32, of which torch warns at its first use. `BUFFERS` has all others of
#: the installed torch.
LEFT_OUT = re.compile(r"u?int[1-7]|u?int16|uint32|uint64|float[48]_\w+|bits\w+|q\w+|b?complex32")

#: Buffers by name: shape and dtype. `turned` is stored transposed, `unlike` on odd ranks only, and `spaced` with gaps;
#: `hidden` is not part of the state dict.
BUFFERS: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
    "table": ((3, 2), torch.float32),
    "count": ((), torch.int64),
    "mask": ((4,), torch.bool),
    "nothing": ((0, 2), torch.float32),
    "turned": ((2, 3), torch.float32),
    "unlike": ((2, 3), torch.float32),
    "spaced": ((3,), torch.float32),
    "hidden": ((2,), torch.float32),
    **{f"of_{name}": ((3,), dtype) for name, dtype in DTYPES.items() if not LEFT_OUT.fullmatch(name)},
}


def buffer_value(name: str, *key: object) -> Tensor:
    """Return a value for buffer `name` that depends on `key`; the parts of a complex one differ."""
    shape, dtype = BUFFERS[name]
    value = integers(*shape, key=("buffer", name, *key), largest=1 if dtype is torch.bool else 40)
    if dtype.is_complex:
        value = torch.complex(value, integers(*shape, key=("imaginary", name, *key), largest=40))
    return (value.abs() if dtype is torch.uint8 else value > 0 if dtype is torch.bool else value).to(dtype)


def stored_value(name: str, rank: int, *key: object) -> Tensor:
    """Return the `buffer_value` of a rank in the memory that the buffer's name stands for."""
    value = buffer_value(name, rank, *key)
    if name == "turned" or (name == "unlike" and rank % 2):
        return value.t().contiguous().t()
    return value.repeat_interleave(2)[::2] if name == "spaced" else value
