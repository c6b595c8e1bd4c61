"""What a rank that has run out of data does in a join context, for the wrapper that it has there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook


class Joining(Protocol):
    """A wrapper in a join context."""

    def shadow_round(self) -> None:
        """Take part in a round of the other ranks."""

    def take_last_state(self, *, is_mine: bool) -> None:
        """Take the state of a rank that joined last; `is_mine` where this is one."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return those of the module."""


class PlainJoin(Join):
    """torch's context, which would leave a filter of warnings behind."""

    def __exit__(self, *raised: Any) -> None:
        """Go along with the other ranks until all have run out of data."""
        with warnings.catch_warnings():
            super().__exit__(*raised)


class PlainJoinHook(JoinHook):
    """Goes along with the other ranks, and at the end takes the state of one that had data longest."""

    def __init__(self, wrapper: Joining) -> None:
        self._wrapper = wrapper
        self._own: dict[nn.Parameter, Tensor | None] | None = None  # gradients from before the first round

    def main_hook(self) -> None:
        """Take part in one round; `torch.distributed.algorithms.Join` calls it as long as others have data."""
        if self._own is None:
            self._own = {parameter: parameter.grad for parameter in self._wrapper.parameters()}
        self._wrapper.shadow_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End: this rank's own gradients are as it left them, and the state is that of a rank that joined last."""
        for parameter, gradient in (self._own or {}).items():
            parameter.grad = gradient
        self._wrapper.take_last_state(is_mine=is_last_joiner)
