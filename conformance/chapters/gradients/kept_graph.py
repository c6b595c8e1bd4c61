"""Program `kept_graph`: forward returns, beside its output, a tensor of a graph that outlives it, as of a memory."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import with_integer_weights
from conformance.programs import RankContext, program, rank_step
from conformance.programs.python_calls import num_calls

#: After these forwards the graph that was there before them is run backward alone.
COUNTED = (1, 9)


class _WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(inputs), table


@program("kept_graph")
def kept_graph(ctx: RankContext) -> None:
    """Observe how many calls of Python a backward of the kept graph makes more after many forwards than after one.

    With argument `local` these run under `no_sync`. All ranks run it.
    """
    module = with_integer_weights(_WithTable(), ctx.scenario.seed).to(ctx.device)
    table = 2 * torch.ones(2, device=ctx.device, requires_grad=True)
    model: Any = ctx.wrap(module)
    calls = []
    for index in range(COUNTED[-1] + 1):
        turn = rank_step(ctx, index)
        with model.no_sync() if ctx.arguments.get("local") else contextlib.nullcontext():
            output, same = turn.forward(model, turn.inputs(4, 3), table)
            turn.backward(turn.loss(output))
        for name, parameter in module.named_parameters():
            ctx.observe(f"grad/{index}/{name}", parameter.grad)
        ctx.observe(f"same_table/{index}", same is table)
        if index in COUNTED:
            calls.append(num_calls(lambda: table.sum().backward(retain_graph=True)))
    ctx.observe("more_calls", calls[1] - calls[0], must=0)  # the plain DDP registers each time
