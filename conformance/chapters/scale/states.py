"""Program `state_at_scale`: many and large parameters and buffers of all dtypes, copied from rank 0."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.chapters.scale.trainings import clause, first_difference, note, shortened
from conformance.chapters.scale.values import arbitrary, bits, with_nan
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario

#: Of buffers, in turns; of parameters the first four.
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip


class State(nn.Module):
    """A layer, and parameters and buffers, of which the arguments say how many there are, how long, and of what dtypes.

    Each forward notes in `wrong` which buffers do not hold what rank 0 wrote in the last one; then writes its own.
    """

    def __init__(self, arguments: Mapping[str, Any], rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.arguments = arguments
        self.rank = rank
        self.num_forwards = 0
        self.wrong: list[str] = []
        for index, (name, value) in enumerate(self.values("parameter", rank, "start")):
            trains = value.dtype.itemsize > 1 and value.is_floating_point() and index % 2 == 0
            self.register_parameter(name, nn.Parameter(value, requires_grad=trains))
        for name, value in self.values("buffer", rank, "start"):
            self.register_buffer(name, value)

    def values(self, kind: str, rank: int, moment: object) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of all that is of `kind`, as `rank` writes it at `moment`: one by one, being large."""
        dtypes = self.arguments.get("dtypes", DTYPES if kind == "buffer" else DTYPES[:4])
        lengths = [length for number, length in self.arguments.get(f"{kind}s", ()) for _ in range(number)]
        for index, length in enumerate(lengths):
            value = arbitrary(length, getattr(torch, dtypes[index % len(dtypes)]), index, rank, moment)
            yield f"{kind}{index}", with_nan(value, 1 + rank)

    def compare(self, kind: str, moment: object) -> None:
        for name, value in self.values(kind, 0, moment):
            got = getattr(self, name)
            if found := first_difference(bits(value), bits(got)):
                found = first_difference(value, got) or found
                instead = partial(self._instead, name, value, moment)
                note(self.wrong, f"{name} in forward {self.num_forwards} {found}", instead)

    def _instead(self, name: str, expected: Tensor, moment: object) -> str:
        kind = name.rstrip("0123456789")
        own = {0: expected, self.rank: dict(self.values(kind, self.rank, moment))[name]}
        return clause(kind, expected, getattr(self, name), self.rank, own)

    def forward(self, inputs: Tensor) -> Tensor:
        self.compare("buffer", self.num_forwards - 1 if self.num_forwards else "start")
        for name, value in self.values("buffer", self.rank, self.num_forwards):
            getattr(self, name).copy_(value)
        self.num_forwards += 1
        return self.weight * inputs


@program("state_at_scale", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def state_at_scale(ctx: RankContext) -> None:
    """Wrap `State`, with arguments `parameters` and `buffers`, pairs of a number and a length; take `steps` steps.

    Observes `wrong`: which tensors did not hold what rank 0 wrote: after construction if `steps` is 0, otherwise in
    each forward. The rank computes those values itself, which are too many to be sent. All ranks run it.
    """
    module = State(ctx.arguments, ctx.rank).to(ctx.device)
    model = ctx.wrap(module)
    if not ctx.arguments["steps"]:
        module.compare("parameter", "start")
        module.compare("buffer", "start")
    for step in range(ctx.arguments["steps"]):
        module.zero_grad(set_to_none=True)
        turn = rank_step(ctx, step)
        turn.backward(turn.loss(turn.forward(model, turn.inputs(3))))
    ctx.observe("wrong", shortened(module.wrong))


@state_at_scale.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    nothing: dict[str, Any] = {"wrong": []}
    return dict.fromkeys(range(scenario.world_size), nothing)
