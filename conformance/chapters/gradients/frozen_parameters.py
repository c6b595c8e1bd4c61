"""Program `frozen_parameters`: freezing and unfreezing parameters after wrapping."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

WIDTH = 4
#: When the step freezes: before its forward, or between forward and backward, when its graph is there.
MOMENTS = ("forward", "backward")


class Chain(nn.Module):
    """Three layers, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.three = nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.three(self.two(self.one(inputs)))
        return hidden


def _thaw(model: Any, frozen: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        if not name.startswith(tuple(frozen)):
            parameter.requires_grad_(True)


def _freeze(model: Any, frozen: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(frozen)):
            parameter.requires_grad_(False)


def _step_of(scenario: Scenario) -> Callable[[Any, RankStep], None]:
    plan: Sequence[Sequence[Sequence[str]]] = scenario.arguments["frozen"]
    moment, keeps = scenario.arguments["moment"], scenario.arguments.get("keeps", False)
    before: dict[str, Tensor | None] = {}

    def step(model: Any, turn: RankStep) -> None:
        frozen = plan[turn.step][turn.rank]
        for name, parameter in model.module.named_parameters() if keeps else ():
            parameter.grad = before.get(name) if name.startswith(tuple(frozen)) else None
        _thaw(model.module, frozen)
        if moment == "forward":
            _freeze(model.module, frozen)
        loss = turn.loss(turn.forward(model, turn.inputs(3, WIDTH).requires_grad_()))
        if moment == "backward":
            _freeze(model.module, frozen)
        turn.backward(loss)
        before.update((name, parameter.grad) for name, parameter in model.module.named_parameters())

    return step


@program("frozen_parameters", invariants=("leaves_no_trace",))
def frozen_parameters(ctx: RankContext) -> None:
    """Train; in step k rank r has the parameters `frozen[k][r]` frozen; a DDP may refuse. All ranks run it.

    With `keeps` what is frozen keeps the gradient of the step before.
    Observes `outcome`: `step<k>/grad/<name>` of all steps, or the exception that was raised.
    """
    module = with_integer_weights(Chain(), ctx.scenario.seed).to(ctx.device)
    num_steps = len(ctx.arguments["frozen"])
    step = _step_of(ctx.scenario)
    refusal = Raises(("RuntimeError",), ("requires_grad is now False", "two."))
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, num_steps), refusal=refusal)
