"""Program `shared_memory`: autograd gives several large parameters one gradient, which is one piece of memory."""

import torch
from torch import Tensor, nn

from conformance.models.integers import with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps, step_on

NUM_STEPS = 3
#: So large that it may pay for a DDP to reduce a gradient where it is.
WIDTH = 182
_step = step_on(WIDTH * WIDTH)


class Summed(nn.Module):
    """Adds its parameters through views of them: autograd hands each a view of the gradient of the sum.

    `scaled` is added first, so that its gradient is the last to be computed, from the memory that the others share: a
    gradient that was reduced where it is has changed that memory by then, however fast the reduction was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.first = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.third = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        total = self.scaled.view(-1) * inputs + self.first.view(-1) + self.second.view(-1) + self.third.view(-1)
        return (total * inputs).view(WIDTH, WIDTH)


@program("shared_memory", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def shared_memory(ctx: RankContext) -> None:
    """Train steps of `Summed`; observe `step<k>/grad/<name>`. All ranks run it."""
    module = with_integer_weights(Summed(), ctx.scenario.seed).to(ctx.device)
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), _step, NUM_STEPS))
