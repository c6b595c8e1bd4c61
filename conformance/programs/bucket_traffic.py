"""Program `bucket_traffic`: which gradient collectives a step issues, how large, in which order and when."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.checkers.protocol import is_gradient
from conformance.errors import ScenarioError, certain
from conformance.models.catalogue import get_fixture
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Collective, Facts, Unmeasured
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.programs.gradient_traffic import elements_of, num_issued, uncounted
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies, at_least, at_most

NUM_STEPS = 4

#: What a scenario may require: every element reduced once; the buckets of the first step and of later steps; one dtype
#: per collective; some collectives, or all but one, issued before the last gradient is ready.
ASPECTS = ("elements", "first", "later", "dtypes", "overlap", "full_overlap")

_MIB = 1024 * 1024
_DEFAULT_FIRST_MIB, _DEFAULT_MIB = 1, 25


class Stack(nn.Module):
    """Vectors of lengths `sizes`, registered in this order, used in `order` (positions in `sizes`)."""

    def __init__(self, sizes: Sequence[int], dtypes: Sequence[str], order: Sequence[int]) -> None:
        super().__init__()
        self.order = order
        self.vectors = nn.ParameterList(
            torch.empty(size, dtype=getattr(torch, dtype)) for size, dtype in zip(sizes, dtypes, strict=True)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a vector: `inputs` shifted by a multiple of every vector's sum."""
        hidden = inputs
        for place, position in enumerate(self.order):
            hidden = hidden + (self.vectors[position].sum() * (place + 1)).to(inputs.dtype)
        return hidden


def _order(scenario: Scenario, rank: int) -> list[int]:
    """Return the order of use: that of registration unless argument `order` says `reversed` or `by_rank`."""
    positions = list(range(len(scenario.arguments["sizes"])))
    kind = scenario.arguments.get("order", "registered")
    if kind == "reversed":
        return positions[::-1]
    if kind == "by_rank":  # each rank uses them in an order of its own
        return positions[rank % len(positions) :] + positions[: rank % len(positions)]
    certain(kind == "registered", f"unknown order {kind!r}")
    return positions


def _left_out(scenario: Scenario) -> set[int]:
    return {*scenario.arguments.get("frozen", ()), *scenario.arguments.get("ignored", ())}


def _dtypes(scenario: Scenario) -> list[str]:
    sizes = scenario.arguments["sizes"]
    return list(scenario.arguments.get("dtypes") or [scenario.dtype] * len(sizes))


def _build(scenario: Scenario, rank: int) -> nn.Module:
    module = Stack(scenario.arguments["sizes"], _dtypes(scenario), _order(scenario, rank))
    for position in scenario.arguments.get("frozen", ()):
        module.vectors[position].requires_grad_(False)
    ignored = [f"vectors.{position}" for position in scenario.arguments.get("ignored", ())]
    module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    return with_integer_weights(module, scenario.seed)


def _turning_step(model: Any, turn: RankStep) -> None:
    model.module.order = [*model.module.order[1:], model.module.order[0]]
    _step(model, turn)


def _step(model: nn.Module, turn: RankStep) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(3))))


@program("bucket_traffic", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def bucket_traffic(ctx: RankContext) -> None:
    """Train steps of a `Stack` and observe the gradient collectives of each.

    Arguments: `sizes`, lengths of the vectors in order of registration; `order` in which they are used ("registered",
    "reversed", "by_rank"), with `turns` another one in each step; `dtypes`; positions that are `frozen` or `ignored`;
    `judge`, which of `ASPECTS` are required besides right gradients. Observes gradients and, for each step and as these
    aspects need it: `buckets` (elements of each gradient collective), `elements` (per dtype), `dtypes_mixed`, and how
    many gradient collectives were issued when the last gradient was computed, `issued_before_last`, and after it,
    `issued_late`. Counts are `Unmeasured` of a DDP that does not all_reduce gradients. All ranks run it.
    """
    module: Any = _build(ctx.scenario, ctx.rank).to(ctx.device)
    judged = _judged_traffic(ctx.scenario)
    seen: dict[str, int] = {}

    def last_gradient_ready(_: Tensor) -> None:
        is_recorded = len(ctx.collectives()) > 0  # the first step has issued some
        awaited = _num_overlapping(ctx.scenario) if seen["step"] and is_recorded else 0
        seen["issued_before_last"] = num_issued(lambda: _of_step(ctx.collectives(), seen["step"]), awaited)

    left_out = _left_out(ctx.scenario)
    first_used = next(module.vectors[position] for position in module.order if position not in left_out)
    first_used.register_hook(last_gradient_ready)

    def step(model: nn.Module, turn: RankStep) -> Mapping[str, Any]:
        seen["step"] = turn.step
        (_turning_step if ctx.arguments.get("turns") else _step)(model, turn)
        collectives, issued = _of_step(ctx.collectives(), turn.step), seen["issued_before_last"]
        traffic = _traffic(collectives)
        traffic |= {"issued_before_last": issued, "issued_late": len(traffic["buckets"]) - issued}
        counted = _as_counted(traffic, uncounted(collectives, _elements(ctx.scenario), ctx.world_size))
        return {name: value for name, value in counted.items() if f"step{turn.step}/{name}" in judged}

    observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS), must=judged)


def _of_step(history: Iterable[Collective], step: int) -> list[Collective]:
    return [collective for collective in history if collective.step == step]


def _traffic(collectives: Sequence[Collective]) -> dict[str, Any]:
    reduced = [collective for collective in collectives if is_gradient(collective)]
    return {
        "buckets": [collective.numel for collective in reduced],
        "elements": elements_of(collectives),
        "dtypes_mixed": [collective.describe() for collective in reduced if len(set(collective.dtypes)) > 1],
        "others": [collective.describe() for collective in collectives if not is_gradient(collective)],
    }


#: Counts that need a DDP that all-reduces the gradients' own elements.
_COUNTS = ("buckets", "num_buckets", "elements", "issued_late")


def _as_counted(traffic: Mapping[str, Any], why_not: str) -> dict[str, Any]:
    """Return `traffic` with its counts, or with `why_not` in their place."""
    return {name: Unmeasured(why_not) if why_not and name in _COUNTS else value for name, value in traffic.items()}


def _num_overlapping(scenario: Scenario) -> int:
    """Return how many gradient collectives a DDP that overlaps has issued when the last gradient is computed."""
    if "full_overlap" in scenario.arguments["judge"]:
        return len(_filled(scenario)) - 1
    return int("overlap" in scenario.arguments["judge"])


def _filled(scenario: Scenario) -> list[int]:
    sizes, dtypes = scenario.arguments["sizes"], _dtypes(scenario)
    certain(len(set(dtypes)) == 1, f"{scenario.id}: buckets of several dtypes fill at the same time, in no one order")
    width = getattr(torch, dtypes[0]).itemsize
    buckets = filled_buckets([sizes[position] * width for position in _used(scenario)], caps_of(scenario.options))
    return [each // width for each in buckets]


def _used(scenario: Scenario) -> list[int]:
    return [position for position in reversed(_order(scenario, 0)) if position not in _left_out(scenario)]


def _elements(scenario: Scenario) -> dict[str, int]:
    sizes, dtypes = scenario.arguments["sizes"], _dtypes(scenario)
    elements: dict[str, int] = {}
    for position in _used(scenario):
        elements[dtypes[position]] = elements.get(dtypes[position], 0) + sizes[position]
    return elements


def caps_of(options: Mapping[str, Any]) -> list[int]:
    """Return the caps in bytes of the first, second, ... bucket for `options`; the last is that of all further ones."""
    if caps := options.get("bucket_cap_mb_list"):
        return [int(cap * _MIB) for cap in caps]
    if (cap := options.get("bucket_cap_mb")) is not None:
        return [int(cap * _MIB)]
    return [_DEFAULT_FIRST_MIB * _MIB, _DEFAULT_MIB * _MIB]


def filled_buckets(sizes_bytes: Iterable[int], caps_bytes: Sequence[int]) -> list[int]:
    """Return each bucket's bytes for gradients that become ready in this order: a bucket closes at its cap."""
    buckets: list[int] = []
    filled = 0
    for size in sizes_bytes:
        filled += size
        if filled >= caps_bytes[min(len(buckets), len(caps_bytes) - 1)]:
            buckets.append(filled)
            filled = 0
    return buckets + [filled] * (filled > 0)


def _judged_traffic(scenario: Scenario) -> dict[str, Any]:
    judge, elements = scenario.arguments["judge"], _elements(scenario)
    if unknown := set(judge) - set(ASPECTS):
        raise ScenarioError(f"{scenario.id}: cannot judge {sorted(unknown)}; known: {', '.join(ASPECTS)}")
    facts: dict[str, Any] = {}
    if "first" in judge:
        sizes = sorted(elements.values())
        facts["step0/buckets"] = Satisfies(
            f"one collective per dtype, of {sizes} elements", _are_in_some_order, (sizes,)
        )
        facts["step0/issued_before_last"] = 0
    if "later" in judge:
        facts |= {f"step{index}/buckets": _filled(scenario) for index in range(1, NUM_STEPS)}
    for index in range(NUM_STEPS):
        if "elements" in judge:
            facts[f"step{index}/elements"] = elements
        if "dtypes" in judge:
            facts[f"step{index}/dtypes_mixed"] = []
        if "overlap" in judge and index:
            facts[f"step{index}/issued_before_last"] = at_least(1)
        if "full_overlap" in judge and index:
            facts[f"step{index}/issued_late"] = at_most(1)
    return facts


def _are_in_some_order(got: list[int], sizes: list[int]) -> bool:
    return sorted(got) == sizes


@program("model_traffic", invariants=("same_collectives", "nothing_in_flight", "bucket_order", "leaves_no_trace"))
def model_traffic(ctx: RankContext) -> None:
    """Train steps of the scenario's model without an optimiser, in two wrappers, and observe what they communicate.

    Observes for each step `elements` (per dtype), `num_buckets`, `others` (collectives that move no gradients, except
    the agreement about unused parameters), and `same_as_twin`: whether an equal module in a second wrapper had the same
    buckets. Argument `few` requires one bucket per dtype. Counts are `Unmeasured` of a DDP that does not all_reduce
    gradients. All ranks run it.
    """
    traffic: list[list[dict[str, Any]]] = []
    gradients = _elements_of_model(ctx.scenario)
    for _ in range(2):
        module = ctx.build_model()
        model = ctx.wrap(module)
        steps = []
        for index in range(NUM_STEPS):
            module.zero_grad(set_to_none=True)
            before = len(ctx.collectives())
            ctx.backward(ctx.loss(model, index), index)
            issued = ctx.collectives()[before:]
            found = _traffic(but_for_agreement(issued, len(list(module.parameters()))))
            found["num_buckets"] = len(found["buckets"])
            why_not = uncounted(issued, gradients, ctx.world_size)
            steps.append(_as_counted(found, why_not) | {"sent": found["buckets"]})
        traffic.append(steps)
    for index, (mine, twin) in enumerate(zip(*traffic, strict=True)):
        ctx.observe(f"step{index}/elements", mine["elements"])
        ctx.observe(f"step{index}/num_buckets", mine["num_buckets"])
        ctx.observe(f"step{index}/others", mine["others"])
        ctx.observe(f"step{index}/same_as_twin", mine["sent"] == twin["sent"])


def but_for_agreement(collectives: Sequence[Collective], num_parameters: int) -> list[Collective]:
    """Leave out the first collective by which ranks can agree on unused parameters: a few integers from every rank."""

    def agrees(one: Collective) -> bool:
        is_of_all_ranks = one.op.startswith(("all_reduce", "all_gather"))
        return is_of_all_ranks and one.dtypes[0] in _INTEGERS and one.numel <= num_parameters

    agreement = next(filter(agrees, collectives), None)
    return [one for one in collectives if one is not agreement]


_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


def _elements_of_model(scenario: Scenario) -> dict[str, int]:
    elements: dict[str, int] = {}
    for parameter in get_fixture(scenario.model).build(scenario).parameters():
        if parameter.requires_grad:
            dtype = str(parameter.dtype).removeprefix("torch.")
            elements[dtype] = elements.get(dtype, 0) + parameter.numel()
    return elements


@model_traffic.expects
def _model_traffic(scenario: Scenario) -> Mapping[int, Facts]:
    elements = _elements_of_model(scenario)
    facts: dict[str, Any] = {}
    for index in range(NUM_STEPS):
        facts[f"step{index}/elements"] = elements
        facts[f"step{index}/same_as_twin"] = True
        if index >= 2 and not get_fixture(scenario.model).uses_buffers:
            facts[f"step{index}/others"] = []
        if scenario.arguments.get("few"):
            facts[f"step{index}/num_buckets"] = len(elements)
    return dict.fromkeys(range(scenario.world_size), facts)
