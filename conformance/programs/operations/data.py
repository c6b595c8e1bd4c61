"""The data of operations and their reductions, as functions of position and key alone.

Every element depends on its position, source, target and round, so a block in a wrong place, of another rank or of an
earlier round shows. Reductions are the same in every order: exact, but for `roundings`.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

#: The target of a block that every rank gets.
ALL = -1

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
COMPLEX = ("complex64", "complex128")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")

#: Sums of numbers up to these are exact in the dtype for so many ranks (8-bit and 16-bit integers wrap); with more
#: ranks numbers are smaller.
MOST_RANKS = 8
_MAGNITUDES = {
    "float64": 2**40, "float32": 2**20, "float16": 200, "bfloat16": 15, "complex64": 2**20, "complex128": 2**40,
    "int64": 2**58, "int32": 2**27, "int16": 2**15, "int8": 2**7, "uint8": 2**8,
}  # fmt: skip
#: Floating-point numbers are multiples of its inverse, so that a conversion to integers shows.
_PARTS = 8
_FACTORS, _FACTORS_OF_FLOATS = (1, 2, -1, -2), (0.5, 2.0, -0.5, -2.0)
#: The first elements of a block where bits count: NaNs with payloads, -0.0, subnormals, infinities.
_ODD_PATTERNS = {
    8: (0x7FF0000000000001, 0x7FF8DEADBEEF1234, -(2**63), 1, 0x7FF0000000000000, -0x7FF0000000000F),
    4: (0x7F800001, 0x7FC0BEEF, -(2**31), 1, 0x7F800000, -0x7F8F0F),
    2: (0x7C01, 0x7FC1, -(2**15), 1, 0x7C00, 0x7F80),
}
#: bfloat16 has 127 subnormal numbers above zero; the sum of eight ranks' is one of them.
_MOST_SUBNORMAL = 127 // MOST_RANKS
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MASK = 2**62 - 1


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called `name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101 - our own mistake
    return dtype


def numbers(name: str, op: str, length: int, *, source: int, target: int, turn: int, size: int) -> Tensor:
    """Return the `length` elements that rank `source` of `size` passes for rank `target` (or `ALL`) in round `turn`.

    Their reduction `op` (empty: none) is exact.
    """
    dtype = dtype_of(name)
    noise = _noise(length, source + 1, target + 2, turn)
    sign = _sign(noise)
    if name == "bool":
        return (noise & 1).bool()
    if name in FLOAT8:
        return (sign * (1 + noise % 3)).to(torch.float32).to(dtype)
    if name in COMPLEX:
        imaginary = _noise(length, source + 1, target + 2, turn + 1000)
        most = _MAGNITUDES[name] // (4 * size)
        parts = [(1 + part % most) * _sign(part) for part in (noise, imaginary)]
        if op == "AVG":
            parts = [part * size for part in parts]
        return (torch.complex(parts[0].double(), parts[1].double()) / _PARTS).to(dtype)
    if op == "PRODUCT":
        factors = torch.tensor(_FACTORS_OF_FLOATS if dtype.is_floating_point else _FACTORS)[noise % len(_FACTORS)]
        return (factors.abs() if name == "uint8" else factors).to(dtype)
    if op in ("BAND", "BOR", "BXOR"):
        dense = noise | noise >> 7
        return (dense if op == "BAND" else noise & noise >> 7 if op == "BOR" else noise).to(dtype)
    if op in ("AVG", "PREMUL_SUM"):
        most = max(3, _MAGNITUDES[name] // (8 * size * size))
        return (sign * size * (1 + noise % most)).to(dtype) / _PARTS
    if name in ("int8", "int16", "uint8"):
        return noise.to(dtype)  # of all magnitudes, so that sums wrap
    fixed, is_free = _signs(length)
    sign = torch.where(is_free, sign, fixed)
    most = max(3, _MAGNITUDES[name] * MOST_RANKS // max(MOST_RANKS, size))
    whole = noise.remainder_(most - 1).add_(1).mul_(sign).to(dtype)
    return whole.div_(_PARTS) if dtype.is_floating_point else whole


def bits(name: str, length: int, *, source: int, target: int, turn: int) -> Tensor:
    """Return `length` elements of any bits, beginning with the odd patterns of floats; of bool 0 and 1."""
    dtype = dtype_of(name)
    word = _WORDS[min(8, dtype.itemsize)]
    per_element = dtype.itemsize // word.itemsize
    noise = _noise(length * per_element, source + 1, target + 2, turn)
    if name == "bool":
        return (noise & 1).bool()
    words = (noise * 5 + (noise << 9)).to(word)
    odd = _ODD_PATTERNS.get(word.itemsize, tuple(range(256)))
    for place, pattern in enumerate(odd[: len(words)]):
        words[(place + source) % len(words)] = pattern
    return words.view(dtype)


def subnormals(name: str, length: int, *, source: int, target: int, turn: int) -> Tensor:
    """Return `length` small multiples of the smallest number above zero: sums of all ranks' are subnormal and exact."""
    dtype = dtype_of(name)
    noise = _noise(length, source + 1, target + 2, turn)
    whole = (1 + noise % _MOST_SUBNORMAL) * _sign(noise)
    return (whole.double() * (torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)).to(dtype)


def extremes(name: str, op: str, length: int, *, source: int, target: int, turn: int, size: int) -> Tensor:
    """Return the elements of rank `source` of `size`, as `numbers` does: NaNs, infinities and the greatest numbers.

    In each element one rank passes one value and all others another, or all the same, so that the result of `op` does
    not depend on the order: also for opposite infinities, an infinity times zero, and an overflow.
    """
    dtype = dtype_of(name)
    nan, inf, most = torch.nan, torch.inf, torch.finfo(dtype).max
    rows = {  # what one rank passes, and what all others do
        "SUM": ((nan, 1), (inf, 1), (-inf, 1), (inf, -inf), (most, most), (-most, -most), (inf, inf)),
        "AVG": ((nan, 1), (inf, 1), (-inf, 1), (inf, -inf), (inf, inf)),
        "PRODUCT": ((nan, 2), (inf, 2), (-inf, 2), (inf, 0), (most, most), (inf, inf)),
    }.get(op, ((inf, 1), (-inf, 1), (-inf, -inf), (inf, inf), (most, -most), (-most, -most)))
    place = _places(length)
    is_one = (place // len(rows) + target + turn) % size == source
    one, others = torch.tensor(rows, dtype=torch.float64)[place % len(rows)].unbind(1)
    return torch.where(is_one, one, others).to(dtype)


def roundings(name: str, op: str, length: int, *, source: int, target: int, turn: int, size: int) -> Tensor:
    """Return the elements of rank `source` of `size`, as `numbers` does, for results that must be rounded, once.

    In each element two ranks pass numbers of all digits and the others nothing, that is 0, or 1 to a PRODUCT. So the
    result does not depend on the order, nor on a wider dtype in between; that of AVG if `size` is a power of two. Some
    sums lie halfway between two numbers, or next to that, or less than half a digit above the greatest one.
    """
    dtype = dtype_of(name)
    eps, most = torch.finfo(dtype).eps, torch.finfo(dtype).max
    noise, other = (_noise(length, number, target + 2, turn) for number in (1, 2))
    first = noise % size
    second = (first + 1 + other % max(1, size - 1)) % size
    one, two = (1 + (each >> 8).remainder(round(1 / eps)).double() * eps for each in (noise, other))
    if op != "PRODUCT":
        half, case = eps / 2, _places(length) % 8
        two = two * _sign(other) * 0.5 ** (1 + noise % (round(1 / eps).bit_length() - 2)).double()
        for number, addend in enumerate(
            (half, half * (1 - half), half * (1 + eps), half * (1 - half) * most / (2 - eps))
        ):
            two[case == number] = addend
        one[case == 3] = most
        two = two * _sign(noise)
    none = torch.full_like(one, op == "PRODUCT")
    return torch.where(first == source, one * _sign(noise), torch.where(second == source, two, none)).to(dtype)


def reduced(parts: Sequence[Tensor], op: str, factor: float = 1.0) -> Tensor:
    """Return the reduction of the ranks' tensors, rounded to their dtype; of bool SUM, MAX are or, PRODUCT, MIN and."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        stacked = torch.stack(list(parts))
        if op == "BXOR":
            return stacked.sum(0) % 2 == 1
        return stacked.all(0) if op in ("PRODUCT", "MIN", "BAND") else stacked.any(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([part.to(wide) for part in parts])
    if op == "SUM":
        found = stacked.sum(0)
    elif op == "AVG":
        found = stacked.sum(0) / len(parts) if wide != torch.int64 else stacked.sum(0) // len(parts)
    elif op == "PREMUL_SUM":
        found = (stacked * factor).sum(0)
    elif op == "PRODUCT":
        found = stacked.prod(0)
    elif op == "MAX":
        found = stacked.amax(0)
    elif op == "MIN":
        found = stacked.amin(0)
    else:
        join = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
        found = stacked[0]
        for part in stacked[1:]:
            found = join(found, part)
    return found.to(dtype)


def sentinel(dtype: torch.dtype) -> int:
    """Return the byte that fills outputs and the memory around them: NaN in every floating-point dtype."""
    return 1 if dtype == torch.bool else 0xFF


def written_over(dtype: torch.dtype) -> int:
    """Return the byte that fills a rank's tensors after their operation was judged."""
    return 1 if dtype == torch.bool else 0x5A


def _noise(length: int, *key: int) -> Tensor:
    """Return `length` pseudorandom numbers of 62 bits, functions of their position and `key`."""
    seed = 0x243F6A8885A308D3
    for part in key:
        seed = ((seed ^ part) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & _MASK
    noise = _places(length) + seed
    noise ^= (noise >> 29).bitwise_and_(2**35 - 1)
    noise *= 0x369DEA0F31A53F85
    noise ^= (noise >> 32).bitwise_and_(2**32 - 1)
    return noise.bitwise_and_(_MASK)


def _sign(noise: Tensor) -> Tensor:
    return 1 - 2 * (noise >> 40 & 1)


@lru_cache(maxsize=8)
def _places(length: int) -> Tensor:
    """Return a number for each position, far from that of the next."""
    return torch.arange(1, length + 1, dtype=torch.int64) * 0x2545F4914F6CDD1D


@lru_cache(maxsize=8)
def _signs(length: int) -> tuple[Tensor, Tensor]:
    """Return the sign at each position, and which positions are free to have another.

    Every third place is negative on all ranks, so that a MAX that begins at zero is seen.
    """
    third = torch.arange(length) % 3
    return torch.where(third == 0, -1, 1), third == 2
