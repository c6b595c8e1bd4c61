"""Program `views_of_one_buffer`: what an operation takes or gives as a list lies in one buffer, the last one first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.judged import Trial, judged, unlike
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

_NUMEL, _ROOT = 5, 1
_ORDERS = ("from the last to the first", "from the middle on")


def _names(scenario: Scenario) -> tuple[str, ...]:
    return tuple(f"{scenario.arguments['operation']} of views of one buffer, {order}" for order in _ORDERS)


def _block(ctx: RankContext, source: int, target: int) -> Tensor:
    """Return what rank `source` has for rank `target`."""
    return torch.arange(float(_NUMEL), device=ctx.device) + 100 * (source + 1) + 10 * target


@judged("views_of_one_buffer", _names)
def views_of_one_buffer(ctx: RankContext) -> Mapping[str, Trial]:
    """Call `operation`, which takes or gives a list, with parts of one buffer in another order than the ranks'."""
    size, rank, group = ctx.world_size, ctx.rank, ctx.process_group
    places = (tuple(reversed(range(size))), tuple((place + size // 2) % size for place in range(size)))

    def call(operation: str, order: tuple[int, ...]) -> str:
        received, sent = (torch.full((size, _NUMEL), -1.0, device=ctx.device) for _ in range(2))
        outputs, inputs = ([buffer[place] for place in order] for buffer in (received, sent))
        for target, one in enumerate(inputs):
            one.copy_(_block(ctx, rank, target))
        wanted = [_block(ctx, source, rank) for source in range(size)]
        if operation == "all_to_all":
            dist.all_to_all(outputs, inputs, group=group)
        elif operation == "reduce_scatter":
            outputs, wanted = outputs[:1], [torch.stack(wanted).sum(0)]
            dist.reduce_scatter(outputs[0], inputs, group=group)
        elif operation == "scatter":
            outputs, wanted = outputs[:1], [_block(ctx, _ROOT, rank)]
            dist.scatter(outputs[0], inputs if rank == _ROOT else None, group=group, group_src=_ROOT)
        else:
            target = _ROOT if operation == "gather" else 0
            wanted = [_block(ctx, source, target) for source in range(size)]
            if operation == "all_gather":
                dist.all_gather(outputs, inputs[target], group=group)
            else:
                dist.gather(inputs[target], outputs if rank == _ROOT else None, group=group, group_dst=_ROOT)
                outputs, wanted = (outputs, wanted) if rank == _ROOT else ([], [])
        return unlike("the outputs hold", [one.tolist() for one in outputs], [one.tolist() for one in wanted])

    def trial(order: tuple[int, ...]) -> Trial:
        return lambda: call(str(ctx.arguments["operation"]), order)

    return {name: trial(order) for name, order in zip(_names(ctx.scenario), places, strict=True)}
