"""Program `changed_outputs`: what forward returns is no longer the tensor that it returned when its backward runs."""

from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, program, rank_step

_WIDTH = 4
_NUM_STEPS = 3
#: How the module makes its output of what its layer gives; the loop changes it in place, or calls the wrapper by vmap.
OUTPUTS = ("view", "transposed", "vmap")
#: What runs backward: the synchronised forward alone, one loss over a local one as well, or the local one first.
BACKWARDS = ("alone", "together", "local_first")


@program("changed_outputs", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def changed_outputs(ctx: RankContext) -> None:
    """Train three steps, each with a forward under `no_sync` and a synchronised one, as the arguments say.

    Arguments: `output`, of `OUTPUTS`; `backward`, of `BACKWARDS`. Observes `step<k>/grad/<name>`, and after a local
    backward of its own `step<k>/local/grad/<name>`. All ranks run it.
    """
    output, order = str(ctx.arguments["output"]), ctx.arguments["backward"]
    module = with_integer_weights(_Returns(output), ctx.scenario.seed).to(ctx.device)
    model = ctx.wrap(module)
    for index in range(_NUM_STEPS):
        module.zero_grad(set_to_none=True)
        turn = rank_step(ctx, index)
        losses = []
        if order != "alone":
            with ctx.no_sync(model):
                losses.append(_loss(model, turn, 0, output))
        losses.append(_loss(model, turn, 1, output))
        if order == "local_first":
            turn.backward(losses.pop(0))
            ctx.observe_gradients(f"step{index}/local", module)
        turn.backward(sum(losses[1:], start=losses[0]))
        ctx.observe_gradients(f"step{index}", module)


class _Returns(nn.Module):
    """A layer, the output of which is returned as it is, or as a view of it."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.output = output

    def forward(self, rows: Tensor) -> Tensor:
        given: Tensor = self.layer(rows)
        if self.output == "vmap":
            return given
        return given.T if self.output == "transposed" else given.view(-1)


def _loss(model: Any, turn: RankStep, micro: int, output: str) -> Tensor:
    rows = turn.inputs(3, _WIDTH, micro=micro)
    if output == "vmap":
        return turn.loss(torch.vmap(lambda row: turn.forward(model, row))(rows), micro=micro)
    return turn.loss(turn.forward(model, rows).mul_(2), micro=micro)
