"""The program of `ddp-conformance bench`: ranks time the steps of several DDPs in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.models.language import Gpt
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program

Inputs = Callable[[torch.Generator], Tensor]

_ALPHABET = 64


def _layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(400)])


def _gpt() -> nn.Module:
    return Gpt(alphabet=_ALPHABET, width=64, depth=4)


#: name -> (module, one batch)
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "400 small layers": (_layers, lambda generator: torch.randn(4, 16, generator=generator)),
    "small GPT": (_gpt, lambda generator: torch.randint(0, _ALPHABET, (4, 32), generator=generator)),
}


@program("step_time")
def step_time(ctx: RankContext) -> None:
    """Observe `<label>`: the seconds of each step of each of `arguments["contestants"]`, in the same order.

    A contestant is [label, subject, options]. In each round every contestant takes one step (forward, backward,
    optimiser, zero_grad), in turn (`take_turns`). Times are from a barrier to the end of the step.
    """
    make, inputs = WORKLOADS[str(ctx.arguments["workload"])]
    batch = inputs(torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
    contestants: list[tuple[str, Callable[[], float]]] = []
    for label, subject, options in ctx.arguments["contestants"]:
        torch.manual_seed(0)
        model = ctx.wrap_in(subject, make().to(ctx.device), **options)
        contestants.append((label, TimedStep(ctx, model, batch)))
    take_turns(ctx, contestants)


def take_turns(ctx: RankContext, contestants: Sequence[tuple[str, Callable[[], float]]]) -> None:
    """Let every contestant take one step in each of `arguments["rounds"]` rounds; observe the seconds that they return.

    The order turns by one from round to round, so that what disturbs the machine disturbs all alike.
    """
    seconds: dict[str, list[float]] = {label: [] for label, _ in contestants}
    for round_index in range(int(ctx.arguments["rounds"])):
        turn = round_index % len(contestants)
        for label, step in [*contestants[turn:], *contestants[:turn]]:
            seconds[label].append(step())
    for label, values in seconds.items():
        ctx.observe(label, values)


class TimedStep:
    """One contestant: each call is a training step, from a barrier to its end, and returns its seconds. Collective."""

    def __init__(
        self,
        ctx: RankContext,
        model: nn.Module,
        batch: Any,
        *,
        call: Callable[[Any], Any] | None = None,
        backward: Callable[[Tensor], None] = Tensor.backward,
    ) -> None:
        """Train `model` on `batch`, through `call` (a compiled form of it) where given."""
        self._ctx = ctx
        self._call = model if call is None else call
        self._backward = backward
        self._batch = batch
        self._optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)

    def __call__(self) -> float:
        """Take one step."""
        dist.barrier(self._ctx.process_group)
        begin = time.perf_counter()
        self._backward(self._call(self._batch).float().square().mean())
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._ctx.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin
