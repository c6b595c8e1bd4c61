"""Program `shared_outputs`: a loop changes an output of forward in place whose memory something else has as well.

What shares the memory shows the change, and its gradient comes by way of it: for autograd they are one tensor. A DDP
that returns a copy, or a tensor of the same memory with a graph of its own, gives other gradients than the module.
"""

from typing import Any

import torch
from torch import Tensor, nn

from conformance.chapters.gradients.layer_below import WIDTH, total_loss, with_layer_below
from conformance.programs import RankContext, observe_run, program, rank_step
from conformance.truth.steps import gradients

NUM_STEPS = 3
#: What has the memory of the output that is changed, or what that output is a view of.
SHARED = ("input", "view_of_input", "pair", "views", "kept", "kept_view", "view_of_kept")
#: Which ranks use none of the module's parameters: none, rank 0, or the ranks by turns.
IDLE = ("none", "rank_0", "by_turns")


class Sharing(nn.Module):
    """Returns an output to be changed, and another one."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self._shared = shared
        self.kept = torch.zeros(())  # no buffer: what the last forward has kept

    def forward(self, inputs: Tensor, data: Tensor, uses: bool) -> tuple[Tensor, Tensor]:
        """Return two tensors of the size of `inputs`; the second is made of them, and of `data` if this rank `uses` it.

        Nothing that autograd has saved is changed when the first is.
        """
        made = inputs + self.inner(data) if uses else inputs * 2
        match self._shared:
            case "input":
                return inputs, made
            case "view_of_input":
                return inputs.view(-1), made
            case "pair":
                return made, made.view(-1)
            case "views":
                return made.view(-1), made.t()
        self.kept = made.view(-1) if self._shared == "kept_view" else made
        return (made.view(-1) if self._shared == "view_of_kept" else made), made * 2


@program("shared_outputs", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def shared_outputs(ctx: RankContext) -> None:
    """Train a layer, and `Sharing` on top of it; observe `step<k>/grad/<name>`. All ranks run it.

    Arguments: `shared`, of `SHARED`; `idle`, of `IDLE`; `beside`: the layer below has a wrapper of its own.
    """
    observe_run(ctx, lambda: _train(ctx))


def _train(ctx: RankContext) -> dict[str, Any]:
    shared, idle = ctx.arguments["shared"], ctx.arguments["idle"]
    sharing = Sharing(shared)
    pair, below, above = with_layer_below(ctx, sharing)
    facts: dict[str, Any] = {}
    for index in range(NUM_STEPS):
        pair.zero_grad(set_to_none=True)
        turn = rank_step(ctx, index)
        hidden = turn.forward(below, turn.inputs(WIDTH, WIDTH))
        uses = {"none": True, "rank_0": ctx.rank != 0, "by_turns": ctx.rank != index % ctx.scenario.world_size}[idle]
        first, second = turn.forward(above, hidden, turn.inputs(WIDTH, WIDTH, micro=1), uses)
        first.mul_(3)
        turn.backward(total_loss(turn, first, second, hidden if "input" in shared else sharing.kept))
        facts |= gradients(f"step{index}", pair)
    return facts
