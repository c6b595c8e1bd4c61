"""Program `routed_activations`: a module that communicates in its own forward and backward, as sharded embeddings do.

This reproduces pytorch/pytorch#72843. Layers run in the order a, b, c, all-to-all, d; only some ranks run layer b.
Suppose a DDP fills its buckets in another order than that in which gradients become ready. On a rank where b is unused,
and therefore ready at once, it may issue an all-reduce before the backward's all-to-all, and on the others after it:
then an all-reduce meets an all-to-all.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps

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

    def forward(self, rows: Tensor, group: dist.ProcessGroup, *, uses_b: bool) -> Tensor:
        hidden = rows * self.a
        if uses_b:
            hidden = hidden * self.b
        received: Tensor = _Exchange.apply(hidden * self.c, group)
        return received * self.d


@program("routed_activations", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def routed_activations(ctx: RankContext) -> None:
    """Train steps of `Routed`; argument `ranks_with_b` lists the ranks that use layer b. All ranks run it.

    Observes `step<k>/grad/<name>`.
    """
    module = with_integer_weights(Routed(), ctx.scenario.seed).to(ctx.device)
    uses_b = ctx.rank in ctx.arguments["ranks_with_b"]

    def step(model: nn.Module, turn: RankStep) -> None:
        output = turn.forward(model, turn.inputs(ctx.world_size, ROW), ctx.process_group, uses_b=uses_b)
        turn.backward(turn.loss(output))

    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS))
