"""Program `idle_ranks`: in some steps, some ranks' forward uses no parameter at all.

Such a rank still has to contribute zeros to the mean, in that step and not in its next one, and to end the step with
the others' gradients, although nothing in the outputs of its forward leads to a parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, integers, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.scenario import Scenario
from conformance.truth.tensors import a_copy, tensors_in

WIDTH = 4


@dataclass(frozen=True)
class Answer:
    """An output that is a dataclass."""

    hidden: Tensor
    name: str


class Layers(nn.Module):
    """Two layers that forward runs unless it is `idle`, and a head that it leaves to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor, *, idle: bool = False, returns: str = "doubled") -> Any:
        if not idle:
            hidden = self.two(self.one(inputs))
        elif returns == "itself":
            hidden = inputs
        elif returns == "no_grad":
            with torch.no_grad():
                hidden = self.two(self.one(inputs))
        else:
            hidden = 2 * inputs
        shapes: Mapping[str, Callable[[], Any]] = {
            "tuple": lambda: (hidden, None),
            "dict": lambda: {"deep": [{"hidden": hidden}], "rows": len(hidden)},
            "dataclass": lambda: Answer(hidden, "rows"),
            "complex": lambda: hidden.to(torch.complex64) * (1 + 1j),
            "counted": lambda: (hidden, torch.arange(len(hidden), device=hidden.device), hidden > 0),
        }
        return shapes[returns]() if returns in shapes else hidden


def _inputs(turn: RankStep, micro: int = 0) -> Tensor:
    """Return rows that begin with a zero whose sign an idle rank's output keeps."""
    inputs = turn.inputs(3, WIDTH, micro=micro)
    inputs[0, 0] = -0.0
    return inputs


def _learnt_input(turn: RankStep, micro: int = 0) -> Tensor:
    return _inputs(turn, micro).requires_grad_()


def _outer_head(turn: RankStep, hidden: Tensor) -> Tensor:
    """Return a loss behind a layer that does not belong to the wrapped module, and trains as well."""
    weight = integers(WIDTH, 2, key=("outer", turn.step, 0)).to(hidden.device).requires_grad_()
    return turn.loss(hidden @ weight)


def _forward(model: Any, turn: RankStep, inputs: Tensor, *, idle: bool, returns: str = "doubled") -> Any:
    return turn.forward(model, inputs, idle=idle, returns=returns)


def _learnt(model: Any, turn: RankStep, idle: bool, returns: str = "doubled") -> None:
    turn.backward(turn.loss(_forward(model, turn, _learnt_input(turn), idle=idle, returns=returns)))


def _outer(model: Any, turn: RankStep, idle: bool, returns: str = "doubled") -> None:
    turn.backward(_outer_head(turn, _forward(model, turn, _inputs(turn), idle=idle, returns=returns)))


def _own_head(model: Any, turn: RankStep, idle: bool) -> None:
    turn.backward(turn.loss(model.module.head(_forward(model, turn, _inputs(turn), idle=idle))))


def _as(returns: str) -> Callable[[Any, RankStep, bool], None]:
    def use(model: Any, turn: RankStep, idle: bool) -> None:
        output = _forward(model, turn, _inputs(turn), idle=idle, returns=returns)
        if returns == "dict":
            hidden = output["deep"][0]["hidden"]
        else:
            hidden = output.hidden if returns == "dataclass" else output[0]
        turn.backward(_outer_head(turn, hidden))

    return use


def _complex(model: Any, turn: RankStep, idle: bool) -> None:
    turn.backward(turn.loss(_forward(model, turn, _inputs(turn), idle=idle, returns="complex")))


def _in_place(model: Any, turn: RankStep, idle: bool) -> None:
    hidden = _forward(model, turn, _inputs(turn), idle=idle)
    hidden += 1
    turn.backward(_outer_head(turn, hidden))


def _two_forwards(model: Any, turn: RankStep, idle: bool, second_too: bool = False) -> None:
    first = _forward(model, turn, _learnt_input(turn), idle=idle)
    second = _forward(model, turn, _learnt_input(turn, micro=1), idle=idle and second_too)
    turn.backward(turn.loss(first) + turn.loss(second, micro=1))


def _two_backwards(model: Any, turn: RankStep, idle: bool) -> None:
    loss = turn.loss(_forward(model, turn, _learnt_input(turn), idle=idle))
    turn.backward(loss)
    turn.backward(turn.loss(_forward(model, turn, _learnt_input(turn, micro=1), idle=not idle), micro=1))


def _twice(model: Any, turn: RankStep, idle: bool) -> None:
    loss = turn.loss(_forward(model, turn, _learnt_input(turn), idle=idle))
    turn.backward(loss, retain_graph=True)
    turn.backward(loss)


def _gradient_first(model: Any, turn: RankStep, idle: bool) -> None:
    inputs = _learnt_input(turn)
    loss = turn.loss(_forward(model, turn, inputs, idle=idle))
    torch.autograd.grad(loss, inputs, retain_graph=True)
    turn.backward(loss)


def _probed(model: Any, turn: RankStep, idle: bool) -> None:
    """Ask for the gradient of inputs alone, when what the first step used first is unused."""
    if turn.step == 0:
        _own_head(model, turn, idle)
        return
    inputs = _learnt_input(turn)
    torch.autograd.grad(turn.loss(_forward(model, turn, inputs, idle=idle)), inputs)
    turn.backward(turn.loss(_forward(model, turn, _learnt_input(turn, micro=1), idle=idle)))


def _accumulated(model: Any, turn: RankStep, idle: bool) -> None:
    with model.no_sync():
        turn.backward(turn.loss(_forward(model, turn, _learnt_input(turn, micro=1), idle=not idle), micro=1))
    turn.backward(turn.loss(_forward(model, turn, _learnt_input(turn), idle=idle)))


USES: Mapping[str, Callable[[Any, RankStep, bool], None]] = {
    "learnt_input": _learnt,
    "input_itself": partial(_learnt, returns="itself"),
    "outer_head": _outer,
    "no_grad": partial(_outer, returns="no_grad"),
    "own_head": _own_head,
    "tuple": _as("tuple"),
    "dict": _as("dict"),
    "dataclass": _as("dataclass"),
    "complex": _complex,
    "counted": _as("counted"),
    "in_place": _in_place,
    "two_forwards": _two_forwards,
    "two_idle_forwards": partial(_two_forwards, second_too=True),
    "two_backwards": _two_backwards,
    "twice": _twice,
    "gradient_first": _gradient_first,
    "probed": _probed,
    "accumulated": _accumulated,
}


def _step_of(scenario: Scenario) -> Callable[[Any, RankStep], Mapping[str, Any]]:
    use, plan = USES[scenario.arguments["use"]], scenario.arguments["idle"]

    def step(model: Any, turn: RankStep) -> Mapping[str, Any]:
        returned: list[Tensor] = []
        noting = model.register_forward_hook(lambda *called: returned.extend(map(a_copy, tensors_in(called[-1]))))
        use(model, turn, turn.rank in plan[turn.step])
        noting.remove()
        return {"returned": returned}

    return step


@program("idle_ranks", invariants=("leaves_no_trace",), speaks_for={"step*/returned": ("CONS-21",)})
def idle_ranks(ctx: RankContext) -> None:
    """Train; in step k the ranks in `idle[k]` use no parameter, in the way that argument `use` names. All ranks run it.

    Observes `step<k>/grad/<name>` and `step<k>/returned`, the tensors that forwards returned.
    """
    module = with_integer_weights(Layers(), ctx.scenario.seed).to(ctx.device)
    plan: Sequence[Any] = ctx.arguments["idle"]
    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), _step_of(ctx.scenario), len(plan)))
