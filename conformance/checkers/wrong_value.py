"""A wrong value and the facts of its run, for the rules that recognise mistakes.

Sums and means are in double precision, in which the fixtures' data are exact.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Facts
from conformance.truth.difference import equal_values
from conformance.truth.expected import exact_value

#: A gradient as programs name it: of a step, of a backward under `no_sync` (`local`), or of a micro-batch of any kind.
_GRADIENT = re.compile(r"^step(?P<step>\d+)/(?:(?P<part>local|micro)(?P<number>\d+)/)?grad/(?P<parameter>.+)$")


@dataclass(frozen=True)
class WrongValue:
    """One wrong tensor, and all ranks' expected and observed facts of the run; `reduced` is as for `diagnose`."""

    name: str
    rank: int
    wanted: Tensor
    got: Tensor
    expected: Mapping[int, Facts]
    observed: Mapping[int, Facts]
    reduced: Mapping[int, int] | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks with expected facts."""
        return len(self.expected)

    @property
    def same_kind(self) -> bool:
        """Whether dtype and shape are right."""
        return self.wanted.dtype == self.got.dtype and self.wanted.shape == self.got.shape

    @property
    def was_reduced(self) -> bool:
        """Whether a reduction was recorded in the backward of this gradient's step."""
        match = _GRADIENT.match(self.name)
        return match is not None and self.reduced is not None and int(match["step"]) in self.reduced

    @property
    def never_sent(self) -> str:
        """A clause if the backward of this gradient's step reduced fewer elements than its gradients have."""
        if not self.was_reduced or self.reduced is None or (match := _GRADIENT.match(self.name)) is None:
            return ""
        step = int(match["step"])
        wanted = [exact_value(value) for name, value in self.expected[self.rank].items() if _is_of(name, step)]
        numel = sum(one.numel() for one in wanted if isinstance(one, Tensor) and one.layout is torch.strided)
        return f"{self.reduced[step]} of {numel} elements were reduced" if self.reduced[step] < numel else ""

    @cached_property
    def everywhere(self) -> dict[int, Tensor]:
        """The comparable observed values of all ranks under this name."""
        return self._comparable({rank: facts.get(self.name) for rank, facts in self.observed.items()})

    @cached_property
    def wanted_everywhere(self) -> dict[int, Tensor]:
        """The comparable expected values of all ranks under this name."""
        return self._comparable({rank: exact_value(facts.get(self.name)) for rank, facts in self.expected.items()})

    @cached_property
    def other_facts(self) -> dict[str, Tensor]:
        """The other expected facts of this rank of the same dtype and shape."""
        facts = {name: exact_value(value) for name, value in self.expected[self.rank].items() if name != self.name}
        return self._comparable(facts)

    @cached_property
    def left_before(self) -> dict[int, Tensor]:
        """The expected gradient of each rank after the backward before; empty if there is none."""
        if (match := _GRADIENT.match(self.name)) is None:
            return {}
        step, parameter = match["step"], match["parameter"]
        if match["part"]:
            before = f"step{step}/{match['part']}{int(match['number']) - 1}/grad/{parameter}"
        else:
            local = re.compile(rf"step{step}/local\d+/grad/{re.escape(parameter)}")
            earlier = f"step{int(step) - 1}/grad/{parameter}"  # a step may be one backward under `no_sync`
            before = next((name for name in reversed(list(self.expected[self.rank])) if local.fullmatch(name)), earlier)
        return self._comparable({rank: exact_value(facts.get(before)) for rank, facts in self.expected.items()})

    @property
    def others_of_its_step(self) -> list[bool]:
        """Whether each other nonzero gradient of the same step on this rank is right; empty if this is no gradient."""
        if (match := _GRADIENT.match(self.name)) is None:
            return []
        prefix = self.name.removesuffix(match["parameter"])
        pairs = [
            (as_tensor(exact_value(value)), as_tensor(self.observed[self.rank].get(name)))
            for name, value in self.expected[self.rank].items()
            if name.startswith(prefix) and name != self.name
        ]
        return [same(wanted, got) for wanted, got in pairs if wanted is not None and got is not None and wanted.any()]

    def _comparable(self, values: Mapping[Any, Any]) -> dict[Any, Tensor]:
        tensors = {key: as_tensor(value) for key, value in values.items()}
        return {
            key: tensor
            for key, tensor in tensors.items()
            if tensor is not None and tensor.shape == self.wanted.shape and tensor.dtype == self.wanted.dtype
        }


def _is_of(name: str, step: int) -> bool:
    """Whether this is a gradient after the last backward of `step`."""
    match = _GRADIENT.match(name)
    return match is not None and int(match["step"]) == step and not match["part"]


def as_tensor(value: Any) -> Tensor | None:
    """Return a dense tensor for a tensor or a float; None for other facts."""
    if isinstance(value, Tensor):
        return value.to_dense()
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else None


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in double precision."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether both have one shape and the same values in double precision."""
    return one.shape == other.shape and bool(equal_values(wide(one), wide(other)).all())


def all_alike(tensors: Mapping[int, Tensor]) -> bool:
    """Whether all ranks have the same."""
    first, *others = tensors.values()
    return all(same(first, other) for other in others)


def total(tensors: Mapping[int, Tensor]) -> Tensor:
    """Return the sum over the ranks, in double precision."""
    first, *others = map(wide, tensors.values())
    return sum(others, first)


def is_zero(tensor: Tensor) -> bool:
    """Whether every element is zero."""
    return not bool(tensor.to_dense().any())


def series(name: str) -> str:
    """Return the name without its step's number."""
    return re.sub(r"^step\d+", "step", name)
