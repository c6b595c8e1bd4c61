"""Programs about parameters that get no gradient: on some ranks or on all, always or in some steps."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import with_integer_weights
from conformance.observation import Raised, Unmeasured
from conformance.programs import RankContext, observing_warnings, program, rank_step
from conformance.programs.gradient_traffic import elements_of, other_means
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Satisfies
from conformance.truth.steps import gradients

BRANCHES = "abcd"
_OPTION = "find_unused_parameters"


class Switched(nn.Module):
    """Four linear branches of different sizes; arguments of forward select the branches and how it uses them.

    The output is linear in every parameter, so that gradients stay integers whatever an optimiser does.
    """

    def __init__(self) -> None:
        super().__init__()
        for position, name in enumerate(BRANCHES):
            self.add_module(name, nn.Linear(3, 2 + position))

    def forward(self, inputs: Tensor, uses: Sequence[str]) -> list[Tensor]:
        """Return one scalar per branch in `uses`: `a`, or `a!` through detach, or `a?` computed under no_grad."""
        outputs = []
        for use in uses:
            branch = self.get_submodule(use[0])
            if use.endswith("?"):
                with torch.no_grad():
                    outputs.append(branch(inputs).sum())
            elif use.endswith("!"):
                outputs.append(branch(inputs).sum().detach())
            else:
                outputs.append(branch(inputs).sum())
        return outputs


#: How long ranks wait for one that misses a gradient which they have.
_TIMEOUT = timedelta(seconds=3)


def _uses(scenario: Scenario, rank: int) -> list[list[str]]:
    """Return for each step what the rank uses: argument `uses` holds for each step a text per rank, taken in turn."""
    return [step[rank % len(step)].split() for step in scenario.arguments["uses"]]


def _build(scenario: Scenario) -> nn.Module:
    return with_integer_weights(Switched(), scenario.seed)


@program(
    "unused_parameters",
    invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"),
    speaks_for={"warnings": ("GRAD-07",)},
)
def unused_parameters(ctx: RankContext) -> None:
    """Run a step per entry of argument `uses`; `zero_grad` is "none", "zeros" or "keep".

    With argument `optimizer` SGD with momentum and weight decay follows each step. Observes `step<k>/grad/<name>`,
    `step<k>/parameter/<name>` and, with argument `saves_traffic` and from step 2 on, when buckets hold used parameters
    only, `step<k>/num_elements`: how many were all-reduced as gradients (else `Unmeasured`). With `quiet` it observes
    `warnings`, too: a DDP may warn of a search that finds nothing, so no step may use every parameter. All ranks run
    it.
    """
    with observing_warnings(ctx) if ctx.arguments.get("quiet") else nullcontext():
        _train(ctx)


def _train(ctx: RankContext) -> None:
    num_elements = sum(parameter.numel() for parameter in Switched().parameters())
    fewer = Satisfies(f"more than 0 and fewer than {num_elements} elements", _is_some_of, (num_elements,))
    module = _build(ctx.scenario).to(ctx.device)
    model = ctx.wrap(module)
    optimizer = None
    if ctx.arguments.get("optimizer"):  # powers of two: a fused multiply-add rounds like two operations
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25, momentum=0.5, weight_decay=0.125)
    zero_grad = ctx.arguments.get("zero_grad", "none")
    for index, uses in enumerate(_uses(ctx.scenario, ctx.rank)):
        if zero_grad != "keep":
            module.zero_grad(set_to_none=zero_grad == "none")
        before = len(ctx.collectives())
        turn = rank_step(ctx, index)
        turn.backward(turn.loss(torch.stack(turn.forward(model, turn.inputs(4, 3), uses))))
        issued = ctx.collectives()[before:]
        means = other_means(issued, ctx.world_size)
        if ctx.arguments.get("saves_traffic") and index >= 2:
            sent = Unmeasured(means) if means else sum(elements_of(issued).values())
            ctx.observe(f"step{index}/num_elements", sent, must=fewer)
        ctx.observe_gradients(f"step{index}", module)
        if optimizer is not None:
            with ctx.phase("optimizer", index):
                optimizer.step()
        ctx.observe_parameters(f"step{index}", module)


def _is_some_of(got: int, num_elements: int) -> bool:
    return 0 < got < num_elements


@program("forgotten_parameter", invariants=("leaves_no_trace",))
def forgotten_parameter(ctx: RankContext) -> None:
    """Train two steps in which branch c gets no gradient, without `find_unused_parameters`.

    Argument `uses` selects the branches of forward, a text or one for each rank, taken in turn: ranks that miss none
    wait in vain, in a group that gives up after `_TIMEOUT`. With `partial_loss` the last output is not in the loss.
    Observes `answer`, the exception that the DDP raises, and `advises`, whether that mentions the option if the
    subject has it. A DDP without the option may always find unused parameters: if it raises nothing, `answer` is
    the gradients of the last step. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    given = ctx.arguments["uses"]
    by_rank = not isinstance(given, str)
    uses = (given[ctx.rank % len(given)] if by_rank else given).split()
    own_group = ctx.group_with_timeout(_TIMEOUT) if by_rank else nullcontext(ctx.process_group)
    with own_group as group:
        model = ctx.wrap(module, process_group=group)
        with ctx.catching("raised"):
            for index in range(2):
                module.zero_grad()
                turn = rank_step(ctx, index)
                outputs = turn.forward(model, turn.inputs(4, 3), uses)
                turn.backward(turn.loss(torch.stack(outputs[:-1] if ctx.arguments.get("partial_loss") else outputs)))
    error: Raised | None = ctx.facts.pop("raised")
    has_option = ctx.takes(_OPTION)
    misses = "c" not in uses or bool(ctx.arguments.get("partial_loss"))
    ctx.observe("advises", not misses or error is None or not has_option or _OPTION in error.message, must=True)
    after = gradients("after", module)
    forgotten = [(name, index) for index, (name, _) in enumerate(module.named_parameters()) if name.startswith("c.")]
    answer = error if error is not None or has_option else after
    ctx.observe("answer", answer, must=AnyOf(error_naming(forgotten), after))


def error_naming(parameters: Sequence[tuple[str, int]]) -> Satisfies:
    """Return what an error about unused parameters must be: it names them, or gives their indices."""
    wanted = " and ".join(f"{name!r} (or its index, {index})" for name, index in parameters)
    return Satisfies(f"a RuntimeError mentioning {wanted}", _names_all, (list(parameters),))


def _names_all(got: Any, parameters: Sequence[tuple[str, int]]) -> bool:
    return (
        isinstance(got, Raised)
        and "RuntimeError" in (got.type, *got.bases)
        and all(name in got.message or re.search(rf"\b{index}\b", got.message) for name, index in parameters)
    )
