"""Values by the million: a pure function of a key, cheap at any length, with every bit of a dtype in use."""

import math

import torch
from torch import Tensor

from conformance.models.batches import mixed_seed
from conformance.models.integers import integers

#: Values repeat after so many. A prime, so that no bucket or chunk of a round size ends where they repeat.
PERIOD = 65_537

#: Divisible by 2, 3 and 4, so that means over as many ranks are whole numbers.
UNIT = 12

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def whole(length: int, *key: object) -> Tensor:
    """Return float32 multiples of 12 without 0: sums and means over up to 4 ranks are exact in any order."""
    return _repeated(UNIT * integers(min(length, PERIOD), key=("whole", *key), largest=1000), length)


def arbitrary(length: int, dtype: torch.dtype, *key: object) -> Tensor:
    """Return values of any dtype whose bits are random.

    Of a floating or complex dtype (but float8) all are finite, and so large and so small that the eightfold and a
    quarter of each are normal numbers: halves, doubles and quarters are exact.
    """
    generator = torch.Generator().manual_seed(mixed_seed("arbitrary", str(dtype), *key))
    return _repeated(_random_bits(min(length, PERIOD), dtype, generator), length)


def with_nan(values: Tensor, payload: int) -> Tensor:
    """Return floating `values` with a signaling not-a-number in the first place: what only a copy of bits keeps."""
    if len(values) and bits(values) is not values:
        values[0] = torch.inf
        bits(values)[0] += payload
    return values


def bits(values: Tensor) -> Tensor:
    """Return integers with the bits of `values`, if these are floating-point numbers of 2, 4 or 8 bytes."""
    as_integer = _INTEGER.get(values.dtype.itemsize) if values.is_floating_point() else None
    return values if as_integer is None else values.detach().view(as_integer)


def _random_bits(length: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).bool()
    if dtype.is_complex:
        return torch.view_as_complex(_random_bits(2 * length, dtype.to_real(), generator).view(length, 2))
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return torch.randint(0, 256, (length * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    width = 8 * dtype.itemsize
    mantissa_width = -round(math.log2(torch.finfo(dtype).eps))
    largest_exponent = 2 ** (width - 1 - mantissa_width) - 1  # of infinities
    exponent = torch.randint(3, largest_exponent - 3, (length,), generator=generator)
    mantissa = torch.randint(0, 2**mantissa_width, (length,), generator=generator)
    size = (exponent * 2**mantissa_width + mantissa).to(_INTEGER[dtype.itemsize]).view(dtype)
    return torch.where(torch.randint(0, 2, (length,), generator=generator).bool(), size, -size)


def _repeated(block: Tensor, length: int) -> Tensor:
    return block if len(block) == length else block.repeat(-(-length // len(block)))[:length]
