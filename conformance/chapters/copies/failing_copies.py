"""Program `failing_copies`: two copies of a wrapper, one after the other, of which the first breaks off a backward."""

import contextlib
import copy
import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.composed.modules import DeliberateError
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.programs.operations.store_messages import Board
from conformance.scenario import Scenario


class _Failing(nn.Module):
    """Two layers; a backward raises behind the last of them, or before it reaches any."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.last = nn.Linear(2, 2, bias=False)
        for layer in (self.first, self.last):
            nn.init.ones_(layer.weight)

    def forward(self, inputs: Tensor, fails: str = "") -> Tensor:
        hidden: Tensor = self.first(inputs)
        if fails == "behind":
            hidden.register_hook(_raise)
        outputs: Tensor = self.last(hidden)
        if fails == "before":
            outputs.register_hook(_raise)
        return outputs * 1


def _raise(_: Tensor) -> None:
    raise DeliberateError("in backward")


@program("failing_copies", invariants=("leaves_no_trace",))
def failing_copies(ctx: RankContext) -> None:
    """Break off the backward of a copy and drop it; then that of another copy, before any gradient has arrived.

    The other ranks do so when rank 0 has gone on to its next forward. Observes `raised`, what that forward raises, and
    `gradient`, what its backward gives. All ranks run it.
    """
    inputs = torch.full((1, 3), 1.0 + ctx.rank, device=ctx.device)
    model: Any = ctx.wrap(_Failing().to(ctx.device))
    first = copy.deepcopy(model)
    first(inputs).sum().backward()  # learns in which order gradients arrive, and has a bucket for each then
    _break_off(first, inputs, "behind")
    del first
    gc.collect()
    second = copy.deepcopy(model)
    board = Board("failing_copies")
    if ctx.rank:
        board.read("0")
    _break_off(second, inputs, "before")
    with ctx.catching("raised"):
        outputs = second(inputs)
    board.put(str(ctx.rank), "raised" if ctx.facts["raised"] else "goes on")
    if all(board.read(str(rank)) == "goes on" for rank in range(ctx.world_size)):
        outputs.sum().backward()
        ctx.observe("gradient", second.module.first.weight.grad)


def _break_off(model: Any, inputs: Tensor, fails: str) -> None:
    with contextlib.suppress(DeliberateError):
        model(inputs, fails=fails).sum().backward()


@failing_copies.expects
def _as_if_alone(scenario: Scenario) -> Mapping[int, Facts]:
    mean = sum(1.0 + rank for rank in range(scenario.world_size)) / scenario.world_size
    gradient = torch.full((2, 3), 2 * mean)
    return {rank: {"raised": None, "gradient": gradient} for rank in range(scenario.world_size)}
