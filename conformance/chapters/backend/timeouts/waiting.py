"""Programs about ranks that wait for a rank that never calls, or calls late."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from conformance.programs.judged import Trial, judged, unlike
from conformance.programs.operations.description import Place
from conformance.programs.operations.failing import failing_call, go_well
from conformance.programs.operations.judging import Truth
from conformance.programs.operations.store_messages import Board
from conformance.programs.operations.tensors import Tensors
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario
from conformance.waiting.kept_waiting import Stopwatch, process_seconds

#: The timeout under test, how much later it may be raised on a busy machine, and a timeout that is out of reach.
TIMEOUT_S, _LATE_S, _LONG_S = 0.8, 4.0, 100.0
_PATIENCE = timedelta(seconds=TIMEOUT_S + _LATE_S + 1)


def _names(scenario: Scenario) -> tuple[str, ...]:
    whose = scenario.arguments["whose"]
    what = failing_call(scenario).describe()
    first = f"{what}, whose last rank never comes, which must raise after {whose} of {TIMEOUT_S:g} s"
    return (
        first, "a second wait() after it", "the Work after it", "the error of the Work after it",
        "the future of the Work after it",
    )  # fmt: skip


@judged(
    "nobody_comes", _names,
    speaks_for={
        "a second*": ("WORK-05",), "the Work after*": ("WORK-07",), "the error of*": ("WORK-19",),
        "the future of*": ("WORK-12",),
    },
)  # fmt: skip
def nobody_comes(ctx: RankContext) -> Mapping[str, Trial]:
    """Call `operation` on all ranks but the last; `whose` timeout ends it.

    It is the group's, the operation's, wait's, or that of set_timeout.

    The tensors are of `dtype`, with `numel` elements in each part; so many such calls went well `before`, if they can
    have a timeout of their own.
    """
    whose, last = str(ctx.arguments["whose"]), ctx.world_size - 1
    first, second, after, held, future = _names(ctx.scenario)
    cell = replace(failing_call(ctx.scenario), lifetime="wait", path="group")
    place = Place(ctx.rank, ctx.world_size, cell.root)
    seen: dict[str, Any] = {}

    def nobody() -> str:
        short, long = timedelta(seconds=TIMEOUT_S), timedelta(seconds=_LONG_S)
        group: Any = dist.new_group(timeout=short if whose == "the group's timeout" else long)
        if whose == "the timeout of set_timeout":
            group.set_timeout(short)
        board, others = Board("timeout"), range(last)
        go_well(int(ctx.arguments["before"]), cell, place, group, ctx.device, timedelta(seconds=_LONG_S))
        if ctx.rank not in others:
            board.lacking([f"raised/{rank}" for rank in others], _PATIENCE)
            return ""
        own = timedelta(seconds=TIMEOUT_S) if whose == "the operation's timeout" else None
        began, stopwatch, raised = time.monotonic(), Stopwatch(), ""
        try:
            for work in Tensors.of(Truth(cell, place), ctx.device).issue(group, own).works:
                seen["work"] = work
                work.wait(*([timedelta(seconds=TIMEOUT_S)] if whose == "wait's timeout" else []))
        except Exception as error:
            raised = str(error) or type(error).__name__
        took_s, used_s = time.monotonic() - began, stopwatch.seconds
        board.put(f"raised/{ctx.rank}")
        if not cell.what.needs_rank(place, last):
            seen.clear()
            return ""
        if not raised:
            return f"came back after {took_s:.1f} s as if the last rank had come"
        if took_s < TIMEOUT_S * 0.6 or used_s > TIMEOUT_S + _LATE_S:
            seen.clear()
            took = f"{took_s:.1f} s, {used_s:.1f} of which it could use"
            return f"raised after {took}, expected about {TIMEOUT_S:g} s: {raised}"
        return ""

    def of_failed(asked: Callable[[Any], str]) -> Trial:
        return lambda: asked(seen["work"]) if "work" in seen and whose != "wait's timeout" else ""

    def again(work: Any) -> str:
        try:
            work.wait(timedelta(seconds=TIMEOUT_S))
        except Exception:
            return ""
        return "wait() raised nothing the second time"

    def terminal(work: Any) -> str:
        return unlike("is_completed() of a Work that failed is", work.is_completed(), True)

    def failed(work: Any) -> str:
        status = work.is_success(), work.exception() is not None
        return unlike(
            "is_success() of a Work that failed, and whether it has an exception(), are", status, (False, True)
        )

    def of_future(work: Any) -> str:
        try:
            asked = work.get_future()
        except RuntimeError:
            return ""  # that there is one is for others to ask
        if not any(asked.done() for _ in process_seconds(_LATE_S, pause_s=0.01)):
            return f"the future of a Work that failed was still not done after {_LATE_S:g} s"
        try:
            return f"the future of a Work that failed holds {asked.value()}, expected an error"
        except Exception:
            return ""

    trials = {second: again, after: terminal, held: failed, future: of_future}
    return {first: nobody, **{name: of_failed(asked) for name, asked in trials.items()}}


def _slow_name(scenario: Scenario) -> tuple[str, ...]:
    idle = ", in a group that has been idle for longer than that" if "idle_s" in scenario.arguments else ""
    return (f"{failing_call(scenario).describe()} with a rank that is slow, within the timeout{idle}",)


@judged("somebody_is_slow", _slow_name)
def somebody_is_slow(ctx: RankContext) -> Mapping[str, Trial]:
    """Call `operation` on all ranks, on the last one `late_s` later, but within the timeout.

    With `idle_s` the group's timeout is `timeout_s`; for so long nobody calls anything after a first call.
    """
    cell = replace(failing_call(ctx.scenario), lifetime="wait", path="group")
    place = Place(ctx.rank, ctx.world_size, cell.root)

    def slow() -> str:
        group = dist.new_group(timeout=timedelta(seconds=float(ctx.arguments.get("timeout_s", _LONG_S))))
        if idle_s := float(ctx.arguments.get("idle_s", 0.0)):
            dist.barrier(group=group)
            time.sleep(idle_s)
        if ctx.rank == ctx.world_size - 1:
            time.sleep(float(ctx.arguments["late_s"]))
        tensors = Tensors.of(Truth(cell, place), ctx.device)
        for work in tensors.issue(group).works:
            work.wait()
        return tensors.wrong()

    (name,) = _slow_name(ctx.scenario)
    return {name: slow}
