"""The join hook of a plain wrapper: what a rank without data does in a join context."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook


class PlainJoin(Join):
    """torch's context, without the filter of warnings that it leaves behind."""

    def __exit__(self, *raised: Any) -> None:
        """Shadow the other ranks until all have run out of data."""
        with warnings.catch_warnings():
            super().__exit__(*raised)


class PlainJoinHook(JoinHook):
    """Makes a `PlainDDP` shadow the other ranks, and at the end take the state of a rank that joined last."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._own: dict[nn.Parameter, Tensor | None] | None = None  # gradients from before the first round

    def main_hook(self) -> None:
        """Shadow one round; `torch.distributed.algorithms.Join` calls it while other ranks have data."""
        if self._own is None:
            self._own = {parameter: parameter.grad for parameter in self._wrapper.parameters()}
        self._wrapper.shadow_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Restore this rank's own gradients, and take the state of a rank that joined last."""
        for parameter, gradient in (self._own or {}).items():
            parameter.grad = gradient
        self._wrapper.take_last_state(is_mine=is_last_joiner)
