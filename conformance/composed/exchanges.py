"""The user's collectives beside a DDP: tensors whose sum is known, in forward, within backward or around it.

A collective that meets a wrapper's bucket on another rank returns a wrong sum, or hangs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.composed.training import Exchange, Training

#: Sums a tensor over the ranks, in place. All ranks must call it.
AllReduce = Callable[[Tensor], None]
#: The difference between the values of consecutive exchanges, so that mixing them up shows.
_STRIDE = 7


class _Passing(torch.autograd.Function):
    """The identity on rows, which calls `gradient_ready` in backward.

    Its own leaf makes backward reach it on every rank, even if a rank's rows require no gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaf: Tensor, gradient_ready: Callable[[], None]) -> Tensor:
        ctx.gradient_ready = gradient_ready
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.gradient_ready()
        return gradients[0], None, None


class Exchanges:
    """One rank's exchanges in a training."""

    def __init__(self, training: Training, rank: int, device: torch.device | str, all_reduce: AllReduce) -> None:
        self._exchange = training.exchange
        self._num_blocks = len(training.blocks)
        self._rank = rank
        self._device = device
        self._all_reduce = all_reduce
        self._count = 0
        self._brought: list[Tensor] = []

    def behind(self, index: int, rows: Tensor) -> Tensor:
        """Return the rows after block `index`, with the training's exchange there."""
        exchange = self._exchange
        if exchange is None or not exchange.within_module or exchange.block % self._num_blocks != index:
            return rows
        if exchange.place in ("forward", "both"):
            self._run(exchange)
        if exchange.place == "forward" or not torch.is_grad_enabled():
            return rows
        run = partial(self._run, exchange)
        leaf = torch.zeros((), device=rows.device, requires_grad=True)
        if exchange.place != "tensor_hook":
            return _Passing.apply(rows, leaf, run)
        hooked = rows + leaf
        hooked.register_hook(lambda _: run())
        return hooked

    def at(self, place: str) -> None:
        """Exchange, if the training does at `place`."""
        if self._exchange is not None and self._exchange.place == place:
            self._run(self._exchange)

    def take(self) -> dict[str, Tensor]:
        """Return the results since the last call."""
        brought, self._brought = self._brought, []
        return {f"exchanged {index}": tensor for index, tensor in enumerate(brought)}

    def _run(self, exchange: Exchange) -> None:
        mine = torch.full((exchange.size,), 1.0 + self._rank + _STRIDE * self._count, device=self._device)
        self._all_reduce(mine)
        self._count += 1
        self._brought.append(mine)
