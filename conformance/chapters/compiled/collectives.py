"""Program `compiled_collectives`: counts the all-reduces of a compiled backward, as issued and as graph nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conformance.chapters.compiled.compiling import PRELOAD, REDUCTIONS_IN_GRAPHS, CompileOrder, GraphWatch, compiling
from conformance.checkers.protocol import is_gradient
from conformance.errors import certain
from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, run_steps, step_on
from conformance.programs.bucket_traffic import Stack, caps_of, filled_buckets
from conformance.scenario import Scenario
from conformance.truth.steps import simulate_steps

_NUM_STEPS = 2
_WAIT = ("_c10d_functional.wait_tensor.default",)
_DIVISION = ("aten.div.Tensor", "aten._foreach_div.Tensor", "aten._foreach_div.Scalar", "aten.div.Scalar")
_step = step_on(3)


def _build(scenario: Scenario) -> Stack:
    module = Stack(scenario.arguments["sizes"], _dtypes(scenario), _order(scenario))
    return with_integer_weights(module, scenario.seed)


def _order(scenario: Scenario) -> Sequence[int]:
    """Return in which order the vectors are used: that of registration unless argument `order` has another one."""
    order: Sequence[int] = scenario.arguments.get("order") or range(len(scenario.arguments["sizes"]))
    return order


def _dtypes(scenario: Scenario) -> list[str]:
    among = scenario.arguments.get("dtypes") or [scenario.dtype]
    return [among[place % len(among)] for place in range(len(scenario.arguments["sizes"]))]


@program("compiled_collectives", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"),
         preload=PRELOAD)  # fmt: skip
def compiled_collectives(ctx: RankContext) -> None:
    """Train two steps of a `Stack` with vectors of argument `sizes` and, by turns, `dtypes`, used in order of `order`.

    Observes gradients; of the second step `num_issued`, how many collectives reduced gradients, `buckets` (dtype and
    elements of each, sorted where there are several dtypes) and `operations`; and of the graphs that code was generated
    for, unless it was by Inductor, `num_in_graphs`, `waits_before_last` (waits that precede the last reduction) and
    `num_divisions`. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    with compiling(ctx) as (inside, watch):
        observe_run(inside, lambda: run_steps(inside, module, inside.wrap(module), _step, _NUM_STEPS))
        if CompileOrder.of(ctx.scenario).backend != "inductor":
            _observe_graphs(ctx, watch)
    reduced = [one for one in ctx.collectives() if is_gradient(one) and one.step == _NUM_STEPS - 1]
    ctx.observe("num_issued", len(reduced))
    buckets = [["/".join(dict.fromkeys(one.dtypes)), one.numel] for one in reduced]
    ctx.observe("buckets", buckets if len(set(_dtypes(ctx.scenario))) == 1 else sorted(buckets))
    ctx.observe("operations", sorted({one.op for one in reduced}))


def _observe_graphs(ctx: RankContext, watch: GraphWatch) -> None:
    nodes = [str(node.target) for graph in watch.generated for node in graph.graph.nodes]
    reductions = [place for place, target in enumerate(nodes) if target in REDUCTIONS_IN_GRAPHS]
    last = max(reductions, default=0)
    ctx.observe("num_in_graphs", len(reductions))
    ctx.observe("waits_before_last", sum(target in _WAIT for target in nodes[:last]))
    ctx.observe("num_divisions", sum(target in _DIVISION for target in nodes))


@compiled_collectives.expects
def _as_planned(scenario: Scenario) -> Mapping[int, Facts]:
    order = CompileOrder.of(scenario)
    buckets = _planned(scenario)
    listed = [[dtype, numel] for dtype, numel in buckets]
    several = len(set(_dtypes(scenario))) > 1
    judged: dict[str, Any] = {"num_issued": len(buckets), "buckets": sorted(listed) if several else listed}
    if order.reduction == "in_graph":
        judged["operations"] = ["all_reduce_coalesced" if order.fusion == "coalesced" else "all_reduce"]
    if order.reduction == "in_graph" and order.backend != "inductor":
        judged |= dict.fromkeys(("num_in_graphs", "num_divisions"), len(buckets)) | {"waits_before_last": 0}
    truth = simulate_steps([_build(scenario) for _ in range(scenario.world_size)], _step, _NUM_STEPS)
    return {rank: {**facts, **judged} for rank, facts in truth.items()}


def _planned(scenario: Scenario) -> list[tuple[str, int]]:
    """Return dtype and elements of each bucket: gradients of one dtype, the last used first, up to the caps.

    The bucket that is closed first has the cap of the first bucket, whatever its dtype is: with caps that differ, a
    scenario must have one dtype.
    """
    ready, caps = list(reversed(_order(scenario))), caps_of(scenario.options)
    sizes = [scenario.arguments["sizes"][position] for position in ready]
    dtypes = [_dtypes(scenario)[position] for position in ready]
    certain(len(set(dtypes)) == 1 or len(set(caps)) == 1, f"{scenario.id}: which dtype has the first bucket is open")
    planned = []
    for dtype in dict.fromkeys(dtypes):
        width = getattr(torch, dtype).itemsize
        mine = [size * width for size, each in zip(sizes, dtypes, strict=True) if each == dtype]
        planned += [(dtype, num_bytes // width) for num_bytes in filled_buckets(mine, caps)]
    return planned
