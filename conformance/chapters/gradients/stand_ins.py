"""Program `stand_ins`: tensors stand in for the wrapped module's parameters for one call, by `functional_call`."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Raised
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies

WIDTH = 4


def _module(scenario: Scenario) -> nn.Module:
    return with_integer_weights(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), scenario.seed)


def _call(model: Any, turn: RankStep, change: Callable[[Tensor], Tensor], only: str = "") -> tuple[Tensor, Any]:
    tensors = {name: change(each) for name, each in model.named_parameters() if name.endswith(only)}
    inputs = turn.inputs(3, WIDTH, micro=1).requires_grad_()
    return turn.loss(functional_call(model, tensors, (inputs,)), micro=1), tensors


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().clone().requires_grad_()


def _leaves(model: Any, turn: RankStep) -> None:
    loss, tensors = _call(model, turn, _copy)
    torch.autograd.grad(loss, list(tensors.values()))


def _leaves_backward(model: Any, turn: RankStep) -> None:
    turn.backward(_call(model, turn, _copy)[0])


def _one_leaf(model: Any, turn: RankStep) -> None:
    turn.backward(_call(model, turn, _copy, only="0.weight")[0])


def _computed(model: Any, turn: RankStep) -> None:
    turn.backward(_call(model, turn, lambda parameter: 2 * parameter)[0])


def _adapted(model: Any, turn: RankStep) -> None:
    """Step on one batch and learn from another, as meta-learning does; the inner gradient is each rank's own."""
    inner = turn.inputs(2, WIDTH, micro=2).abs().sum() / 4
    turn.backward(_call(model, turn, lambda parameter: parameter - inner)[0])


def _frozen(model: Any, turn: RankStep) -> None:
    _call(model, turn, lambda parameter: parameter.detach().clone())


#: How the tensors are made and used, and whether they keep gradients to themselves.
USES: Mapping[str, tuple[Callable[[Any, RankStep], None], bool]] = {
    "leaves": (_leaves, True),
    "leaves_backward": (_leaves_backward, True),
    "one_leaf": (_one_leaf, True),
    "computed": (_computed, False),
    "adapted": (_adapted, False),
    "frozen": (_frozen, False),
}


def _step_of(scenario: Scenario) -> Callable[[Any, RankStep], None]:
    use = USES[scenario.arguments["use"]][0]

    def step(model: Any, turn: RankStep) -> None:
        if turn.step != 1:
            turn.backward(turn.loss(turn.forward(model, turn.inputs(3, WIDTH))))
        else:
            use(model, turn)

    return step


@program("stand_ins", invariants=("leaves_no_trace",))
def stand_ins(ctx: RankContext) -> None:
    """Train a step, make the call that argument `use` names, and train another step. All ranks run it.

    Observes `answers`, the texts of the warnings of DDP, and `step<k>/grad/<name>` of the parameters in all steps.
    """
    module = _module(ctx.scenario).to(ctx.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), _step_of(ctx.scenario), 3))
    once = Satisfies("one warning, which names '0.weight' and says 'local'", _is_one_warning)
    warned = [str(each.message) for each in caught if "functional_call" in str(each.message)]
    ctx.observe("answers", warned, must=once if USES[ctx.arguments["use"]][1] else [])


def _is_one_warning(got: Any) -> bool:
    texts = [item.message if isinstance(item, Raised) else item for item in got]
    return len(texts) == 1 and "0.weight" in texts[0] and "local" in texts[0]
