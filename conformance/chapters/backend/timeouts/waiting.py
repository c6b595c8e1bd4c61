"""Programs about what becomes of those who wait for a rank that does not come, or comes late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from conformance.programs.judged import Trial, judged, unlike
from conformance.programs.operations.hearsay import Board
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

#: The timeout under test, and how much later it may come on a busy machine; and a timeout that is out of reach.
TIMEOUT_S, _LATE_S, _LONG_S = 0.8, 4.0, 100.0
_PATIENCE = timedelta(seconds=TIMEOUT_S + _LATE_S + 1)

Call = Callable[[RankContext, Any, timedelta | None], Any]


def _tensor(ctx: RankContext) -> torch.Tensor:
    return torch.ones(8, device=ctx.device)


def _options(kind: Callable[[], Any], timeout: timedelta | None, **values: Any) -> Any:
    options = kind()
    for name, value in {**values, **({} if timeout is None else {"timeout": timeout})}.items():
        setattr(options, name, value)
    return options


def _slots(ctx: RankContext) -> list[torch.Tensor]:
    return [_tensor(ctx) for _ in range(ctx.world_size)]


#: What the ranks but the last one call, by the group's method, with a timeout of the operation's own if there is one.
CALLS: Mapping[str, Call] = {
    "all_reduce": lambda ctx, group, own: group.allreduce([_tensor(ctx)], _options(c10d.AllreduceOptions, own)),
    "broadcast": lambda ctx, group, own: group.broadcast(
        [_tensor(ctx)], _options(c10d.BroadcastOptions, own, rootRank=ctx.world_size - 1)
    ),
    "all_gather": lambda ctx, group, own: group.allgather(
        [_slots(ctx)], [_tensor(ctx)], _options(c10d.AllgatherOptions, own)
    ),
    "reduce": lambda ctx, group, own: group.reduce([_tensor(ctx)], _options(c10d.ReduceOptions, own, rootRank=0)),
    "gather": lambda ctx, group, own: group.gather(
        [_slots(ctx)] if ctx.rank == 0 else [], [_tensor(ctx)], _options(c10d.GatherOptions, own, rootRank=0)
    ),
    "scatter": lambda ctx, group, own: group.scatter(
        [_tensor(ctx)], [], _options(c10d.ScatterOptions, own, rootRank=ctx.world_size - 1)
    ),
    "all_to_all_single": lambda ctx, group, own: group.alltoall_base(
        torch.ones(2 * ctx.world_size), torch.ones(2 * ctx.world_size), [], [], _options(c10d.AllToAllOptions, own)
    ),
    "reduce_scatter_single": lambda ctx, group, own: group._reduce_scatter_base(
        _tensor(ctx), torch.ones(8 * ctx.world_size), _options(c10d.ReduceScatterOptions, own)
    ),
    "barrier": lambda ctx, group, own: group.barrier(_options(c10d.BarrierOptions, own)),
    "recv": lambda ctx, group, own: group.recv([_tensor(ctx)], ctx.world_size - 1, 0),
}
#: Of these only the root waits, or only the others.
_WAITS: Mapping[str, Callable[[int], bool]] = {"gather": lambda rank: rank == 0, "reduce": lambda rank: rank == 0}


def _names(scenario: Scenario) -> tuple[str, ...]:
    operation, whose = scenario.arguments["operation"], scenario.arguments["whose"]
    first = f"{operation} whose last rank never comes, which must raise after {whose} of {TIMEOUT_S:g} s"
    return (first, "a second wait() after it", "the Work after it", "the error of the Work after it")


@judged(
    "nobody_comes", _names,
    speaks_for={"a second*": ("WORK-05",), "the Work after*": ("WORK-07",), "the error of*": ("WORK-19",)},
)  # fmt: skip
def nobody_comes(ctx: RankContext) -> Mapping[str, Trial]:
    """Call `operation` on all ranks but the last; `whose` timeout ends it: the group's, the operation's or wait's."""
    operation, whose = str(ctx.arguments["operation"]), str(ctx.arguments["whose"])
    first, second, after, held = _names(ctx.scenario)
    waits = _WAITS.get(operation, lambda rank: True)
    seen: dict[str, Any] = {}

    def nobody() -> str:
        of_group = timedelta(seconds=TIMEOUT_S if whose == "the group's timeout" else _LONG_S)
        group = dist.new_group(timeout=of_group)
        board, others = Board("timeout"), range(ctx.world_size - 1)
        if ctx.rank not in others:
            board.lacking([f"raised/{rank}" for rank in others], _PATIENCE)
            return ""
        own = timedelta(seconds=TIMEOUT_S) if whose == "the operation's timeout" else None
        began, raised = time.monotonic(), ""
        try:
            work = CALLS[operation](ctx, group, own)
            seen["work"] = work
            if whose == "wait's timeout":
                work.wait(timedelta(seconds=TIMEOUT_S))
            else:
                work.wait()
        except Exception as error:
            raised = str(error) or type(error).__name__
        took_s = time.monotonic() - began
        board.put(f"raised/{ctx.rank}")
        if not waits(ctx.rank):
            seen.clear()
            return ""
        if not raised:
            return f"came back after {took_s:.1f} s as if the last rank had come"
        if not TIMEOUT_S * 0.6 <= took_s <= TIMEOUT_S + _LATE_S:
            seen.clear()
            return f"raised after {took_s:.1f} s, expected about {TIMEOUT_S:g} s: {raised}"
        return ""

    def again() -> str:
        if "work" not in seen or whose == "wait's timeout":
            return ""
        try:
            seen["work"].wait(timedelta(seconds=TIMEOUT_S))
        except Exception:
            return ""
        return "wait() raised nothing the second time"

    def terminal() -> str:
        if "work" not in seen or whose == "wait's timeout":
            return ""
        return unlike("is_completed() of a Work that failed is", seen["work"].is_completed(), True)

    def failed() -> str:
        if "work" not in seen or whose == "wait's timeout":
            return ""
        status = seen["work"].is_success(), seen["work"].exception() is not None
        return unlike(
            "is_success() of a Work that failed, and whether it has an exception(), are", status, (False, True)
        )

    return {first: nobody, second: again, after: terminal, held: failed}


def _slow_name(scenario: Scenario) -> tuple[str, ...]:
    idle = ", in a group that has been idle for longer than that" if "idle_s" in scenario.arguments else ""
    return (f"{scenario.arguments['operation']} with a rank that is slow, within the timeout{idle}",)


@judged("somebody_is_slow", _slow_name)
def somebody_is_slow(ctx: RankContext) -> Mapping[str, Trial]:
    """Call `operation` on all ranks, on the last one late, but within the timeout.

    With `idle_s` the group's timeout is `timeout_s`; for so long nobody calls anything after a first call.
    """
    operation, late_s = str(ctx.arguments["operation"]), float(ctx.arguments.get("late_s", 0.4))

    def slow() -> str:
        group = dist.new_group(timeout=timedelta(seconds=float(ctx.arguments.get("timeout_s", _LONG_S))))
        if idle_s := float(ctx.arguments.get("idle_s", 0.0)):
            dist.barrier(group=group)
            time.sleep(idle_s)
        if ctx.rank == ctx.world_size - 1:
            time.sleep(late_s)
        tensor = torch.full((3,), float(ctx.rank + 1), device=ctx.device)
        if operation == "barrier":
            dist.barrier(group=group)
            return ""
        dist.all_reduce(tensor, group=group)
        return unlike("the sum of all_reduce is", tensor, [float(sum(range(1, ctx.world_size + 1)))] * 3)

    (name,) = _slow_name(ctx.scenario)
    return {name: slow}
