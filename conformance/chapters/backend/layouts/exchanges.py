"""Programs about tensors that overlap, that send nothing, and that autograd knows of."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.checkers.explanation import shorten
from conformance.observation import Facts
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Right

_NAME = "all_gather into slots that overlap by half"


@program_without_truth("overlapping_outputs", invariants=(), without_ddp=True)
def overlapping_outputs(ctx: RankContext) -> None:
    """Gather into slots that overlap; observes what is neither an error nor some rank's value. All ranks run it."""
    memory = torch.full((2 * ctx.world_size + 6,), -1.0, device=ctx.device)
    slots = [memory[2 + 2 * rank : 6 + 2 * rank] for rank in range(ctx.world_size)]
    mine = torch.full((4,), float(ctx.rank + 1), device=ctx.device)
    ctx.observe(_NAME, _overlapping(ctx, slots, mine, memory))


@overlapping_outputs.expects
def _overlapping_outputs(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {_NAME: Right()} for rank in range(scenario.world_size)}


def _overlapping(ctx: RankContext, slots: list[Tensor], mine: Tensor, memory: Tensor) -> str:
    try:
        dist.all_gather(slots, mine, group=ctx.process_group)
    except Exception as error:
        return "" if shorten(str(error)) else "the error says nothing"
    size = ctx.world_size
    for place, value in enumerate(memory.tolist()):
        whose = {float(rank + 1) for rank in range(size) if 2 + 2 * rank <= place < 6 + 2 * rank} or {-1.0}
        if value not in whose:
            return f"element {place} of the memory is {value:g}, expected one of {sorted(whose)}"
    return ""


#: Who sends to whom: nobody from rank 0, nobody to rank 0, nobody at all.
_PATTERNS: Mapping[str, Callable[[int, int], int]] = {
    "rank 0 sends nothing": lambda source, target: 0 if source == 0 else 2,
    "rank 0 receives nothing": lambda source, target: 0 if target == 0 else 3,
    "nobody sends anything": lambda source, target: 0,
    "only the last rank sends to rank 0": lambda source, target: 5 if target == 0 < source else 0,
}


@program_without_truth("empty_splits", invariants=(), without_ddp=True)
def empty_splits(ctx: RankContext) -> None:
    """Exchange parts of which many are empty; observes what is wrong with what was received. All ranks run it."""
    size = ctx.world_size
    for name, length in _PATTERNS.items():
        with ctx.phase(f"all_to_all_single, {name}"):
            sent = [torch.full((length(ctx.rank, target),), 10.0 * ctx.rank + target) for target in range(size)]
            received = [length(source, ctx.rank) for source in range(size)]
            output = torch.full((sum(received),), -1.0, device=ctx.device)
            dist.all_to_all_single(
                output, torch.cat(sent).to(ctx.device), received, [len(part) for part in sent], group=ctx.process_group
            )
            expected = [10.0 * source + ctx.rank for source in range(size) for _ in range(received[source])]
            wrong = f"got {output.tolist()}, expected {expected}" if output.tolist() != expected else ""
            ctx.observe(f"all_to_all_single, {name}", wrong)


@empty_splits.expects
def _empty_splits(scenario: Scenario) -> Mapping[int, Facts]:
    names = [f"all_to_all_single, {name}" for name in _PATTERNS]
    return {rank: dict.fromkeys(names, Right()) for rank in range(scenario.world_size)}
