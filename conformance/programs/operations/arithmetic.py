"""Recognises wrong arithmetic that is the same for every element: a factor, or a detour through a dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor

from conformance.programs.operations.data import reduced

#: So many elements must have one factor that is no whole number.
_ENOUGH = 3
#: The largest factor that is looked for, in a tensor of fewer elements.
_MOST = 64
#: How many roundings another order of factors may add.
_ROUNDINGS = 4
_WORDS = {2: torch.int16, 4: torch.int32}
_DETOURS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "complex64")


def scaled(op: str, parts: Sequence[Tensor], got: Tensor) -> str:
    """Return the factor by which `got` differs from the sum or average of `parts`, as a clause; empty if none fits."""
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
        return "the sum of parts that were divided by the group's size and multiplied after it, so that bits were lost"
    right = total / size if op == "AVG" else total
    exact = float(got[greatest].double() / right[greatest]) if right[greatest] else 1.0
    is_far = abs(exact - 1) > 2 * _ROUNDINGS * torch.finfo(got.dtype).eps
    if got.numel() >= _ENOUGH and is_far and _close(right * exact, got):
        return f"the right values times {exact:.6g}"
    return ""


def misunderstood(op: str, parts: Sequence[Tensor], got: Tensor) -> str:
    """Return a clause if `got` is a sum that was clamped to the dtype's limits, or compared integers without a sign."""
    if got.is_complex() or got.dtype == torch.bool:
        return ""
    if got.is_floating_point():
        most, limit = torch.finfo(got.dtype).max, "the greatest number, where it must be infinite"
        held = torch.stack([part.double() for part in parts]).sum(0).clamp(-most, most).to(got.dtype)
        is_clamped = op == "SUM" and bool(((held == got) | (held.isnan() & got.isnan())).all())
        return f"the sum, clamped to {limit}" if is_clamped else ""
    limits = torch.iinfo(got.dtype)
    if op in ("MAX", "MIN") and limits.min:
        turned = torch.stack(list(parts)) ^ limits.min
        found = (turned.amax(0) if op == "MAX" else turned.amin(0)) ^ limits.min
        return f"the {op} of numbers that were taken for unsigned ones" if torch.equal(found, got) else ""
    if op != "SUM" or got.dtype == torch.int64:
        return ""
    held = torch.stack([part.long() for part in parts]).sum(0).clamp(limits.min, limits.max).to(got.dtype)
    return "the sum, clamped to the dtype's limits, where it must wrap" if torch.equal(held, got) else ""


def misrounded(op: str, parts: Sequence[Tensor], got: Tensor) -> str:
    """Return how `got` was rounded, as a clause, if each is one of the two numbers beside the exact result, else empty.

    The results in double precision must be exact: the `parts` are of `roundings`, and no float64.
    """
    if got.dtype == torch.float64 or got.numel() != parts[0].numel():
        return ""
    exact = reduced([part.double() for part in parts], op)
    near, words = exact.to(got.dtype), _WORDS[got.dtype.itemsize]
    is_beyond = near.double().abs() > exact.abs()
    steps = torch.where(is_beyond, -1, 1).to(words)
    far = torch.where(near.double() == exact, near.view(words), near.view(words) + steps).view(got.dtype)
    if not bool(((got == near) | (got == far)).all()):
        return ""
    inner, outer = torch.where(is_beyond, far, near), torch.where(is_beyond, near, far)
    is_half = (near.double() - exact).abs() == (far.double() - exact).abs()
    ways = {
        "towards zero": inner,
        "away from zero": outer,
        "down": torch.where(exact > 0, inner, outer),
        "up": torch.where(exact > 0, outer, inner),
        "to the nearest, but halves away from zero": torch.where(is_half, outer, near),
        "to the nearest, but halves towards zero": torch.where(is_half, inner, near),
    }
    how = next((way for way, values in ways.items() if torch.equal(values, got)), "in no one way")
    return f"they were rounded {how}"


def converted(expected: Tensor, got: Tensor, parts: Sequence[Tensor] = (), op: str = "") -> str:
    """Return a clause if a conversion to some dtype and back explains every element of `got`; else empty.

    It may be of what was expected, or of each of the `parts` before their sum, if `op` is one.
    """
    if expected.dtype is torch.bool or expected.dtype.itemsize == 1:
        return ""
    for name in _DETOURS:
        dtype = getattr(torch, name)
        if dtype == expected.dtype or dtype.is_complex != expected.is_complex():
            continue
        if torch.equal(expected.to(dtype).to(expected.dtype), got):
            return f"the right values converted to {name} and back"
        if parts and op == "SUM" and torch.equal(reduced([part.to(dtype).to(part.dtype) for part in parts], op), got):
            return f"the sum of parts that were converted to {name} and back"
    return ""


def _added_in_some_order(parts: Sequence[Tensor], factor: int, got: Tensor) -> Tensor:
    """Return which elements of `got` are `factor` times a sum of `parts` in some ring order, rounded at each step."""
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
