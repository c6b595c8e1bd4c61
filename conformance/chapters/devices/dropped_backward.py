"""Program `dropped_backward`: a forward begins while threads of autograd have not dropped a backward that raised.

They drop it a moment after its caller has caught the exception. Here the moment lasts until the other ranks
have begun their next forward.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.models.bomb import Bomb
from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded
from conformance.truth.expected import AnyOf, Raises
from conformance.truth.replicas import Replicas
from conformance.truth.steps import gradients

_WIDTH = 3


class _SlowBomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, before: Callable[[], None]) -> Tensor:
        ctx.before = before
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.before()
        raise ArithmeticError("the slow bomb in backward went off")


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.between: Callable[[Tensor], Tensor] = torch.clone
        self.behind: Callable[[Tensor], Tensor] = torch.clone

    def forward(self, inputs: Tensor) -> Tensor:
        return self.behind(self.last(self.between(self.first(inputs))))


def _inputs(rank: int) -> Tensor:
    return torch.full((2, _WIDTH), rank + 1.0)


@program("dropped_backward", invariants=("leaves_no_trace",))
def dropped_backward(ctx: RankContext) -> None:
    """Run a backward that raises, on rank 0 before its first gradient and elsewhere after it, then a step.

    On rank 0 the step's forward begins while the backward, in a thread of its own, has not raised yet; it raises when
    the other ranks' forward is over. Observes `outcome`: the gradients of the step, or the exception that ended it. All
    ranks run it.
    """
    layers = _Layers()
    module = with_integer_weights(layers, ctx.scenario.seed).to(ctx.device)
    model = ctx.wrap(module)
    inputs = _inputs(ctx.rank).to(ctx.device)
    begun = threading.Event()

    def meet() -> None:
        begun.set()
        dist.barrier(group=ctx.process_group)

    def fail() -> None:
        try:
            output.sum().backward()
        except ArithmeticError:
            return
        raise RuntimeError("the backward did not raise")

    def step() -> dict[str, Any]:
        module.zero_grad()
        try:
            output = model(inputs)
        finally:
            if ctx.rank != 0:
                meet()
        ctx.backward(output.sum(), 1)
        return gradients("step1", module)

    if ctx.rank == 0:
        layers.behind = lambda output: _SlowBomb.apply(output, meet)
        output = model(inputs)
        layers.behind = torch.clone
        thread = threading.Thread(target=fail)
        thread.start()
        begun.wait()
        observe_run(ctx, step, may_refuse=True)
        thread.join()
    else:
        layers.between = Bomb.apply
        output = model(inputs)
        layers.between = torch.clone
        fail()
        observe_run(ctx, step, may_refuse=True)


@dropped_backward.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    modules = [with_integer_weights(_Layers(), scenario.seed) for _ in range(scenario.world_size)]
    with single_threaded():
        world = Replicas(modules, broadcast_buffers=False)
        world.before_forward()
        for rank, module in enumerate(modules):
            module(_inputs(rank)).sum().backward()
        world.after_forward(synchronised=True)
    refused = Raises(("RuntimeError",), ("backward",))
    return {rank: {"outcome": AnyOf(gradients("step1", module), refused)} for rank, module in enumerate(modules)}
