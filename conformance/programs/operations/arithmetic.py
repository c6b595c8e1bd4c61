"""What wrong arithmetic, the same for every element, makes of right values: a factor, or a detour through a dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: So great a whole factor is no chance, unless a tensor has as many elements.
_MOST = 64
#: Of one rounding more or less, as another order of factors makes it.
_ROUNDINGS = 4
_DETOURS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "complex64")


def scaled(op: str, parts: Sequence[Tensor], got: Tensor) -> str:
    """Return by what the sum of `parts`, or their average, is divided or multiplied in `got`; empty if by nothing."""
    if op not in ("SUM", "AVG") or not got.is_floating_point() or not got.numel():
        return ""
    size, total = len(parts), torch.stack([part.double() for part in parts]).sum(0)
    if not bool(got.isfinite().all()) or not bool(got.any()):
        return ""
    greatest = int(got.double().abs().argmax())
    ratio = float(total[greatest] / got[greatest].double())
    divisor, factor = round(ratio), round(1 / ratio) if ratio else 0
    most = max(_MOST, got.numel() * size)
    if 1 <= divisor <= most and divisor != (size if op == "AVG" else 1) and _close(total / divisor, got):
        return f"the sum divided by {divisor}" + (f", not by {size}, the group's size" if op == "AVG" else "")
    if 1 < factor <= most and _close(total * factor, got):
        return f"the sum multiplied by {factor}"
    if op == "SUM" and bool(_added_in_some_order([part / size for part in parts], size, got).all()):
        return "the sum of what was divided by the group's size first and multiplied afterwards, so that bits were lost"
    return ""


def saturated(op: str, parts: Sequence[Tensor], got: Tensor) -> str:
    """Return what `got` holds if it is the sum of integers, held at the dtype's limits where it is to wrap."""
    if op != "SUM" or got.is_floating_point() or got.is_complex() or got.dtype in (torch.bool, torch.int64):
        return ""
    limits, total = torch.iinfo(got.dtype), torch.stack([part.long() for part in parts]).sum(0)
    held = total.clamp(limits.min, limits.max).to(got.dtype)
    return "the sum, held at the dtype's limits, where it is to wrap" if torch.equal(held, got) else ""


def converted(expected: Tensor, got: Tensor) -> str:
    """Return through which dtype the values went that came, if that explains every element; empty if none does."""
    if expected.dtype is torch.bool or expected.dtype.itemsize == 1:
        return ""
    for name in _DETOURS:
        dtype = getattr(torch, name)
        if dtype == expected.dtype or dtype.is_complex != expected.is_complex():
            continue
        if torch.equal(expected.to(dtype).to(expected.dtype), got):
            return f"the right values converted to {name} and back"
    return ""


def _added_in_some_order(parts: Sequence[Tensor], factor: int, got: Tensor) -> Tensor:
    """Return which elements of `got` are `factor` times the sum of `parts`, from some rank on, rounded at each step."""
    found = torch.zeros_like(got, dtype=torch.bool)
    for start in range(len(parts)):
        for step in (1, -1):
            total = parts[start]
            for number in range(1, len(parts)):
                total = total + parts[(start + step * number) % len(parts)]
            found |= total * factor == got
    return found


def _close(wanted: Tensor, got: Tensor) -> bool:
    tolerance = _ROUNDINGS * torch.finfo(got.dtype).eps
    return torch.allclose(wanted, got.double(), rtol=tolerance, atol=0)
