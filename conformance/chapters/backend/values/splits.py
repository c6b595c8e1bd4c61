"""Programs `one_sided_splits` and `unlike_parts`: parts of other sizes for other ranks."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from conformance.programs.judged import Trial, always, judged, unlike
from conformance.programs.operations.calls import named
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

_NAMES = (
    "all_to_all_single with input splits only", "all_to_all_single with output splits only",
    "all_to_all_single of the group with input splits only", "all_to_all_single of the group with output splits only",
)  # fmt: skip


@judged("one_sided_splits", always(*_NAMES))
def one_sided_splits(ctx: RankContext) -> Mapping[str, Trial]:
    """Exchange by all_to_all_single with the splits of one side only: the other side's are equal, then.

    Rank d gets d + 1 rows from each rank where input splits are given; rank s sends s + 1 to each where those of the
    output are.
    """
    size, rank = ctx.world_size, ctx.rank
    uneven, equal = [other + 1 for other in range(size)], [rank + 1] * size

    def exchange(*, of_input: bool, by_method: bool) -> str:
        sent, received = (uneven, equal) if of_input else (equal, uneven)
        rows = [1000.0 * rank + 100 * target + row for target in range(size) for row in range(sent[target])]
        expected = [1000.0 * source + 100 * rank + row for source in range(size) for row in range(received[source])]
        given = torch.tensor(rows, device=ctx.device)
        output = torch.full((len(expected),), -1.0, device=ctx.device)
        if by_method:
            call = named(ctx.process_group, "all_to_all_single", "alltoall_base")
            call(output, given, [] if of_input else uneven, uneven if of_input else [], c10d.AllToAllOptions()).wait()
        else:
            received_only, sent_only = (None, uneven) if of_input else (uneven, None)
            dist.all_to_all_single(output, given, received_only, sent_only, group=ctx.process_group)
        return unlike("the output holds", output, expected)

    sides = product((False, True), (True, False))
    return {
        name: partial(exchange, of_input=of_input, by_method=by_method)
        for name, (by_method, of_input) in zip(_NAMES, sides, strict=True)
    }


def _of_lists(scenario: Scenario) -> tuple[str, ...]:
    return tuple(f"{scenario.arguments['operation']} of a list, {more} for each further rank" for more in _MORE)


#: A part is longer, or shorter, the higher the rank is that it is for.
_MORE = {"longer": lambda size, rank: rank + 1, "shorter": lambda size, rank: size - rank}


@judged("unlike_parts", _of_lists)
def unlike_parts(ctx: RankContext) -> Mapping[str, Trial]:
    """Pass a list of parts of unlike sizes to `operation`, or a part of its own size to an all_gather.

    An error refuses them, too.
    """
    size, rank = ctx.world_size, ctx.rank

    def part(source: int, target: int, length: int) -> list[float]:
        return [1000.0 * source + 100 * target + place for place in range(length)]

    def gathered(everybody: list[list[float]]) -> str:
        outputs = [torch.full((len(one),), -1.0, device=ctx.device) for one in everybody]
        try:
            dist.all_gather(outputs, torch.tensor(everybody[rank], device=ctx.device), group=ctx.process_group)
        except (RuntimeError, ValueError):
            return ""
        return unlike("the output holds", outputs, everybody)

    def exchange(length: Callable[[int, int], int]) -> str:
        if ctx.arguments["operation"] == "all_gather":
            return gathered([part(source, source, length(size, source)) for source in range(size)])
        given = [torch.tensor(part(rank, target, length(size, target)), device=ctx.device) for target in range(size)]
        mine = [part(source, rank, length(size, rank)) for source in range(size)]
        outputs = [torch.full((len(one),), -1.0, device=ctx.device) for one in mine]
        try:
            if ctx.arguments["operation"] == "all_to_all":
                dist.all_to_all(outputs, given, group=ctx.process_group)
            else:
                outputs, mine = outputs[:1], [[sum(column) for column in zip(*mine, strict=True)]]
                dist.reduce_scatter(outputs[0], given, group=ctx.process_group)
        except (RuntimeError, ValueError):
            return ""
        return unlike("the output holds", outputs, mine)

    return {
        name: partial(exchange, length) for name, length in zip(_of_lists(ctx.scenario), _MORE.values(), strict=True)
    }
