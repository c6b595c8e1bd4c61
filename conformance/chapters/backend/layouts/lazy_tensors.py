"""Program `lazy_tensors`: tensors that mean the negative, or the conjugate, of what lies in their memory."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from conformance.programs.judged import Trial, judged
from conformance.programs.operations.calls import issue
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.data import dtype_of
from conformance.programs.operations.description import Blocks, Place
from conformance.programs.operations.judging import Truth, wrong_outputs
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

#: What makes a lazy tensor that means the same as a tensor, whose memory it writes into.
_LAZY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "negative": lambda tensor: torch._neg_view(tensor.neg_()),
    "conjugate": lambda tensor: tensor.conj_physical_().conj(),
}


def _names(scenario: Scenario) -> tuple[str]:
    return (f"{scenario.arguments['operation']} of tensors with the lazy {scenario.arguments['bit']} bit",)


@judged("lazy_tensors", _names)
def lazy_tensors(ctx: RankContext) -> Mapping[str, Trial]:
    """Pass lazy tensors to `operation`, also as what it writes into where it works in place; an error refuses them."""
    cell = Cell(ctx.arguments["operation"], ctx.arguments["dtype"], root=1, lifetime="wait")
    truth, lazy = Truth(cell, Place(ctx.rank, ctx.world_size, cell.root)), _LAZY[ctx.arguments["bit"]]

    def room(blocks: Blocks) -> Tensor:
        return torch.zeros(truth.shape(blocks), dtype=dtype_of(cell.dtype), device=ctx.device)

    def called() -> str:
        what, place = cell.what, truth.place
        given = [lazy(truth.sent(blocks).view(truth.shape(blocks)).to(ctx.device)) for blocks in what.inputs(place)]
        rooms = [room(blocks) for blocks in what.outputs(place)]
        got = given or list(map(lazy, rooms)) if what.in_place else rooms
        try:
            for work in issue(cell, ctx.process_group, None, place, given, got).works:
                work.wait()
        except (RuntimeError, ValueError, TypeError):
            return ""
        return wrong_outputs(truth, [one.resolve_conj().resolve_neg() for one in got])

    return {_names(ctx.scenario)[0]: called}
