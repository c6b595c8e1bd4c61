"""Program `kept_memory`."""

import contextlib
import gc
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist

from conformance.programs.held import handles, resident_bytes
from conformance.programs.judged import Trial, judged
from conformance.programs.operations.calls import issue, wait_for_device
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import Blocks, Place
from conformance.programs.operations.groups import Groups
from conformance.programs.operations.judging import Truth
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario
from conformance.waiting.kept_waiting import process_seconds

#: One block has 128 KiB: together they are far more than a process grows by without any reason.
_NUMEL, _NUM_CALLS = 32_768, 100
#: Of tensors that the caller has dropped a backend may keep so many: those of a few calls before.
_MOST_KEPT = 20
#: So many more descriptors and threads together may a backend have that made some of them late.
_MOST_HANDLES = 10
#: So many calls at most are under way that nobody waits for.
_NUM_IN_FLIGHT = 5
#: A backend that lets go in a thread of its own has so long to do it.
_PATIENCE_S = 2.0


def _names(scenario: Scenario) -> tuple[str, ...]:
    operation = scenario.arguments["operation"]
    return (
        f"tensors that {operation} keeps",
        f"memory that {operation} keeps",
        f"descriptors and threads that {operation} leaves",
    )


@judged("kept_memory", _names)
def kept_memory(ctx: RankContext) -> Mapping[str, Trial]:
    """Call `operation` many times with new tensors, and drop them; count those alive, and what the process grew by.

    Works are waited for, or their futures are, or nobody waits for them but the barrier behind every few calls. Every
    other call is of a second group, and each rank is the root in turn.
    """
    cell, found = Cell(ctx.arguments["operation"], lifetime="wait", numel=_NUMEL), {"bytes": 0, "sent": 0, "had": 0}
    groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device)

    def call(number: int) -> list[weakref.ref[torch.Tensor]]:
        group = groups.get("permuted" if number % 2 else "world")
        place = Place(group.rank(), group.size(), root=number // 2 % group.size())
        truth = Truth(cell, place)

        def made(blocks: tuple[Blocks, ...]) -> list[torch.Tensor]:
            return [torch.ones(truth.shape(one), device=ctx.device) for one in blocks]

        inputs = made(cell.what.inputs(place))
        outputs = inputs if cell.what.in_place and inputs else made(cell.what.outputs(place))
        works = issue(cell, group, None, place, inputs, outputs).works
        for work in works:
            if number % 3 == 0 or cell.what.of_pairs:
                work.wait()
            elif number % 3 == 1:
                with contextlib.suppress(RuntimeError):  # that there is one is for others to ask
                    work.get_future().wait()
        del works
        if number % _NUM_IN_FLIGHT == 0:
            barriers()
        wait_for_device()  # which may keep memory until the host does
        tensors = inputs if inputs is outputs else [*inputs, *outputs]
        found["sent"] += sum(one.nbytes for one in tensors)
        return [weakref.ref(one) for one in tensors]

    def barriers() -> None:
        for name in ("world", "permuted"):
            dist.barrier(group=groups.get(name))

    def tensors() -> str:
        for number in range(_NUM_CALLS // 2):
            call(number)
        before, found["had"], found["sent"] = resident_bytes(), sum(handles().values()), 0
        references = [one for number in range(_NUM_CALLS) for one in call(number)]
        barriers()
        most = _MOST_KEPT * len(references) // _NUM_CALLS
        alive = len(references)
        for _ in process_seconds(_PATIENCE_S, pause_s=0.05):
            gc.collect()
            alive = sum(one() is not None for one in references)
            if alive <= most:
                break
        found["bytes"] = resident_bytes() - before
        return "" if alive <= most else f"{alive} of {len(references)} tensors live on that the caller has dropped"

    def memory() -> str:
        grown, sent = found["bytes"], found["sent"]
        enough = grown <= sent // 4
        return "" if enough else f"the process grew by {grown} bytes in {_NUM_CALLS} calls with {sent} bytes of tensors"

    def left() -> str:
        groups.destroy()
        for _ in process_seconds(_PATIENCE_S, pause_s=0.05):
            more = sum(handles().values()) - found["had"]
            if more <= _MOST_HANDLES:
                return ""
        return f"{more} more descriptors and threads than {_NUM_CALLS} calls before"

    return dict(zip(_names(ctx.scenario), (tensors, memory, left), strict=True))
