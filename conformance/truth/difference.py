"""Compares two facts bit for bit, and describes where and by how much they differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Raised, Unmeasured

#: Integers of the width of an element, whose comparison distinguishes the signs of zeros.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """How an observed fact differs from the expected one.

    `reason` is a clause with the observed fact as its subject ("has shape (2,), expected (3,)"). For tensors of one
    shape `num_differing` of `numel` elements differ, first at `index`, by `max_abs` at most.
    """

    reason: str
    index: tuple[int, ...] = ()
    num_differing: int = 0
    numel: int = 0
    max_abs: float = 0.0

    def __str__(self) -> str:
        return self.reason


def difference(expected: Any, got: Any) -> Difference | None:
    """Return None if `got` is the same fact as `expected`: same type, dtype, shape, layout, entries and values.

    The sign of a real zero counts, since it does not depend on the order of a sum: a sum of -0.0 alone is -0.0, every
    other zero 0.0. The sign of a complex zero depends on the multiplication, and does not count. All NaNs are equal,
    since processors choose the payload. Exceptions are equal when type and message are.
    """
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        return _of_tensors(expected, got)
    if isinstance(expected, Raised) and isinstance(got, Raised):
        same = (expected.type, expected.message) == (got.type, got.message)
        return None if same else Difference(f"is {got}, expected {expected}")
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        return _of_mappings(expected, got)
    if _is_sequence(expected) and _is_sequence(got):
        return _of_sequences(expected, got)
    if isinstance(expected, float | int) and isinstance(got, float | int):
        is_same = _same_number(expected, got)
    else:
        is_same = type(expected) is type(got) and expected == got
    return None if is_same else Difference(f"is {show(got)}, expected {show(expected)}")


def show(value: Any, num_elements: int = 6) -> str:
    """Return a value on one short line."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return f"{value.to_dense().reshape(-1)[0].item()!r} ({kind(value)})"
        return f"a tensor ({kind(value)})"
    if isinstance(value, Raised):
        return f"the exception {value}"
    if isinstance(value, Unmeasured):
        return str(value)
    if isinstance(value, Mapping):
        shown = [f"{name}: {show(item)}" for name, item in list(value.items())[:num_elements]]
        more = [f"... {len(value)} items"] if len(value) > num_elements else []
        return f"{{{', '.join(shown + more)}}}"
    if _is_sequence(value) and len(value) > num_elements:
        return f"[{', '.join(show(item) for item in value[:num_elements])}, ... {len(value)} items]"
    if _is_sequence(value):
        return f"[{', '.join(show(item) for item in value)}]"
    return repr(value)


def kind(tensor: Tensor) -> str:
    """Return shape, dtype and, unless dense, layout: `3x4 float32`."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    layout = "" if tensor.layout is torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}{layout}"


def equal_values(expected: Tensor, got: Tensor) -> Tensor:
    """Return where two dense tensors of one shape hold the same value; not-a-number equals itself."""
    same = (expected == got) | ((expected != expected) & (got != got))
    if expected.is_floating_point():
        same &= expected.isnan() | (expected.signbit() == got.signbit())
    return same


def _of_tensors(expected: Tensor, got: Tensor) -> Difference | None:
    for name in ("dtype", "shape", "layout"):
        if (has := getattr(got, name)) != (needs := getattr(expected, name)):
            return Difference(f"has {name} {_plain(has)}, expected {_plain(needs)}")
    if expected.layout is torch.strided and _same_bits(expected, got):
        return None  # as nearly all facts are
    if expected.layout is torch.sparse_coo and (needs := _entries(expected)) != (has := _entries(got)):
        return Difference(f"has entries at {show(has)}, expected entries at {show(needs)}")
    wanted, dense = expected.to_dense(), got.to_dense()
    differs = ~equal_values(wanted, dense)
    num_differing = int(differs.sum())
    if num_differing == 0:
        return None
    index = tuple(int(i) for i in differs.nonzero()[0])
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    gap = (dense.to(wide) - wanted.to(wide)).abs()
    finite = gap[differs & gap.isfinite()]
    max_abs = float(finite.max()) if finite.numel() else math.inf
    place = f" at {list(index)}" if index else ""
    first = f"first{place}: expected {wanted[index].item()!r}, got {dense[index].item()!r}"
    count = f"{num_differing} of {dense.numel()} element(s)"
    return Difference(
        f"differs in {count}, {first}; largest difference {max_abs:g}", index, num_differing, dense.numel(), max_abs
    )


def _same_bits(expected: Tensor, got: Tensor) -> bool:
    integers = _INTEGERS.get(expected.itemsize)
    return integers is not None and torch.equal(expected.view(integers), got.view(integers))


def _entries(tensor: Tensor) -> list[Any]:
    """Return the sorted indices of a sparse tensor's entries, zeros included; row numbers if it has whole rows."""
    places: list[Any] = tensor.coalesce().indices().t().tolist()
    return [place[0] for place in places] if tensor.sparse_dim() == 1 else places


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def _of_mappings(expected: Mapping[Any, Any], got: Mapping[Any, Any]) -> Difference | None:
    if missing := [key for key in expected if key not in got]:
        return Difference(f"lacks {', '.join(map(repr, missing))}")
    if surplus := [key for key in got if key not in expected]:
        return Difference(f"has {', '.join(map(repr, surplus))}, which must not be there")
    for key, value in expected.items():
        if found := difference(value, got[key]):
            return Difference(f"at {key!r} {found.reason}")
    return None


def _of_sequences(expected: Sequence[Any], got: Sequence[Any]) -> Difference | None:
    for position, pair in enumerate(zip(expected, got, strict=False)):
        if found := difference(*pair):
            return Difference(f"at position {position} {found.reason}")
    if len(expected) != len(got):
        return Difference(f"has {len(got)} item(s), expected {len(expected)}: {show(got)} for {show(expected)}")
    return None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _same_number(expected: float, got: float) -> bool:
    if isinstance(expected, bool) is not isinstance(got, bool):
        return False
    same = expected == got and math.copysign(1, expected) == math.copysign(1, got)
    return same or (math.isnan(expected) and math.isnan(got))
