"""Program `lost_peer`: what becomes of an operation, and of those who wait in it, when the last rank meets its fate."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.checkers.explanation import shorten
from conformance.programs.judged import Trial, judged, unlike
from conformance.programs.operations.calls import Issued
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import Place
from conformance.programs.operations.failing import failing_call, go_well
from conformance.programs.operations.judging import Truth
from conformance.programs.operations.lifetimes import Patience, complete
from conformance.programs.operations.store_messages import Board, all_texts
from conformance.programs.operations.tensors import Tensors
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario
from conformance.waiting.kept_waiting import Stopwatch

#: What happens to the last rank: the kind of a fault, which strikes in the phase of this name; it leaves by itself.
FATES: Mapping[str, str] = {"late": "slow", "stopped": "stop", "killed": "kill", "raising": "raise", "leaving": ""}
#: The timeout of the group that loses a rank; one that is clearly longer than an immediate error, and when that is no
#: longer immediate; and how much later than the timeout an error may be raised.
TIMEOUT_S, FAR_TIMEOUT_S, _AT_ONCE_S, _LATE_S = 0.5, 20.0, 10.0, 4.0
_LONG = timedelta(seconds=100)
#: So long the last rank waits for the others to issue; one whose backend has no asynchronous calls waits in vain.
_HEAD_START = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class _Names:
    """What the trials of a scenario are called."""

    first: str
    others: str
    destroyed: str

    @staticmethod
    def of(scenario: Scenario) -> _Names:
        given = scenario.arguments
        how = "asynchronous, " if given["calling"] == "async" else ""
        call = f"{failing_call(scenario).describe()}, {how}last rank {given['fate']}"
        return _Names(call, "a group without the last rank, after it", "destroying the group, after it")

    def in_order(self, scenario: Scenario) -> tuple[str, ...]:
        return (self.first,) if scenario.arguments["fate"] == "late" else (self.first, self.others, self.destroyed)


@judged(
    "lost_peer",
    lambda scenario: _Names.of(scenario).in_order(scenario),
    speaks_for={"a group without*": ("FATE-06",), "destroying*": ("FATE-07",)},
)
def lost_peer(ctx: RankContext) -> Mapping[str, Trial]:
    """Call `operation` in a group whose last rank meets its `fate`, `calling` it sync or async; all ranks run it.

    The tensors are of `dtype`, with `numel` elements in each part; so many such calls went well `before`, if they can
    have their own timeout. Asynchronously, the other ranks call before the fate, otherwise after it. An error that is
    raised too late is reported as late, and a hang ends with the scenario's deadline. A late rank is late by `late_s`,
    if given, besides the scenario's fault. `at_once`: the error of a killed peer is raised long before the timeout.
    """
    names = _Names.of(ctx.scenario)
    peers = _Peers(ctx)
    hosts = set(all_texts("host", os.uname().nodename, ctx.rank, peers.everybody))
    if ctx.arguments["fate"] == "stopped" and len(hosts) > 1:
        ctx.unsupported("a rank that is stopped is continued by one of the same host")
    trials = {names.first: peers.meet, names.others: peers.use_the_rest, names.destroyed: peers.destroy}
    return {name: trials[name] for name in names.in_order(ctx.scenario)}


class _Peers:
    """One rank's part, with the two groups: that of everybody, and that of those who remain."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx, self._fate = ctx, str(ctx.arguments["fate"])
        self._timeout_s = FAR_TIMEOUT_S if ctx.arguments.get("at_once") else TIMEOUT_S
        self._patience = timedelta(seconds=self._timeout_s + _LATE_S + 1)
        self.everybody = range(ctx.world_size)
        self._last = ctx.world_size - 1
        self._others = self.everybody[:-1]
        self._board = Board("fates")
        patient = self._fate == "late"
        self._group: Any = dist.new_group(timeout=_LONG if patient else timedelta(seconds=self._timeout_s))
        self._rest: Any = dist.new_group(list(self._others), timeout=_LONG)
        patient_call = dist.AllreduceOptions()
        patient_call.timeout = _LONG  # the first call connects, however lazily, on a machine that may be busy
        self._group.allreduce([torch.ones(1, device=ctx.device)], patient_call).wait()
        lifetime = "wait" if ctx.arguments["calling"] == "async" else "sync"
        self._cell = replace(failing_call(ctx.scenario), lifetime=lifetime)
        place = Place(ctx.rank, ctx.world_size, self._cell.root)
        go_well(int(ctx.arguments["before"]), self._cell, place, self._group, ctx.device, _LONG)

    def meet(self) -> str:
        """Call the operation, or meet the fate; returns what is wrong."""
        is_async = self._ctx.arguments["calling"] == "async"
        if self._ctx.rank == self._last:
            if is_async:
                self._board.lacking([f"issued/{rank}" for rank in self._others], _HEAD_START)
            return self._meet_its_fate()
        if not is_async:
            self._board.lacking(["going"], self._patience)
        call = _Call(self._ctx, self._group, self._cell)
        stopwatch = Stopwatch()
        try:
            call.issue()
            self._board.put(f"issued/{self._ctx.rank}")
            call.wait()
        except Exception as error:
            self._board.put(f"issued/{self._ctx.rank}")
            return self._judge_error(error, stopwatch.seconds)
        if self._fate == "late" or not call.depends_on(self._last):
            return call.wrong() if self._fate == "late" else ""
        return f"came back after {stopwatch.seconds:.1f} s as if rank {self._last} had called; {call.found()}"

    def use_the_rest(self) -> str:
        """Reduce among those who remain."""
        if self._ctx.rank == self._last:
            return ""
        tensor = torch.full((3,), float(self._ctx.rank + 1), device=self._ctx.device)
        dist.all_reduce(tensor, group=self._rest)
        return unlike("the sum of all_reduce is", tensor, [float(sum(range(1, self._last + 1)))] * 3)

    def destroy(self) -> str:
        """Destroy the group; then who is stopped may go on."""
        if self._ctx.rank == self._last:
            if self._fate != "leaving":
                dist.destroy_process_group(self._group)
            return ""
        try:
            dist.destroy_process_group(self._group)
        finally:
            self._board.put(f"done/{self._ctx.rank}")
        if self._fate == "stopped" and self._ctx.rank == 0:
            self._board.lacking([f"done/{rank}" for rank in self._others], self._patience)
            os.kill(int(self._board.read("going")), signal.SIGCONT)
        return ""

    def _meet_its_fate(self) -> str:
        if self._fate == "leaving":
            dist.destroy_process_group(self._group)
        self._board.put("going", str(os.getpid()))
        try:
            with self._ctx.phase(self._fate):  # where the scenario's fault strikes
                time.sleep(float(self._ctx.arguments.get("late_s", 0.0)))
        except RuntimeError:
            if self._fate != "raising":
                raise
        if self._fate == "late":
            call = _Call(self._ctx, self._group, self._cell)
            call.issue()
            call.wait()
            return call.wrong()
        self._board.lacking([f"done/{rank}" for rank in self._others], self._patience)
        return ""

    def _judge_error(self, error: Exception, took_s: float) -> str:
        text = f"{type(error).__name__}: {shorten(str(error))}"
        if self._fate == "late":
            return f"raised {text}, although the rank came within the timeout"
        if not str(error):
            return f"raised {type(error).__name__} without a word"
        if self._ctx.arguments.get("at_once") and took_s > _AT_ONCE_S:
            return f"raised after {took_s:.1f} s, as if the timeout alone told that rank {self._last} is dead: {text}"
        if took_s > self._timeout_s + _LATE_S:
            return f"raised after {took_s:.1f} s, and the group's timeout is {self._timeout_s:g} s: {text}"
        return ""


class _Call:
    """One operation with its tensors."""

    def __init__(self, ctx: RankContext, group: Any, cell: Cell) -> None:
        place = Place(ctx.rank, ctx.world_size, cell.root)
        self._tensors = Tensors.of(Truth(cell, place), ctx.device)
        self._group, self._issued = group, Issued((), ())

    def depends_on(self, rank: int) -> bool:
        """Whether this rank cannot have got its result without what `rank` sends."""
        truth = self._tensors.truth
        return truth.cell.what.needs_rank(truth.place, rank)

    def issue(self) -> None:
        """Call the operation; without async_op, that waits."""
        self._issued = self._tensors.issue(self._group)

    def wait(self) -> None:
        """Wait for what is under way: for a message that is to come before one that is sent, which may be done."""
        if works := self._issued.works[::-1]:
            complete(Issued(works, self._issued.outputs), "wait", lambda: None, Patience())

    def wrong(self) -> str:
        """Return what is wrong with the results; empty if nothing is."""
        return self._tensors.wrong()

    def found(self) -> str:
        """Return what the results hold, for a sentence."""
        return self.wrong() or "it holds what would be right"
