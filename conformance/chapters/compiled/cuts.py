"""Program `compiled_cuts`: where the compiler splits the graph of a module, and what its backward does there."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.chapters.compiled.compiling import PRELOAD, compiling
from conformance.checkers.protocol import is_gradient
from conformance.errors import certain
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, run_steps, step_on
from conformance.programs.bucket_traffic import Stack, caps_of, filled_buckets
from conformance.scenario import Scenario
from conformance.truth.steps import simulate_steps

_NUM_STEPS = 2
_step = step_on(3)


def _build(scenario: Scenario) -> Stack:
    sizes = list(scenario.arguments["sizes"])
    certain(len(set(sizes)) == len(sizes), "vectors have different lengths")
    module = Stack(sizes, [scenario.dtype] * len(sizes), range(len(sizes)))
    for position in scenario.arguments.get("frozen", ()):
        module.vectors[position].requires_grad_(False)
    ignored = [f"vectors.{position}" for position in scenario.arguments.get("ignored", ())]
    module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    with_integer_weights(module, scenario.seed)
    return module


@program("compiled_cuts", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"), preload=PRELOAD)
def compiled_cuts(ctx: RankContext) -> None:
    """Train two steps of a `Stack`, whose vectors are used in the order of registration.

    Arguments: `sizes`, their lengths; positions that are `frozen` or `ignored`. Observes gradients; `parts`, for each
    graph that the backend was given the positions of the vectors in it; and `begun_before_last`, how many all-reduces
    of the second step were issued when the last gradient arrived, and `buckets`, how many elements each has: those of
    a part's vectors. All ranks run it.
    """
    sizes = list(ctx.arguments["sizes"])
    module: Any = _build(ctx.scenario).to(ctx.device)
    begun: list[int] = []
    before = 0

    def last_gradient_arrives(_: Tensor) -> None:
        begun.append(sum(map(is_gradient, ctx.collectives()[before:])))

    next(module.vectors[position] for position in _reduced(ctx.scenario)).register_hook(last_gradient_arrives)

    with compiling(ctx) as (inside, watch):
        model = inside.wrap(module)

        def step(model: Any, turn: RankStep) -> None:
            nonlocal before
            before = len(ctx.collectives())
            _step(model, turn)

        observe_run(inside, lambda: run_steps(inside, module, model, step, _NUM_STEPS))
        parts = [[place for place, size in enumerate(sizes) if size in _lengths(graph)] for graph in watch.captured]
    ctx.observe("parts", parts)
    ctx.observe("begun_before_last", begun[-1])
    reduced = [one.numel for one in ctx.collectives() if is_gradient(one) and one.step == _NUM_STEPS - 1]
    ctx.observe("buckets", reduced)


def _lengths(graph: torch.fx.GraphModule) -> set[int]:
    values = [node.meta.get("example_value", node.meta.get("val")) for node in graph.graph.find_nodes(op="placeholder")]
    return {value.numel() for value in values if isinstance(value, Tensor) and value.dim() == 1 and value.numel() != 3}


def _reduced(scenario: Scenario) -> list[int]:
    left_out = {*scenario.arguments.get("frozen", ()), *scenario.arguments.get("ignored", ())}
    return [place for place in range(len(scenario.arguments["sizes"])) if place not in left_out]


@compiled_cuts.expects
def _as_planned(scenario: Scenario) -> Mapping[int, Facts]:
    sizes = list(scenario.arguments["sizes"])
    width = torch.empty(0, dtype=getattr(torch, scenario.dtype)).element_size()
    order = _reduced(scenario)[::-1]
    buckets = filled_buckets([sizes[place] * width for place in order], caps_of(scenario.options))
    parts: list[list[int]] = []
    place = 0
    for num_bytes in buckets:
        start = place
        while num_bytes > 0:
            num_bytes -= sizes[order[place]] * width
            place += 1
        parts.insert(0, sorted(order[start:place]))
    starts = [part[0] for part in parts]
    starts[0] = 0  # what precedes the last gradient stays in the part of the last bucket
    whole = [list(range(start, end)) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
    judged: Facts = {"parts": whole}
    if scenario.world_size > 1:  # alone, there may be nothing to reduce
        judged = {**judged, "begun_before_last": len(buckets) - 1, "buckets": [size // width for size in buckets]}
    ignored = frozenset(f"vectors.{position}" for position in scenario.arguments.get("ignored", ()))
    truth = simulate_steps([_build(scenario) for _ in range(scenario.world_size)], _step, _NUM_STEPS, ignored=ignored)
    return {rank: {**facts, **judged} for rank, facts in truth.items()}
