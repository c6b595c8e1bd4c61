"""Program `local_hooks`: hooks of the user that change a parameter's local gradient, whenever they were registered."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.chapters.gradients.overflow import WIDTH, Branches, branches_of
from conformance.errors import present
from conformance.models.integers import RankStep, integers, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.scenario import Scenario
from conformance.truth.steps import StepFunction

NUM_STEPS = 4
#: When hooks are registered: before wrapping, after it, behind two steps, or in each step behind its forward.
MOMENTS = ("before", "after", "later", "between")

#: What a hook does: it may return another gradient, change the accumulated one in place, or put another in its place.
KINDS = ("returns", "in_place", "replaces")


def _factors(rank: int, name: str, shape: torch.Size) -> Tensor:
    """Return what a hook multiplies a gradient by: others on every rank, and 0 for one element."""
    factors = integers(*shape, key=("hook", rank, name), largest=2)
    factors.view(-1)[rank % factors.numel()] = 0
    return factors


def _hook(given: Mapping[str, Any], module: Any, rank: int, seen: dict[str, Tensor]) -> list[Any]:
    """Register hooks on parameters of `module`; return the handles. Hooks keep in `seen` what they are given."""
    kind = given["kind"]

    def returns(name: str, gradient: Tensor) -> Tensor:
        seen[name] = gradient.clone()
        return gradient * _factors(rank, name, gradient.shape).to(gradient.device)

    def changes(name: str, parameter: Tensor) -> None:
        before = present(parameter.grad)
        after = returns(name, before)
        parameter.grad = before.copy_(after) if kind == "in_place" else after

    named = list(module.named_parameters())[given.get("of_two", 0) :: 2 if "of_two" in given else 1]
    if kind == "returns":
        return [parameter.register_hook(partial(returns, name)) for name, parameter in named]
    return [parameter.register_post_accumulate_grad_hook(partial(changes, name)) for name, parameter in named]


def _step_of(scenario: Scenario, seen: dict[str, Tensor]) -> StepFunction:
    moment = scenario.arguments["moment"]
    local, branches = scenario.arguments.get("local", 0), scenario.arguments.get("branches", "both")

    def backward(model: Any, turn: RankStep, micro: int, register: Callable[[], list[Any]]) -> None:
        inputs = turn.inputs(2, WIDTH, micro=micro)
        loss = turn.loss(turn.forward(model, inputs, branches_of(branches, turn.rank, turn.step)), micro)
        handles = register() if moment == "between" else []
        turn.backward(loss)
        for handle in handles:
            handle.remove()

    def step(model: Any, turn: RankStep) -> Mapping[str, Any]:
        register = partial(_hook, scenario.arguments, model.module, turn.rank, seen)
        seen.clear()
        if (moment, turn.step) in (("after", 0), ("later", 2)):
            register()
        for micro in range(local):
            with model.no_sync():
                backward(model, turn, micro, register)
        backward(model, turn, local, register)
        return {f"seen/{name}": value for name, value in sorted(seen.items())}

    return step


def _build(scenario: Scenario, rank: int, seen: dict[str, Tensor]) -> nn.Module:
    module = with_integer_weights(Branches(), scenario.seed)
    if scenario.arguments["moment"] == "before":
        _hook(scenario.arguments, module, rank, seen)
    return module


@program("local_hooks", invariants=("same_collectives", "nothing_in_flight"))
def local_hooks(ctx: RankContext) -> None:
    """Train with hooks of argument `kind` (of `KINDS`), registered at `moment` (of `MOMENTS`), on every parameter.

    Arguments `of_two`: only every second parameter has one, from the first (0) or the second (1) on, `local`: backwards
    under no_sync before each synchronised one, `branches`: those that ranks use, `shared`: whether another wrapper of
    the module lives, too. Observes `step<k>/seen/<name>`, what the last call of each hook was given, and
    `step<k>/grad/<name>`. All ranks run it.
    """
    seen: dict[str, Tensor] = {}
    module = _build(ctx.scenario, ctx.rank, seen).to(ctx.device)
    step = _step_of(ctx.scenario, seen)
    wrappers = [ctx.wrap(module) for _ in range(1 + ctx.arguments.get("shared", False))]
    observe_run(ctx, lambda: run_steps(ctx, module, wrappers[0], step, NUM_STEPS))
