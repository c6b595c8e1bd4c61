"""Explains a wrong value: recognises known mistakes of a DDP from the numbers alone.

A diagnosis is a hint for the reader and never changes a verdict. Each known way is one small function that returns a
clause, or nothing; the first that recognises the value speaks. Sums and means are formed in double precision, in which
the fixtures' data are exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Facts, Raised
from conformance.truth.difference import equal_values
from conformance.truth.expected import exact_value, is_open


def diagnose(name: str, rank: int, expected: Mapping[int, Facts], observed: Mapping[int, Facts]) -> str:
    """Return what fact `name` of `rank` looks like instead of what was expected, or an empty text.

    `expected` and `observed` hold all ranks' facts; the fact must have been observed on `rank`.
    """
    if is_open(expected[rank][name]):
        return ""
    wanted, came = exact_value(expected[rank][name]), observed[rank][name]
    if isinstance(came, Raised):
        return "an exception where there must be none" if wanted is None else "an exception instead of a value"
    if wanted is None and isinstance(came, Tensor):
        if _is_zero(came):
            return "zeros where None was expected: an absent gradient was filled in"
        return "a value where None was expected"
    if isinstance(wanted, Tensor) and came is None:
        return "None where a value was expected: nothing ever arrived"
    wanted_tensor, came_tensor = _as_tensor(wanted), _as_tensor(came)
    if wanted_tensor is None or came_tensor is None:
        return ""
    case = _Case(name, rank, wanted_tensor, came_tensor, expected, observed)
    if case.same_kind and _same(case.wanted, case.came):
        return ""  # it is the layout that differs, and nothing to be said about values
    ways = _SAME_KIND if case.same_kind else _OTHER_KIND
    return next((clause for way in ways if (clause := way(case))), "")


@dataclass(frozen=True)
class _Case:
    """One wrong tensor, and what else is known of the same run."""

    name: str
    rank: int
    wanted: Tensor
    came: Tensor
    expected: Mapping[int, Facts]
    observed: Mapping[int, Facts]

    @property
    def world_size(self) -> int:
        return len(self.expected)

    @property
    def same_kind(self) -> bool:
        return self.wanted.dtype == self.came.dtype and self.wanted.shape == self.came.shape

    @cached_property
    def everywhere(self) -> dict[int, Tensor]:
        """What every rank observed under this name, where that is comparable."""
        return self._comparable({rank: facts.get(self.name) for rank, facts in self.observed.items()})

    @cached_property
    def wanted_everywhere(self) -> dict[int, Tensor]:
        """What every rank must observe under this name."""
        return self._comparable({rank: exact_value(facts.get(self.name)) for rank, facts in self.expected.items()})

    def other_facts(self) -> dict[str, Tensor]:
        """Return the other facts of the same kind that are expected of this rank."""
        facts = {name: exact_value(value) for name, value in self.expected[self.rank].items() if name != self.name}
        return self._comparable(facts)

    def _comparable(self, values: Mapping[Any, Any]) -> dict[Any, Tensor]:
        tensors = {key: _as_tensor(value) for key, value in values.items()}
        return {
            key: tensor
            for key, tensor in tensors.items()
            if tensor is not None and tensor.shape == self.wanted.shape and tensor.dtype == self.wanted.dtype
        }


def _wrong_dtype(case: _Case) -> str:
    if case.wanted.shape != case.came.shape:
        return ""
    if _same(case.wanted, case.came):
        return "the right values in another dtype"
    rounded = case.wanted.to(case.came.dtype)
    return "the expected values rounded to this dtype" if _same(rounded, case.came) else ""


def _wrong_shape(case: _Case) -> str:
    if case.wanted.numel() == case.came.numel() and _same(case.wanted.reshape(-1), case.came.reshape(-1)):
        return "the right values in another shape"
    return _transposed(case)


def _transposed(case: _Case) -> str:
    return "the expected values transposed" if case.wanted.dim() == 2 and _same(case.wanted.t(), case.came) else ""


def _not_finite(case: _Case) -> str:
    broken = ~case.came.isfinite() & case.wanted.isfinite()
    if not bool(broken.any()):
        return ""
    if bool((case.came[broken] != case.came[broken]).any()):
        return f"not-a-number in {int(broken.sum())} place(s) that must be finite"
    return f"an overflow to infinity in {int(broken.sum())} place(s) that must be finite"


def _never_reduced(case: _Case) -> str:
    values = list(case.everywhere.values())
    if case.world_size < 2 or len(values) < case.world_size or not _all_alike(case.wanted_everywhere):
        return ""
    if _all_alike(case.everywhere):
        return ""
    total = sum((_wide(value) for value in values[1:]), _wide(values[0]))
    if _same(total, _wide(case.wanted) * case.world_size):
        return "the rank's own local value, never reduced (the mean over the ranks is what was expected)"
    if _same(total, _wide(case.wanted)):
        return "the rank's own local value divided by the world size, but never reduced"
    return ""


def _reduced(case: _Case) -> str:
    wanted = list(case.wanted_everywhere.values())
    if case.world_size < 2 or len(wanted) < case.world_size or _all_alike(case.wanted_everywhere):
        return ""
    total = sum((_wide(value) for value in wanted[1:]), _wide(wanted[0]))
    if _same(total, _wide(case.came) * case.world_size):
        return "the mean over the ranks, where every rank must keep its own"
    return "the sum over the ranks, where every rank must keep its own" if _same(total, _wide(case.came)) else ""


def _all_zero(case: _Case) -> str:
    return "zeros: no value was ever written" if _is_zero(case.came) else ""


def _scaled(case: _Case) -> str:
    wanted, came = _wide(case.wanted).reshape(-1), _wide(case.came).reshape(-1)
    if wanted.numel() == 0 or _is_zero(wanted):
        return ""
    largest = int(wanted.abs().argmax())
    factor = (came[largest] / wanted[largest]).item()
    if isinstance(factor, complex):
        if factor.imag != 0:
            return ""
        factor = factor.real
    if not math.isfinite(factor) or not _same(wanted * factor, came):
        return ""
    if factor == case.world_size:
        return f"the sum over the ranks (expected * {factor:g}), never divided by the world size"
    if factor * case.world_size == 1:
        return f"expected / {case.world_size}: divided by the world size once too often"
    if wanted.numel() == 1 and factor % 1 and (1 / factor) % 1:
        return ""  # any number is some multiple of another
    return f"every element is {factor:g} times what was expected"


def _misrouted(case: _Case) -> str:
    for rank, wanted in case.wanted_everywhere.items():
        if rank != case.rank and _same(wanted, case.came):
            return f"what rank {rank} must have: it came to the wrong rank"
    return ""


#: Parts of the names of facts about what rank 0 hands to the others; `seen` are buffers as forward found them.
_STATE = ("parameter", "buffer", "seen")


def _not_broadcast(case: _Case) -> str:
    root, roots_wanted = case.everywhere.get(0), case.wanted_everywhere.get(0)
    is_state = any(part in _STATE for part in case.name.split("/"))
    if case.rank == 0 or not is_state or root is None or roots_wanted is None or not _same(root, roots_wanted):
        return ""
    if _same(root, case.wanted):
        return "the rank's own value: rank 0 has the expected one, and it was not broadcast"
    return "right on rank 0 and wrong here, as if rank 0's had not been broadcast"


def _stale(case: _Case) -> str:
    for name, wanted in case.other_facts().items():
        if _series(name) == _series(case.name) and _same(wanted, case.came):
            return f"the expected value of {name}: not this step's"
    return ""


def _not_cleared(case: _Case) -> str:
    for name, wanted in case.other_facts().items():
        if _series(name) == _series(case.name) and _same(_wide(case.wanted) + _wide(wanted), _wide(case.came)):
            return f"the expected value with that of {name} added: not cleared in between"
    return ""


def _mixed_up(case: _Case) -> str:
    for name, wanted in case.other_facts().items():
        if case.came.numel() > 1 and _same(wanted, case.came):
            return f"the expected value of {name}: the two are mixed up"
    return ""


def _reordered(case: _Case) -> str:
    wanted, came = case.wanted.reshape(-1), case.came.reshape(-1)
    if came.numel() < 2 or came.is_complex() or not _same(wanted.sort().values, came.sort().values):
        return ""
    return "the expected values in another order: a wrong offset, or wrong strides"


def _equals_other_rank(case: _Case) -> str:
    for rank, came in case.everywhere.items():
        wanted = case.wanted_everywhere.get(rank)
        if rank != case.rank and _same(came, case.came) and wanted is not None and _same(wanted, came):
            return f"rank {rank}'s value, where the rank must have its own"
    return ""


def _partly_wrong(case: _Case) -> str:
    wanted, came = case.wanted.reshape(-1), case.came.reshape(-1)
    places = (~equal_values(wanted, came)).nonzero().reshape(-1)
    first, last = int(places[0]), int(places[-1])
    if len(places) == came.numel() or last - first + 1 != len(places):
        return ""
    part = f"element(s) {first} to {last} of the flat value"
    return f"zeros in {part}, the rest is right" if _is_zero(came[places]) else f"wrong in {part} only"


def _rounded(case: _Case) -> str:
    if not case.came.is_floating_point() and not case.came.is_complex():
        return ""
    gap, precision = _gap(case), torch.finfo(case.came.dtype).eps
    return f"off by rounding only: {gap:.2g} of the largest value" if gap <= 4 * precision else ""


def _rounded_to_half(case: _Case) -> str:
    if not case.came.is_floating_point() and not case.came.is_complex():
        return ""
    gap, precision = _gap(case), torch.finfo(case.came.dtype).eps
    wrong = case.came[~equal_values(case.wanted, case.came)]
    parts = torch.view_as_real(wrong) if wrong.is_complex() else wrong
    for dtype in (torch.float16, torch.bfloat16):
        if gap <= torch.finfo(dtype).eps > precision and _same(parts, parts.to(dtype)):
            name = str(dtype).removeprefix("torch.")
            return f"off by {gap:.2g} of the largest value, what rounding to {name} would do"
    return ""


def _gap(case: _Case) -> float:
    """Return the largest difference, as a share of the largest value that was expected."""
    wanted, came = _wide(case.wanted), _wide(case.came)
    return (wanted - came).abs().max().item() / max(wanted.abs().max().item(), torch.finfo(torch.float64).tiny)


_Way = Callable[[_Case], str]
_OTHER_KIND: tuple[_Way, ...] = (_wrong_dtype, _wrong_shape)
_SAME_KIND: tuple[_Way, ...] = (
    _not_finite,
    _never_reduced,
    _reduced,
    _all_zero,
    _misrouted,
    _equals_other_rank,
    _scaled,
    _stale,
    _not_cleared,
    _mixed_up,
    _transposed,
    _reordered,
    _rounded,
    _not_broadcast,
    _rounded_to_half,
    _partly_wrong,
)


def _as_tensor(value: Any) -> Tensor | None:
    """Return a dense tensor for a tensor or a float; other facts have no numbers to look at."""
    if isinstance(value, Tensor):
        return value.to_dense()
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(equal_values(_wide(one), _wide(other)).all())


def _all_alike(tensors: Mapping[int, Tensor]) -> bool:
    first, *others = tensors.values()
    return all(_same(first, other) for other in others)


def _is_zero(tensor: Tensor) -> bool:
    return not bool(tensor.to_dense().any())


def _series(name: str) -> str:
    """Return the name with its step's number left out: facts of one series differ by the step only."""
    return re.sub(r"^step\d+", "step", name)
