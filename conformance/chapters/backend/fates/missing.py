"""Programs about ranks that never join a new group or a monitored barrier; and about abort."""

import re
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.checkers.explanation import shorten
from conformance.programs.judged import Trial, always, judged
from conformance.programs.operations.store_messages import Board
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario
from conformance.waiting.kept_waiting import Stopwatch, process_seconds

#: The timeout under test; how much later an error may come on a busy machine; a timeout that is out of reach.
_TIMEOUT_S, _LATE_S, _LONG_S = 1.0, 5.0, 100.0
_PATIENCE = timedelta(seconds=_TIMEOUT_S + _LATE_S + 1)


@judged("group_of_the_dead", always("a new group, one of whose ranks is dead"))
def group_of_the_dead(ctx: RankContext) -> Mapping[str, Trial]:
    """Make a group for which the last rank does not come any more."""

    def made() -> str:
        if ctx.rank == ctx.world_size - 1:
            with ctx.phase("killed"):  # where the scenario's fault strikes
                pass
        stopwatch = Stopwatch()
        try:
            group = dist.new_group(timeout=timedelta(seconds=_TIMEOUT_S))
            dist.all_reduce(torch.ones(1, device=ctx.device), group=group)  # for backends that connect when asked to
        except Exception as error:
            took_s = stopwatch.seconds
            if took_s <= 2 * _TIMEOUT_S + _LATE_S:  # making it and using it may each take one
                return ""
            return f"raised after {took_s:.1f} s, expected about {_TIMEOUT_S:g} s: {shorten(str(error))}"
        return f"was made, and reduced without rank {ctx.world_size - 1}"

    return {"a new group, one of whose ranks is dead": made}


def _barrier_names(scenario: Scenario) -> tuple[str, ...]:
    every = "all of whom are to be named" if scenario.arguments["name_all"] else "one of whom is to be named"
    return (f"a monitored barrier that ranks do not enter, {every}",)


@judged("barrier_of_the_missing", _barrier_names)
def barrier_of_the_missing(ctx: RankContext) -> Mapping[str, Trial]:
    """Enter a monitored barrier on the first half of the ranks; with `name_all`, all others are to be named."""
    missing = range((ctx.world_size + 1) // 2, ctx.world_size)
    name_all = bool(ctx.arguments["name_all"])

    def entered() -> str:
        group: Any = dist.new_group(timeout=timedelta(seconds=_LONG_S))
        board, others = Board("monitored"), range(missing.start)
        if ctx.rank in missing:
            board.lacking([f"out/{rank}" for rank in others], _PATIENCE)
            return ""
        try:
            group.monitored_barrier(timedelta(seconds=_TIMEOUT_S), name_all)
        except Exception as error:
            return _names_wrongly(str(error)) if ctx.rank == 0 else ""
        finally:
            board.put(f"out/{ctx.rank}")
        return "returned as if all ranks had come"

    def _names_wrongly(text: str) -> str:
        named = [rank for rank in missing if re.search(rf"(?<!\d){rank}(?!\d)", text)]
        wanted = list(missing) if name_all else named[:1] or [missing.start]
        return "" if set(wanted) <= set(named) else f"does not name rank(s) {wanted}: {shorten(text)}"

    (name,) = _barrier_names(ctx.scenario)
    return {name: entered}


@judged("abort_of_waiters", always("works for which a rank never comes, after abort()"))
def abort_of_waiters(ctx: RankContext) -> Mapping[str, Trial]:
    """Wait in threads for two operations that the last rank never calls, and abort the group meanwhile."""

    def aborted() -> str:
        group: Any = dist.new_group(timeout=timedelta(seconds=_LONG_S))
        dist.all_reduce(torch.ones(1, device=ctx.device), group=group)
        board, others = Board("abort"), range(ctx.world_size - 1)
        if ctx.rank not in others:
            board.lacking([f"out/{rank}" for rank in others], _PATIENCE)
            return ""
        tensors = [torch.ones(4, device=ctx.device) for _ in range(2)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        ends: list[str] = []
        threads = [threading.Thread(target=_wait, args=(work, ends), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        group.abort()
        for _ in process_seconds(_LATE_S, pause_s=0.01):
            if not any(thread.is_alive() for thread in threads):
                break
        board.put(f"out/{ctx.rank}")
        if any(thread.is_alive() for thread in threads):
            return f"{len(works) - len(ends)} of {len(works)} wait()s still waited {_LATE_S:g} s after abort()"
        return "wait() returned as if the last rank had called" if "" in ends else ""

    return {"works for which a rank never comes, after abort()": aborted}


def _wait(work: Any, ends: list[str]) -> None:
    try:
        work.wait()
    except Exception as error:
        ends.append(str(error) or type(error).__name__)
    else:
        ends.append("")
