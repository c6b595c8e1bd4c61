"""Program `routed_activations`: a module that communicates in its own forward and backward, as sharded embeddings do.

This reproduces pytorch/pytorch#72843. Layers run in the order a, b, c, all-to-all, d; only some ranks run layer b.
Suppose a DDP fills its buckets in another order than that in which gradients become ready. On a rank where b is unused,
and therefore ready at once, it may issue an all-reduce before the backward's all-to-all, and on the others after it:
then an all-reduce meets an all-to-all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.programs.written_steps import observe_run, run_steps
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded
from conformance.truth.replicas import Replicas
from conformance.truth.steps import gradients

NUM_STEPS = 4
ROW = 4


class _Exchange(torch.autograd.Function):
    """Sends row i to rank i, and the gradients the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(grads[0])
        dist.all_to_all_single(returned, grads[0].contiguous(), group=ctx.group)
        return returned, None


class Routed(nn.Module):
    """The layers, each a vector of ROW factors; registered in the order a, c, d, b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d, self.b = (nn.Parameter(torch.empty(ROW)) for _ in range(4))

    def before_exchange(self, rows: Tensor, *, uses_b: bool) -> Tensor:
        """Run layers a, b where it is used, and c."""
        hidden = rows * self.a
        if uses_b:
            hidden = hidden * self.b
        return hidden * self.c

    def after_exchange(self, rows: Tensor) -> Tensor:
        """Run layer d."""
        return rows * self.d

    def forward(self, rows: Tensor, group: dist.ProcessGroup, *, uses_b: bool) -> Tensor:
        """Take and return one row per rank."""
        received: Any = _Exchange.apply(self.before_exchange(rows, uses_b=uses_b), group)
        return self.after_exchange(received)


def _uses_b(scenario: Scenario, rank: int) -> bool:
    return rank in scenario.arguments["ranks_with_b"]


@program("routed_activations", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def routed_activations(ctx: RankContext) -> None:
    """Train steps of `Routed`; argument `ranks_with_b` lists the ranks that use layer b. All ranks run it.

    Observes `step<k>/grad/<name>`.
    """
    module = with_integer_weights(Routed(), ctx.scenario.seed).to(ctx.device)
    uses_b = _uses_b(ctx.scenario, ctx.rank)

    def step(model: nn.Module, turn: RankStep) -> None:
        output = turn.forward(model, turn.inputs(ctx.world_size, ROW), ctx.process_group, uses_b=uses_b)
        turn.backward(turn.loss(output))

    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS))


@routed_activations.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    ranks = range(scenario.world_size)
    modules = [with_integer_weights(Routed(), scenario.seed) for _ in ranks]
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    with single_threaded():
        world = Replicas(modules)
        for index in range(NUM_STEPS):
            for module in modules:
                module.zero_grad(set_to_none=True)
            _backward_of_all(scenario, modules, index)
            world.average_gradients()
            for rank, module in enumerate(modules):
                facts[rank] |= gradients(f"step{index}", module)
    return facts


def _backward_of_all(scenario: Scenario, modules: Sequence[Any], index: int) -> None:
    """Run the step of all ranks as one graph, in which row i of rank j goes to row j of rank i."""
    turns = [RankStep(rank, index) for rank in range(len(modules))]
    sent = [
        module.before_exchange(turn.inputs(len(modules), ROW), uses_b=_uses_b(scenario, turn.rank))
        for module, turn in zip(modules, turns, strict=True)
    ]
    received = [torch.stack([rows[rank] for rows in sent]) for rank in range(len(modules))]
    losses = [
        turn.loss(module.after_exchange(rows)) for module, turn, rows in zip(modules, turns, received, strict=True)
    ]
    torch.stack(losses).sum().backward()
