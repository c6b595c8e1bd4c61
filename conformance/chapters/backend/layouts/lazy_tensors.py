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

#: A view that means the opposite of a tensor.
_VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {"negative": torch._neg_view, "conjugate": torch.conj}


def _names(scenario: Scenario) -> tuple[str]:
    return (f"{scenario.arguments['operation']} of tensors with the lazy {scenario.arguments['bit']} bit",)


@judged("lazy_tensors", _names)
def lazy_tensors(ctx: RankContext) -> Mapping[str, Trial]:
    """Pass lazy tensors to `operation`; an error refuses them.

    They are also what an operation in place writes into, and, conjugated, a rank that passes none: torch then refuses
    on all ranks, and not where others wait.
    """
    cell = Cell(ctx.arguments["operation"], ctx.arguments["dtype"], root=1, lifetime="wait")
    truth, view = Truth(cell, Place(ctx.rank, ctx.world_size, cell.root)), _VIEWS[ctx.arguments["bit"]]

    def lazy(tensor: Tensor) -> Tensor:
        """Return a view that means what `tensor` does. The CPU makes its opposite, which not every device can."""
        return view(view(tensor.cpu()).clone().to(ctx.device))

    def room(blocks: Blocks) -> Tensor:
        return torch.zeros(truth.shape(blocks), dtype=dtype_of(cell.dtype), device=ctx.device)

    def called() -> str:
        what, place = cell.what, truth.place
        given = [lazy(truth.sent(blocks).view(truth.shape(blocks))) for blocks in what.inputs(place)]
        got = [room(blocks) for blocks in what.outputs(place)]
        if what.in_place and given:
            got = given
        elif not given and (what.in_place or ctx.arguments["bit"] == "conjugate"):
            got = list(map(lazy, got))
        try:
            for work in issue(cell, ctx.process_group, None, place, given, got).works:
                work.wait()
        except (RuntimeError, ValueError, TypeError):
            return ""
        return wrong_outputs(truth, [one.resolve_conj().resolve_neg() for one in got])

    return {_names(ctx.scenario)[0]: called}
