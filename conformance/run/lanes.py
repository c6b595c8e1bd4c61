"""Lanes: processes that work on the parts of one task side by side, each with what it makes for itself, such as ranks.

One controller needs a processor of its own for about every five that its ranks use, to decode and to judge. So a lane
has a whole one, and this process only hands out work and gathers results.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, groupby
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TypeVar

from conformance.backends.backend import Backend
from conformance.errors import ConformanceError, instance
from conformance.scenario import Scenario
from conformance.waiting.limits import END_TIMEOUT_S
from conformance.workers.forked import die_with

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Works in a lane: takes tasks until there are no more, and hands over results in any order. It ends its ranks before
#: it raises.
Work = Callable[[Iterator[Task], Callable[[Result], None]], None]

#: A lane runs several scenarios at once while processors are idle. Of 16, four lanes judged 38 scenarios a second, two
#: 31, eight 30 and thirteen 31: more of them only take the kernel longer for each fork (torch 2.11, chapter gradients).
_PROCESSORS_OF_A_LANE = 4
#: One lane leaves a third of two processors idle; two took 0.87 of its time (torch 2.13, 2 cores, four selections).
_FEWEST_LANES = 2
#: Memory of a lane's zygote and the warm ranks of its two DDPs, also if they compile.
_BYTES_OF_A_LANE = 2 * 2**30
#: Memory on a device that lanes share: up to 1.1 GiB each (CUDA 13, NCCL 2.28), and as much for their tensors.
_DEVICE_BYTES_OF_A_LANE = 10 * 2**30
#: More than these only wait for each other: an H100 judged 2.3 scenarios a second for five lanes, 1.2 for nine.
_MOST_LANES_OF_A_DEVICE = 4
#: A lane begins with ranks that have run nothing, which takes as long as some scenarios.
_FEWEST_IN_A_LANE = 16
#: So many scenarios at most go to a lane at once: fewer leave it more often with new ranks, more leave others idle.
_MOST_IN_A_BATCH = 8


class LaneError(ConformanceError):
    """A lane has ended before its work was done."""


class Enough(Exception):  # noqa: N818 - how who takes results ends lanes, not an error
    """Whoever takes results wants no more."""


def num_lanes(
    backend: Backend, num_scenarios: int | None = None, *, processors_each: int = _PROCESSORS_OF_A_LANE
) -> int:
    """Return for how many lanes this machine has the processors and the memory, its devices' included.

    With so few scenarios that a lane would not be worth its start, fewer. A lane keeps `processors_each` busy; where
    there are two processors, there are two lanes.
    """
    processors = len(os.sched_getaffinity(0))
    lanes = max(processors // processors_each, min(processors, _FEWEST_LANES))
    lanes = min(lanes, _available_bytes() // _BYTES_OF_A_LANE)
    if not backend.runs_side_by_side:
        lanes = min(lanes, (backend.device_bytes() or 0) // _DEVICE_BYTES_OF_A_LANE, _MOST_LANES_OF_A_DEVICE)
    if num_scenarios is not None:
        lanes = min(lanes, num_scenarios // _FEWEST_IN_A_LANE)
    return max(1, lanes)


def batches_of(scenarios: tuple[Scenario, ...]) -> list[tuple[int, ...]]:
    """Return the places of `scenarios` in the parts that lanes get.

    Neighbours on ranks of the same kind stay together: each lane begins its own.
    """
    together = groupby(range(len(scenarios)), lambda place: scenarios[place].kind_of_ranks)
    return [
        places[start : start + _MOST_IN_A_BATCH]
        for places in (tuple(group) for _, group in together)
        for start in range(0, len(places), _MOST_IN_A_BATCH)
    ]


def in_lanes(
    work: Work[Task, Result], batches: Iterable[Iterable[Task]], jobs: int, take: Callable[[Result], None]
) -> None:
    """Fork `jobs` lanes that `work`, and call `take` with each result when it arrives, until all lanes have ended.

    A lane gets one batch after the other, in order, and requests the next one when it has taken the last task of a
    batch. Errors of `work` and `take` are raised here after all lanes have ended, but for `Enough`, which only ends
    them. Tasks and results must be picklable; `work` is not sent. With one lane, this process works itself. Fork before
    anything here computes in several threads.
    """
    with suppress(Enough):
        if jobs == 1:
            work(chain.from_iterable(batches), take)
        else:
            _fork_lanes(work, iter(batches), jobs, take)


def _fork_lanes(
    work: Work[Task, Result], waiting: Iterator[Iterable[Task]], jobs: int, take: Callable[[Result], None]
) -> None:
    context = get_context("fork")
    lanes: dict[Connection, ForkProcess] = {}
    try:
        for _ in range(jobs):
            ours, theirs = Pipe()
            process = context.Process(target=_serve_lane, args=(work, theirs, [ours, *lanes], os.getpid()))
            process.start()
            theirs.close()
            lanes[ours] = process
        while lanes:
            for connection in wait(list(lanes)):
                _take_message(instance(connection, Connection), lanes, waiting, take)
    finally:
        for connection, process in lanes.items():
            process.terminate()
            connection.close()
        for process in lanes.values():
            process.join(END_TIMEOUT_S)
            process.kill()
            process.join()


def _take_message(
    connection: Connection,
    lanes: dict[Connection, ForkProcess],
    waiting: Iterator[Iterable[Task]],
    take: Callable[[Result], None],
) -> None:
    """Take one message of a lane: a result, the wish for a batch, an error, or the end of its work."""
    try:
        kind, content = connection.recv()
    except (EOFError, OSError):
        process = lanes.pop(connection)
        process.join()
        raise LaneError(f"a lane ended before its work was done, with exit code {process.exitcode}") from None
    match kind:
        case "result":
            take(content)
        case "more":
            with suppress(BrokenPipeError):  # its result or error arrives next
                connection.send(tuple(next(waiting, ())))
        case "error":
            raise content
        case _:
            lanes.pop(connection).join()
            connection.close()


def _serve_lane(work: Work[Task, Result], connection: Connection, others: list[Connection], parent: int) -> None:
    """Be a lane, and end this process. Only what `work` has made for itself is cleaned up: the rest is the parent's."""
    import torch

    die_with(parent)  # at once, and not when it is next asked for something: it holds the report's lock
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the lanes
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave)
        for other in others:
            other.close()  # else the lanes would keep each other from noticing that this process is gone
        torch.set_num_threads(1)  # threads that the parent computed with are not here
        try:
            work(_asked_for(connection), lambda result: connection.send(("result", result)))
        except Exception as error:
            connection.send(("error", error))
        else:
            connection.send(("end", None))
        status = 0
    except (OSError, SystemExit):
        pass  # the parent is gone, or wants no more
    finally:
        os._exit(status)


def _leave(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def _asked_for(connection: Connection) -> Iterator[Task]:
    while True:
        connection.send(("more", None))
        batch = connection.recv()
        if not batch:
            return
        yield from batch


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _BYTES_OF_A_LANE
