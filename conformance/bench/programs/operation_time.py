"""The program of `ddp-conformance bench --backend`: ranks time an operation of several backends in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from conformance.backends.backend import get_backend
from conformance.bench.programs.step_time import take_turns
from conformance.programs.operations.calls import device_backend, issue, wait_for_device
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import CALLED, Blocks, Place
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth

#: A turn of small messages is this many bytes of them, and no more calls than these.
_BYTES_IN_A_TURN, _MOST_CALLS = 2**18, 20
_ITEM = 4
_TIMEOUT = timedelta(minutes=2)
#: Rows and columns of the matrices multiplied beside an operation; so many operations measure how often.
_COMPUTED, _TRIED = 128, 5


@program_without_truth("operation_time", invariants=(), without_ddp=True)
def operation_time(ctx: RankContext) -> None:
    """Observe seconds of a call of operation `arguments["workload"]`, one for each round. All ranks must call it.

    `<label>/<bytes>` is of one of `arguments["contestants"]`, [label, backend], and of `arguments["sizes"]`; with the
    last size follow `<label>/cpu`, which this process computed, `<label>/computation`, of a computation alone that
    takes about as long as the last contestant's call, and `<label>/beside`, of call and computation begun together.
    The backend under test made the group of the rank; each other contestant makes its own.
    """
    sizes = [int(size) for size in ctx.arguments["sizes"]]
    turns: list[tuple[str, Callable[[], float]]] = []
    last: list[tuple[str, _Call]] = []
    for label, name in ctx.arguments["contestants"]:
        group, device = _group(ctx, label, name)
        for size in sizes:
            call = _Call.of(ctx, group, device, size)
            turns.append((f"{label}/{size}", call.seconds))
        last.append((label, call))
    if CALLED[str(ctx.arguments["workload"])].outputs(Place(0, 2)):
        computation = _Computation.as_long_as(last[-1][1])
        for label, call in last:
            turns += [
                (f"{label}/cpu", partial(call.seconds, time.process_time)),
                (f"{label}/computation", computation.seconds),
                (f"{label}/beside", partial(computation.seconds, call)),
            ]  # fmt: skip
    take_turns(ctx, [(label, _together(ctx, turn)) for label, turn in turns])


def _group(ctx: RankContext, label: str, name: str) -> tuple[Any, torch.device]:
    if not name:
        return device_backend(ctx.process_group, ctx.device), ctx.device
    backend = get_backend(name)
    store = PrefixStore(f"bench/{label}", dist.distributed_c10d._get_default_store())
    device = torch.device(backend.device(ctx.rank))
    return device_backend(backend.create(store, ctx.rank, ctx.world_size, _TIMEOUT), device), device


def _together(ctx: RankContext, turn: Callable[[], float]) -> Callable[[], float]:
    def taken() -> float:
        dist.barrier(ctx.process_group)
        return turn()

    return taken


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation on tensors of one size, as often as one turn has it."""

    issue: Callable[[], tuple[Any, ...]]
    times: int

    @staticmethod
    def of(ctx: RankContext, group: Any, device: torch.device, num_bytes: int) -> _Call:
        """Return the call whose largest tensor, or list of them, has about `num_bytes` on the rank that has most."""
        operation, place = CALLED[str(ctx.arguments["workload"])], Place(ctx.rank, ctx.world_size)
        blocks = max(_num_blocks(place, operation.inputs), _num_blocks(place, operation.outputs), 1)
        numel = max(1, num_bytes // (_ITEM * blocks))
        cell = Cell(operation.name, numel=numel, path="group")
        inputs, outputs = (
            [torch.zeros(sum(block.length for block in tensor) * numel, device=device) for tensor in tensors(place)]
            for tensors in (operation.inputs, operation.outputs)
        )
        times = max(1, min(_MOST_CALLS, _BYTES_IN_A_TURN // num_bytes))
        return _Call(lambda: issue(cell, group, group, place, inputs, outputs).works, times)

    def wait(self) -> None:
        """Issue it, and wait until its tensors can be read."""
        for work in self.issue():
            work.wait()
        wait_for_device()

    def seconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return what one call of a turn takes, after one that does not count."""
        self.wait()
        begin = clock()
        for _ in range(self.times):
            self.wait()
        return (clock() - begin) / self.times


@dataclass(frozen=True, slots=True)
class _Computation:
    """Products of two matrices, as many as take some time."""

    factor: torch.Tensor
    times: int

    @staticmethod
    def as_long_as(call: _Call) -> _Computation:
        """Return the one that takes about as long as `call`; all ranks must call it."""
        once = _Computation(torch.ones(_COMPUTED, _COMPUTED), 1)
        wanted, one = (min(step() for _ in range(_TRIED)) for step in (call.seconds, once.seconds))
        return _Computation(once.factor, max(1, math.ceil(wanted / one)))

    def seconds(self, beside: _Call | None = None) -> float:
        """Return what it takes, and `beside` with it, if given, which is issued first and waited for last."""
        begin = time.perf_counter()
        works = beside.issue() if beside else ()
        for _ in range(self.times):
            torch.mm(self.factor, self.factor)
        for work in works:
            work.wait()
        wait_for_device()
        return time.perf_counter() - begin


def _num_blocks(place: Place, tensors: Callable[[Place], tuple[Blocks, ...]]) -> int:
    """Return how many blocks of one size are in all tensors of the rank that has most of them."""
    ranks = (Place(rank, place.size) for rank in range(place.size))
    return max(sum(block.length for tensor in tensors(rank) for block in tensor) for rank in ranks)
