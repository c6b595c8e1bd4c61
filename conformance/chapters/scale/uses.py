"""Program `used_often`: features whose fortieth use is to be like the first."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from conformance.chapters.scale.values import whole
from conformance.programs import RankContext, program, rank_step


class _Line(nn.Module):
    """A vector whose gradient is what forward multiplies it by, and a buffer that is different on every rank."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, factors: Tensor) -> Tensor:
        self.seen += factors[0]
        return (self.weight * factors).sum()


@program("used_often", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def used_often(ctx: RankContext) -> None:
    """Use argument `feature` argument `times` times, each time before or within a synchronised step.

    Observes `gradients`, one row for each use, and `seen`, what the buffer held after each. All ranks run it.
    """
    uses = _Uses(ctx)
    for number in range(ctx.arguments["times"]):
        _FEATURES[ctx.arguments["feature"]](uses, number)
    ctx.observe("gradients", torch.stack(uses.gradients))
    ctx.observe("seen", torch.cat(uses.seen))


class _Uses:
    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._module = _Line().to(ctx.device)
        self.model: Any = ctx.wrap(self._module)
        self.gradients: list[Tensor] = []
        self.seen: list[Tensor] = []

    def step(self, *key: int) -> None:
        turn = rank_step(self._ctx, key[0])
        factors = whole(3, self._ctx.scenario.seed, self._ctx.rank, *key).to(self._ctx.device)
        turn.backward(turn.forward(self.model, factors))

    def judged_step(self, *key: int) -> None:
        self.step(*key)
        weight = self._module.weight
        nothing = torch.full((len(weight),), torch.nan, device=self._ctx.device)
        self.gradients.append(nothing if weight.grad is None else weight.grad.clone())
        self.seen.append(self._module.seen.detach().clone())
        self._module.zero_grad(set_to_none=True)

    def local_steps(self, number: int) -> None:
        with self._ctx.no_sync(self.model):
            self.step(number, 1)
        self.judged_step(number)

    def evaluation(self, number: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(whole(3, self._ctx.rank, number).to(self._ctx.device))
        self.model.train()
        self.judged_step(number)

    def with_a_hook(self, number: int) -> None:
        if number == 0:
            self.model.register_comm_hook(self._ctx.process_group, default_hooks.allreduce_hook)
        self.judged_step(number)

    def joined(self, number: int) -> None:
        """Let rank 0 run out of data one step before the others; what it is left with then is not compared."""
        with self.model.join():
            self.judged_step(number)
            if self._ctx.rank:
                self.judged_step(number, 1)
        self._module.zero_grad(set_to_none=True)

    def in_its_group_again(self, number: int) -> None:
        self.model._update_process_group(self._ctx.process_group)
        self.judged_step(number)

    def wrapped_again(self, number: int) -> None:
        self.model = self._ctx.wrap(self._module)
        self.judged_step(number)


_FEATURES: Mapping[str, Callable[[_Uses, int], None]] = {
    "comm_hook": _Uses.with_a_hook,
    "no_sync": _Uses.local_steps,
    "evaluation": _Uses.evaluation,
    "join": _Uses.joined,
    "update_process_group": _Uses.in_its_group_again,
    "wrap": _Uses.wrapped_again,
}
