"""Gradients on their way, while the user finalizes by hand: nobody may read, clip or step on one in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor

from ddp_impl.base.errors import ReductionError


class NotFinal(Tensor):
    """Stands in `.grad` for a gradient that is not final, in its dtype and shape: every use of it is an error.

    It can be replaced, by None too, which reads nothing. It holds no value but NaN, so that code that asks no Python
    class, such as autograd's, gets no plausible one.
    """

    why: str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Never:
        """Raise `ReductionError`."""
        stands_in = _first_in((*args, *(kwargs or {}).values()))
        raise ReductionError(stands_in.__dict__["why"] if stands_in is not None else "a gradient is not final")


def _first_in(values: Any) -> NotFinal | None:
    for value in values:
        found = value if isinstance(value, NotFinal) else _first_in(value) if isinstance(value, (list, tuple)) else None
        if found is not None:
            return found
    return None


@dataclass(frozen=True, slots=True)
class Hidden:
    """A `parameter`, its `gradient`, None if there was none, and what stands in its place."""

    parameter: Tensor
    gradient: Tensor | None
    stands_in: NotFinal

    def reveal(self) -> None:
        """Put the gradient back, unless the user has replaced or dropped it."""
        if self.parameter.grad is self.stands_in:
            self.parameter.grad = self.gradient


def hide(parameter: Tensor, why: str) -> Hidden:
    """Put something in place of the gradient of `parameter` that answers every use with `ReductionError(why)`."""
    gradient = parameter.grad
    dtype = (parameter if gradient is None else gradient).dtype
    value = torch.full((), float("nan"), dtype=dtype, device=parameter.device)
    stands_in = value.expand(parameter.shape).as_subclass(NotFinal)
    stands_in.why = why
    parameter.grad = stands_in
    return Hidden(parameter, gradient, stands_in)
