"""The program of `ddp-conformance bench`: step times of several DDPs, interleaved on the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.fixtures.language import Gpt
from conformance.programs.program import program
from conformance.rank_context import RankContext

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
    optimiser, zero_grad), in an order that turns by one from round to round, so that what disturbs the machine disturbs
    all alike. Times are from a barrier to the end of the step.
    """
    make, inputs = WORKLOADS[str(ctx.arguments["workload"])]
    contestants = []
    for label, subject, options in ctx.arguments["contestants"]:
        torch.manual_seed(0)
        model = ctx.wrap_in(subject, make().to(ctx.device), **options)
        contestants.append((label, model, torch.optim.SGD(model.parameters(), lr=2**-10)))
    batch = inputs(torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
    seconds: dict[str, list[float]] = {label: [] for label, _, _ in contestants}
    for round_index in range(int(ctx.arguments["rounds"])):
        turn = round_index % len(contestants)
        for label, model, optimizer in contestants[turn:] + contestants[:turn]:
            seconds[label].append(_step(ctx, model, optimizer, batch))
    for label, values in seconds.items():
        ctx.observe(label, values)


def _step(ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    dist.barrier(ctx.process_group)
    begin = time.perf_counter()
    model(batch).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if ctx.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin
