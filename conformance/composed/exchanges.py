"""What the user communicates beside a DDP: tensors whose sum is known, in forward, within backward or around it.

A collective that meets a wrapper's bucket in place of its like on another rank brings another sum, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.composed.training import Exchange, Training

#: Sums a tensor over the ranks, in place. All ranks must call it.
AllReduce = Callable[[Tensor], None]
#: Between the content of one exchange and that of the next, so that no two are taken for each other.
_STRIDE = 7


class _Passing(torch.autograd.Function):
    """The identity on rows, which tells when its gradient comes.

    It hangs on a leaf of its own, so that a gradient comes on every rank, whatever a rank's rows were computed from.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaf: Tensor, when_gradient_comes: Callable[[], None]) -> Tensor:
        ctx.when_gradient_comes = when_gradient_comes
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.when_gradient_comes()
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
        """Return the rows behind the block `index`, and exchange there what the training exchanges."""
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
        """Return what has come since this was asked last."""
        brought, self._brought = self._brought, []
        return {f"exchanged {index}": tensor for index, tensor in enumerate(brought)}

    def _run(self, exchange: Exchange) -> None:
        mine = torch.full((exchange.size,), 1.0 + self._rank + _STRIDE * self._count, device=self._device)
        self._all_reduce(mine)
        self._count += 1
        self._brought.append(mine)
