"""Program `many_numbers`: more operations of one kind than a counter of 16 bits can tell apart."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from conformance.programs.judged import Trial, judged
from conformance.programs.operations.lifetimes import comes_late
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

#: More than a counter of 16 bits holds, with a sign or without.
_NUM_COUNTED, _NUM_AT_ONCE = 2**16 + 100, 50
#: After so many a rank says that it goes on: a slow backend may take a minute for all of them.
_NUM_IN_A_PHASE = 100 * _NUM_AT_ONCE
#: Of so many lots of collectives one has elements, and those where a counter ends: the others take less time.
_ONE_OF, _ENDS = {"all_reduce": 8, "broadcast": 4}, tuple(2**bits for bits in range(8, 17))

Begin = Callable[[Tensor, Tensor], list[Any]]


def _counted(scenario: Scenario) -> tuple[str]:
    operation = scenario.arguments["operation"]
    return (f"{_NUM_COUNTED:,} of {operation}, of one element {'or none' if operation in _ONE_OF else 'each'}",)


@judged("many_numbers", _counted)
def many_numbers(ctx: RankContext) -> Mapping[str, Trial]:
    """Broadcast from rank 0, send to the next rank, or sum, one element again and again; each must be the right one.

    By the group's methods: torch's functions take longer than what they call.
    """
    operation = ctx.arguments["operation"]
    given, got, expected = (torch.zeros(_NUM_AT_ONCE, 1, device=ctx.device) for _ in range(3))
    places = torch.arange(float(_NUM_AT_ONCE), device=ctx.device)[:, None]
    pairs = list(zip(given.unbind(), got.unbind(), strict=True))
    empty = [(one, one) for one in torch.zeros(_NUM_AT_ONCE, 0, device=ctx.device).unbind()]
    begin = _beginning(ctx, operation)

    def fill(first: int) -> None:
        torch.add(places, first, out=expected)
        given.copy_(expected)
        got.fill_(-1)
        if operation == "broadcast" and ctx.rank == 0:
            got.copy_(expected)
        if operation == "all_reduce":
            got.copy_(expected + ctx.rank)
            expected.mul_(ctx.world_size).add_(sum(range(ctx.world_size)))

    (name,) = _counted(ctx.scenario)

    def counted() -> str:
        for first in range(0, _NUM_COUNTED, _NUM_IN_A_PHASE):
            with ctx.phase(f"{name}, from the {first:,}th on"):
                if wrong := some(range(first, min(first + _NUM_IN_A_PHASE, _NUM_COUNTED), _NUM_AT_ONCE)):
                    return wrong
        return ""

    def some(lots: range) -> str:
        for first in lots:
            has_elements = _has_elements(operation, first)
            if has_elements:
                fill(first)
            works = [work for pair in (pairs if has_elements else empty) for work in begin(*pair)]
            for work in works:
                work.wait()
            if has_elements and not torch.equal(expected, got):
                place = int((expected != got).nonzero()[0, 0])
                wrong = f"number {first + place} holds {float(got[place]):g}, expected {float(expected[place]):g}"
                is_early = comes_late(lambda: torch.equal(expected, got))
                return wrong + ("; it came later, so that its Work counted as done too early" if is_early else "")
        return ""

    return {name: counted}


def _has_elements(operation: str, first: int) -> bool:
    near = any(abs(first - end) <= 2 * _NUM_AT_ONCE for end in _ENDS)
    return near or first // _NUM_AT_ONCE % _ONE_OF.get(operation, 1) == 0


def _beginning(ctx: RankContext, operation: str) -> Begin:
    """Return what begins the operation with a tensor to give and one to get into."""
    group, following, previous = ctx.process_group, (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    options, summing = c10d.BroadcastOptions(), c10d.AllreduceOptions()
    options.rootRank = options.rootTensor = 0
    beginnings: dict[str, Begin] = {
        "broadcast": lambda given, got: [group.broadcast([got], options)],
        "all_reduce": lambda given, got: [group.allreduce([got], summing)],
        "send_recv": lambda given, got: [group.send([given], following, 0), group.recv([got], previous, 0)],
    }
    return beginnings[operation]
