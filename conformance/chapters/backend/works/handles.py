"""Programs about Works: their state before the last rank has called, and that each call returns another one."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.operations.calls import Issued
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import CALLED, OPERATIONS, Place
from conformance.programs.operations.judging import Truth
from conformance.programs.operations.lifetimes import Patience, complete
from conformance.programs.operations.store_messages import Board
from conformance.programs.operations.tensors import Tensors
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario
from conformance.waiting.kept_waiting import process_seconds

#: The last rank waits so long for is_completed() of the others; a rank without it is still in the call.
_PATIENCE = timedelta(seconds=3)
#: The last rank calls so much later, so that the others have added a callback before.
_LATE_S = 0.05


def _names(scenario: Scenario) -> tuple[str, ...]:
    operation = scenario.arguments["operation"]
    return (f"the call of {operation} before the last rank came", f"is_completed() of {operation} before that")


@judged(
    "calls_before_the_last_rank", _names,
    speaks_for={"the call of*": ("WORK-18",), "is_completed() of*": ("WORK-02",)},
)  # fmt: skip
def calls_before_the_last_rank(ctx: RankContext) -> Mapping[str, Trial]:
    """Issue `operation` on all ranks but the last, which calls when the others have called is_completed(), or too late.

    Each rank calls it twice, because ranks must be counted, and not calls. Ranks that receive nothing from the last one
    may be done before it calls.
    """
    board, last = Board("early"), ctx.world_size - 1
    seen: dict[str, str] = {"call": "", "asked": ""}

    def call() -> str:
        operation = str(ctx.arguments["operation"])
        place = Place(ctx.rank, ctx.world_size, CALLED[operation].root_needing(last))
        cell = Cell(operation, "int64", lifetime="wait", root=place.root)
        both = [Tensors.of(Truth(cell, replace(place, turn=turn)), ctx.device) for turn in range(2)]
        if ctx.rank == last:
            missing = board.lacking([f"asked/{rank}" for rank in range(last)], _PATIENCE)
            board.put("came")
            if missing:
                seen["call"] = (
                    "some rank had not come back from the call, or from is_completed(), when the last one came"
                )
        works = [work for tensors in both for work in tensors.issue(ctx.process_group).works]
        if ctx.rank != last:
            came = board.has("came")
            early = [work.is_completed() for work in works]
            if came:
                seen["call"] = "the call came back only when the last rank had come"
            elif board.has("came"):
                seen["asked"] = "it came back only when the last rank had come"
            elif cell.what.needs_rank(place, last) and (all(early) if cell.what.of_pairs else not early or any(early)):
                seen["asked"] = "the Work was completed" if early else "there was no Work, as if it had been completed"
            board.put(f"asked/{ctx.rank}")
        for work in works:
            work.wait()
        return seen["call"]

    called, asked = _names(ctx.scenario)
    return {called: call, asked: lambda: seen["asked"]}


_KINDS = tuple(name for name, operation in OPERATIONS.items() if not operation.needs)
_OWN = (
    "works in flight at once", "works waited for from the last to the first", "works waited for by two threads",
    "futures of works, once all are done", "results of works, once all are done",
)  # fmt: skip


@judged(
    "works_of_their_own", always(*_OWN),
    speaks_for={_OWN[0]: ("WORK-15",), _OWN[1]: ("WORK-16",), _OWN[2]: ("WORK-04",), "*all are done": ("WORK-15",)},
)  # fmt: skip
def works_of_their_own(ctx: RankContext) -> Mapping[str, Trial]:
    """Issue several operations at once, and wait for them in other orders, also in two threads.

    What a Work and its future hold must be there still when later operations are done.
    """

    def begin() -> list[tuple[Tensors, Issued]]:
        begun = []
        for turn in range(12):
            cell = Cell(_KINDS[turn % len(_KINDS)], "int64", numel=10 + turn, lifetime="wait")
            tensors = Tensors.of(Truth(cell, Place(ctx.rank, ctx.world_size, turn=turn)), ctx.device)
            begun.append((tensors, tensors.issue(ctx.process_group)))
        return begun

    def wrong(tensors: Tensors) -> str:
        found = tensors.wrong()
        return found and f"of {tensors.truth.cell.operation} {found}"

    def wait(trial: str, tensors: Tensors, issued: Issued) -> None:
        with ctx.phase(f"{trial}, in wait() of {tensors.truth.cell.operation}"):
            for work in issued.works:
                work.wait()

    def at_once() -> str:
        begun = begin()
        works = [work for _, issued in begun for work in issued.works]
        if len({id(work) for work in works}) != len(works):
            return "two calls gave the same Work"
        clauses = []
        for tensors, issued in begun:
            wait(_OWN[0], tensors, issued)
            clauses.append(wrong(tensors))
        return first_wrong(*clauses)

    def backwards() -> str:
        begun = begin()
        for tensors, issued in reversed(begun):
            wait(_OWN[1], tensors, issued)
        return first_wrong(*(wrong(tensors) for tensors, _ in begun))

    def in_threads() -> str:
        begun = begin()
        answers: list[Any] = []

        def wait_for_all() -> None:
            answers.extend(work.wait() for _, issued in begun for work in issued.works)

        threads = [threading.Thread(target=wait_for_all) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        number = 2 * sum(len(issued.works) for _, issued in begun)
        values = first_wrong(*(wrong(tensors) for tensors, _ in begun))
        return values or unlike("two threads' waits gave", answers, [True] * number)

    def held(lifetime: str) -> str:
        begun = begin()
        for tensors, issued in begun:
            wait(_OWN[0], tensors, issued)
        clauses = []
        for tensors, issued in begun:
            found = complete(issued, lifetime, lambda: None, Patience())
            clauses.append(found and f"of {tensors.truth.cell.operation} {found}")
        return first_wrong(*clauses)

    trials = (at_once, backwards, in_threads, partial(held, "value"), partial(held, "result"))
    return dict(zip(_OWN, trials, strict=True))


_CALLBACKS = tuple(f"a callback of {operation} that waits for an all_reduce" for operation in _KINDS)


@judged("callbacks_that_wait", always(*_CALLBACKS))
def callbacks_that_wait(ctx: RankContext) -> Mapping[str, Trial]:
    """Have a callback of a future call an all_reduce, and wait for it; the last rank comes late."""
    size = ctx.world_size

    def waits(operation: str) -> str:
        summed = torch.full((3,), float(ctx.rank), device=ctx.device)

        def reduce(future: Any) -> torch.Tensor:
            work: Any = dist.all_reduce(summed, group=ctx.process_group, async_op=True)
            work.wait()
            return summed  # whoever waits for it waits on a device, too, for what this thread's stream has waited for

        if ctx.rank == size - 1:
            time.sleep(_LATE_S)
        cell = Cell(operation, lifetime="future")
        (work,) = Tensors.of(Truth(cell, Place(ctx.rank, size)), ctx.device).issue(ctx.process_group).works
        result = work.get_future().then(reduce).wait()
        return unlike("the sum of all_reduce is", result, [float(sum(range(size)))] * 3)

    return {name: partial(waits, operation) for name, operation in zip(_CALLBACKS, _KINDS, strict=True)}


_STATUS = (
    "is_success() of all_reduce after wait()", "exception() of all_reduce after wait()",
    "result() of all_reduce after wait()", "wait(timeout) of all_reduce in time",
    "is_completed() of barrier without wait()",
)  # fmt: skip


@judged(
    "status_of_works", always(*_STATUS),
    speaks_for={
        _STATUS[0]: ("WORK-06",), _STATUS[1]: ("WORK-06",), _STATUS[2]: ("WORK-08",), _STATUS[3]: ("WORK-04",),
        _STATUS[4]: ("WORK-03",),
    },
)  # fmt: skip
def status_of_works(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask a Work that is done for its status and its result."""

    def done() -> tuple[Any, torch.Tensor]:
        tensor = torch.full((4,), float(ctx.rank), device=ctx.device)
        work: Any = dist.all_reduce(tensor, group=ctx.process_group, async_op=True)
        work.wait()
        return work, tensor

    def result() -> str:
        work, tensor = done()
        held = work.result()
        ours = not held or (len(held) == 1 and torch.equal(held[0], tensor))
        return "" if ours else f"result() gives {held}, expected the sum {tensor.tolist()} or nothing"

    def in_time() -> str:
        tensor = torch.ones(4, device=ctx.device)
        if ctx.rank == ctx.world_size - 1:
            time.sleep(0.1)
        work: Any = dist.all_reduce(tensor, group=ctx.process_group, async_op=True)
        answer = work.wait(timedelta(seconds=60))
        return unlike("wait(timeout) gave", answer, True) or unlike("sum", tensor, [float(ctx.world_size)] * 4)

    def barrier() -> str:
        work: Any = dist.barrier(group=ctx.process_group, async_op=True)
        for _ in process_seconds(_PATIENCE.total_seconds(), pause_s=0.01):
            if work.is_completed():
                break
        asked = work.is_completed()
        work.wait()
        return unlike(
            "is_completed() of barrier, before wait() and after it, is", (asked, work.is_completed()), (True, True)
        )

    return {
        _STATUS[0]: lambda: unlike("is_success() is", done()[0].is_success(), True),
        _STATUS[1]: lambda: unlike("exception() is", done()[0].exception(), None),
        _STATUS[2]: result,
        _STATUS[3]: in_time,
        _STATUS[4]: barrier,
    }


_MAY_TELL = (
    "all_reduce after block_current_stream()", "the result in get_future_result() of all_reduce",
    "_get_duration() of all_reduce", "_get_sequence_number() of two all_reduces",
)  # fmt: skip


@judged("what_works_may_tell", always(*_MAY_TELL))
def what_works_may_tell(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask Works what few have an answer to, and some versions of torch have no method for; an error is right, too."""
    group: Any = ctx.process_group

    def begin() -> tuple[Any, torch.Tensor]:
        tensor = torch.full((50_000,), float(ctx.rank + 1), device=ctx.device)
        if ctx.rank == ctx.world_size - 1:
            time.sleep(_LATE_S)
        return dist.all_reduce(tensor, group=group, async_op=True), tensor

    def asking(ask: Callable[[], str]) -> str:
        try:
            return ask()
        except (AttributeError, RuntimeError):
            return ""

    def blocked() -> str:
        work, tensor = begin()

        def ask() -> str:
            work.block_current_stream()
            total = float(sum(range(1, ctx.world_size + 1)))
            return unlike("wrong elements of the sum:", int((tensor != total).sum()), 0)

        found = asking(ask)
        work.wait()
        return found

    def result() -> str:
        work, _ = begin()

        def ask() -> str:
            future = work.get_future_result()
            work.wait()
            if not any(future.done() for _ in process_seconds(_PATIENCE.total_seconds(), pause_s=0.01)):
                return "its future is not done, although the Work is"
            return unlike("it is", int(future.value()), int(torch._C._distributed_c10d.WorkResult.SUCCESS))  # type: ignore[attr-defined]

        found = asking(ask)
        work.wait()
        return found

    def duration() -> str:
        asking(lambda: group._enable_collectives_timing() or "")
        began = time.monotonic()
        work, _ = begin()
        work.wait()

        def ask() -> str:
            told_ms, took_ms = work._get_duration(), 1000 * (time.monotonic() - began)
            return "" if 0 <= told_ms <= took_ms else f"it is {told_ms} ms of a call that took {took_ms:.0f} ms"

        return asking(ask)

    def numbers() -> str:
        works = [begin()[0] for _ in range(2)]
        for work in works:
            work.wait()

        def ask() -> str:
            first, second = (work._get_sequence_number() for work in works)
            return "" if first < second else f"they are {first} and {second}, and the second call came later"

        return asking(ask)

    return dict(zip(_MAY_TELL, (blocked, result, duration, numbers), strict=True))
