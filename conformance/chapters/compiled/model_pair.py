"""Program `compiled_pair`: one compiled step with two wrapped modules, of two process groups and two dtypes."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.chapters.compiled.compiling import PRELOAD, compiling
from conformance.checkers.protocol import is_gradient
from conformance.models.exact import exact_mean
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded

_NUM_STEPS = 2
_WIDTHS = ((3, 4), (4, 2))


class Half(nn.Module):
    """One of the two modules: a layer that takes inputs of any dtype and answers in its own."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, inputs, dtype=dtype)
        self.last = nn.Linear(inputs, outputs, dtype=dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(inputs.to(self.first.weight.dtype)))
        return output


def _halves(scenario: Scenario) -> list[Half]:
    dtypes = [getattr(torch, name) for name in scenario.arguments["dtypes"]]
    halves = [Half(*widths, dtype) for widths, dtype in zip(_WIDTHS, dtypes, strict=True)]
    for place, half in enumerate(halves):
        with_integer_weights(half, place, scenario.seed)
    return halves


def _partition(scenario: Scenario, place: int) -> list[list[int]]:
    """Return the groups of ranks that average module `place`; argument `groups` gives their sizes."""
    size = scenario.arguments["groups"][place]
    return [list(range(start, start + size)) for start in range(0, scenario.world_size, size)]


@program("compiled_pair", invariants=("nothing_in_flight", "leaves_no_trace"), preload=PRELOAD)
def compiled_pair(ctx: RankContext) -> None:
    """Train a module on what another one returns, in one compiled step; each is wrapped in groups of its own.

    Arguments: `groups`, the sizes of the groups of each module, and `dtypes` of their parameters. Observes gradients as
    `step<k>/<module>/grad/<name>` and `reduced`: of each module's group, in the last step, dtypes and elements. All
    ranks run it.
    """
    halves = [half.to(ctx.device) for half in _halves(ctx.scenario)]
    made: list[Any] = []
    for place in range(len(halves)):
        own = [dist.new_group(ranks) for ranks in _partition(ctx.scenario, place)]
        made.append(next(group for group in own if group != dist.GroupMember.NON_GROUP_MEMBER))
    with compiling(ctx) as (inside, _):
        wrapped = [ctx.wrap(half, process_group=group) for half, group in zip(halves, made, strict=True)]
        model = inside.compile(lambda inputs: wrapped[1](wrapped[0](inputs)))
        for index in range(_NUM_STEPS):
            turn = rank_step(inside, index)
            for half in halves:
                half.zero_grad(set_to_none=True)
            before = len(ctx.collectives())
            turn.backward(turn.loss(turn.forward(model, turn.inputs(5, 3))))
            for place, half in enumerate(halves):
                ctx.observe_gradients(f"step{index}/module{place}", half)
    reduced = [one for one in ctx.collectives()[before:] if is_gradient(one)]
    for place, group in enumerate(made):
        mine = [one for one in reduced if one.group == f"group {group.group_name}"]
        dtypes = sorted({dtype for one in mine for dtype in one.dtypes})
        ctx.observe(f"reduced/module{place}", [dtypes, sum(one.numel for one in mine)])
    dist.barrier(group=ctx.process_group)
    for group in made:
        dist.destroy_process_group(group)


@compiled_pair.expects
def _averaged_apart(scenario: Scenario) -> Mapping[int, Facts]:
    ranks = range(scenario.world_size)
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    with single_threaded():
        replicas = [_halves(scenario) for _ in ranks]
        for index in range(_NUM_STEPS):
            for rank, (first, second) in enumerate(replicas):
                turn = RankStep(rank, index)
                first.zero_grad(set_to_none=True)
                second.zero_grad(set_to_none=True)
                turn.backward(turn.loss(second(first(turn.inputs(5, 3)))))
            for place in range(2):
                for members in _partition(scenario, place):
                    _average(scenario, [replicas[rank][place] for rank in members], members, facts, index, place)
    for mine in facts.values():
        for place, half in enumerate(replicas[0]):
            numel = sum(parameter.numel() for parameter in half.parameters())
            mine[f"reduced/module{place}"] = [[scenario.arguments["dtypes"][place]], numel]
    return facts


def _average(scenario: Scenario, modules: list[Half], members: list[int], facts: Any, index: int, place: int) -> None:
    for name, _ in modules[0].named_parameters():
        gradients = [module.get_parameter(name).grad for module in modules]
        mean = exact_mean([gradient for gradient in gradients if gradient is not None])
        for rank in members:
            facts[rank][f"step{index}/module{place}/grad/{name}"] = mean
