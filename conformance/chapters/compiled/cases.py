"""Program `compiled_case`: compiled modules whose graphs are more than a sequence of layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.chapters.compiled.compiling import OF_WARNINGS, PRELOAD, QUIET, compiling, graphs
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.scenario import Scenario
from conformance.truth.steps import simulate_steps

_WIDTH = 3


@dataclass
class Outputs:
    """Two outputs under names."""

    first: Tensor
    second: Tensor


class Weighty(nn.Module):
    """A layer with 1 MiB of parameters, the least that every DDP makes a bucket of; little of it takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.ballast = nn.Parameter(torch.ones(2**18))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs) + self.ballast[:_WIDTH]
        return output


class Three(nn.Module):
    """Three layers `a`, `b`, `c`, a single weight and a constant; one of `CASES` is its forward."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.a, self.b, self.c = (Weighty() for _ in range(3))
        self.weight = nn.Parameter(torch.ones(_WIDTH, _WIDTH))
        self.constant = torch.full((_WIDTH,), 2.0)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Any:
        return CASES[self.case](self, inputs)


def _all(module: Three, hidden: Tensor) -> Tensor:
    """Use the parameters that a case has not used, so that every parameter has a gradient."""
    output: Tensor = module.c(module.b(module.a(hidden))) + hidden @ module.weight
    return output


def _checkpoint(module: Three, inputs: Tensor) -> Any:
    hidden = checkpoint(lambda x: module.b(torch.relu(module.a(x))), inputs, use_reentrant=False)
    return module.c(hidden) @ module.weight


def _cond(module: Three, inputs: Tensor) -> Any:
    hidden = module.a(inputs)
    # Eager torch.cond is compiled itself, and the truth is computed without any compiler.
    if torch.compiler.is_compiling():
        hidden = torch.cond(hidden.sum() > 0, lambda x: module.b(x), lambda x: module.b(-x), (hidden,))
    else:
        hidden = module.b(hidden if hidden.sum() > 0 else -hidden)
    return module.c(hidden) @ module.weight


def _graph_break(module: Three, inputs: Tensor) -> Any:
    hidden = module.b(module.a(inputs))
    torch._dynamo.graph_break()
    return module.c(hidden) @ module.weight


def _breaks_on_one_rank(module: Three, inputs: Tensor) -> Any:
    hidden = module.b(module.a(inputs))
    if torch.compiler.is_compiling() and torch.distributed.get_rank() == 0:
        torch._dynamo.graph_break()
    return module.c(hidden) @ module.weight


def _begins_without_parameters(module: Three, inputs: Tensor) -> Any:
    hidden = inputs * 2 + 1
    torch._dynamo.graph_break()
    return _all(module, hidden)


def _external(module: Three, inputs: Tensor) -> Any:
    first = module.a(inputs)
    second = module.b(first)
    return first, second, module.c(second) @ module.weight


def _shared(module: Three, inputs: Tensor) -> Any:
    return module.a(module.c(module.b(module.a(inputs)))) @ module.weight + module.weight.sum()


def _in_place(module: Three, inputs: Tensor) -> Any:
    hidden = module.a(inputs)
    hidden.mul_(2)
    hidden = module.b(hidden).add_(module.constant).relu_()
    return module.c(hidden) @ module.weight


def _sizes(module: Three, inputs: Tensor) -> Any:
    rows = inputs.shape[0]
    hidden = module.a(inputs) * rows
    hidden = module.b(hidden).reshape(rows * _WIDTH).reshape(rows, _WIDTH)
    return module.c(hidden * float(2.0 * rows)) @ module.weight + rows


def _buffer(module: Three, inputs: Tensor) -> Any:
    module.seen += 1
    return _all(module, inputs * module.seen)


def _no_grad(module: Three, inputs: Tensor) -> Any:
    with torch.no_grad():
        detached = module.a(inputs)
    return _all(module, inputs + detached)


CASES: Mapping[str, Callable[[Three, Tensor], Any]] = {
    "plain": _all,
    "checkpoint": _checkpoint,
    "cond": _cond,
    "graph_break": _graph_break,
    "breaks_on_one_rank": _breaks_on_one_rank,
    "begins_without_parameters": _begins_without_parameters,
    "external": _external,
    "shared": _shared,
    "in_place": _in_place,
    "sizes": _sizes,
    "buffer": _buffer,
    "no_grad": _no_grad,
    "method": lambda module, inputs: _all(module, inputs @ module.weight.t().contiguous()),
    "passes_input_on": lambda module, inputs: (inputs, _all(module, inputs)),
    "dict": lambda module, inputs: {"deep": [_all(module, inputs)], "shallow": module.a(inputs)},
    "dataclass": lambda module, inputs: Outputs(_all(module, inputs), module.a(inputs)),
}


def _leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Outputs):
        return [output.first, output.second]
    items = output.values() if isinstance(output, dict) else output
    return [leaf for item in items for leaf in _leaves(item)]


def _build(scenario: Scenario) -> Three:
    module = Three(scenario.arguments["case"])
    for name in scenario.arguments.get("frozen", ()):
        module.get_parameter(name).requires_grad_(False)
    with_integer_weights(module, scenario.seed)
    return module


def _batch(scenario: Scenario, turn: RankStep) -> int:
    """Return the number of rows: those of argument `batches`, by turns; with `by_rank` each rank begins elsewhere."""
    batches = scenario.arguments.get("batches", (4,))
    shift = turn.rank if scenario.arguments.get("by_rank") else 0
    return int(batches[(turn.step + shift) % len(batches)])


def _step(scenario: Scenario, model: Any, turn: RankStep) -> Mapping[str, Any]:
    leaves = _leaves(turn.forward(model, turn.inputs(_batch(scenario, turn), _WIDTH)))
    losses = [turn.loss(leaf, place) for place, leaf in enumerate(leaves) if leaf.requires_grad]
    turn.backward(torch.stack(losses).sum())
    return {"outputs": [leaf.detach() for leaf in leaves]}


def _num_steps(scenario: Scenario) -> int:
    return int(scenario.arguments.get("num_steps", 2))


@program(
    "compiled_case",
    invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"),
    preload=PRELOAD,
    speaks_for=OF_WARNINGS,
)
def compiled_case(ctx: RankContext) -> None:
    """Train the module that argument `case` names for `num_steps` steps.

    Arguments: `frozen` parameters; `batches`, the numbers of rows by turns, `by_rank` for each rank in another order;
    `num_captured`, the least and the most that the backend may be given. Observes gradients, outputs, `warnings` and
    `compiled/num_captured`. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    with compiling(ctx) as (inside, watch):
        step = partial(_step, ctx.scenario)
        observe_run(inside, lambda: run_steps(inside, module, inside.wrap(module), step, _num_steps(ctx.scenario)))
        ctx.observe("compiled/num_captured", watch.num_captured)


@compiled_case.expects
def _as_uncompiled(scenario: Scenario) -> Mapping[int, Facts]:
    replicas = [_build(scenario) for _ in range(scenario.world_size)]
    truth = simulate_steps(replicas, partial(_step, scenario), _num_steps(scenario))
    least, most = scenario.arguments.get("num_captured", (1, 1000))
    judged: Facts = {"compiled/num_captured": graphs(least, most), **QUIET}
    return {rank: {**facts, **judged} for rank, facts in truth.items()}
