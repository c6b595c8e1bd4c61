"""Lanes: processes that work on the parts of one task side by side, each with what it makes for itself, such as ranks.

One controller needs a processor of its own for about every five that its ranks use, to decode and to judge. So a lane
has a whole one, and this process only hands out work and gathers what comes of it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from conformance.backends.backend import Backend
from conformance.errors import ConformanceError, instance
from conformance.workers.forked import die_with

Task = TypeVar("Task")
Result = TypeVar("Result")

#: What works in a lane: takes tasks until there are no more, and yields results in any order.
#: A generator, so that closing it ends its ranks.
Work = Callable[[Iterator[Task]], Generator[Result]]

#: A lane runs several scenarios at once while processors are idle. Of 16, four lanes judged 38 scenarios a second, two
#: 31, eight 30 and thirteen 31: more of them only take the kernel longer for each fork (torch 2.11, chapter gradients).
_PROCESSORS_OF_A_LANE = 4
#: One lane leaves a third of two processors idle; two took 0.87 of its time (torch 2.13, 2 cores, four selections).
_FEWEST_LANES = 2
#: What a lane's zygote and the warm ranks of its two DDPs take, with those that compile.
_BYTES_OF_A_LANE = 2 * 2**30
#: What they take of a device that they share: up to 1.1 GiB each (CUDA 13, NCCL 2.28), and as much for their tensors.
_DEVICE_BYTES_OF_A_LANE = 10 * 2**30
#: More than these only wait for each other: an H100 judged 2.3 scenarios a second for five lanes, 1.2 for nine.
_MOST_LANES_OF_A_DEVICE = 4
#: A lane begins with ranks that have run nothing, which takes as long as some scenarios.
_FEWEST_IN_A_LANE = 16
#: How long lanes may take to end their ranks once they are told to stop.
_END_TIMEOUT_S = 20.0


class LaneError(ConformanceError):
    """A lane has ended before its work was done."""


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


def in_lanes(work: Work[Task, Result], batches: Iterable[Sequence[Task]], jobs: int) -> Generator[Result]:
    """Fork `jobs` lanes that `work`, and yield their results as they come; lanes end when this iterator is closed.

    A lane gets one batch after the other, in order, and asks for the next one when it has taken the last task of the
    one before. What `work` raises is raised here. Tasks travel to lanes and results back, so both must be picklable;
    `work` itself is there already. One lane is this process itself. Fork before anything here computes in several
    threads.
    """
    waiting = iter(batches)
    if jobs == 1:
        yield from work(chain.from_iterable(waiting))
        return
    lanes: dict[Connection, int] = {}
    try:
        for _ in range(jobs):
            ours, theirs = Pipe()
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                die_with(parent)  # at once, and not when it is next asked for something: it holds the report's lock
                for other in [ours, *lanes]:
                    other.close()  # else the lanes would keep each other from noticing that this process is gone
                _live(work, theirs)
            theirs.close()
            lanes[ours] = pid
        while lanes:
            for connection in wait(list(lanes)):
                yield from _heard(instance(connection, Connection), lanes, waiting)
    finally:
        for pid in lanes.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for connection, pid in lanes.items():
            connection.close()
            _await_end(pid)


def _heard(connection: Connection, lanes: dict[Connection, int], waiting: Iterator[Sequence[Task]]) -> Iterator[Result]:
    """Take one message of a lane: a result, the wish for a batch, an error, or the end of its work."""
    try:
        kind, content = connection.recv()
    except (EOFError, OSError):
        pid = lanes.pop(connection)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        raise LaneError(f"a lane ended before its work was done, with exit code {status}") from None
    match kind:
        case "result":
            yield content
        case "more":
            with suppress(BrokenPipeError):  # what it has to say of its end comes next
                connection.send(tuple(next(waiting, ())))
        case "error":
            raise content
        case _:
            os.waitpid(lanes.pop(connection), 0)
            connection.close()


def _live(work: Work[Task, Result], connection: Connection) -> None:
    """Be a lane, and end this process. Only what `work` has made for itself is cleaned up: the rest is the parent's."""
    import torch

    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the lanes
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave)
        torch.set_num_threads(1)  # threads that the parent computed with are not here
        results = work(_asked_for(connection))
        try:
            for result in results:
                connection.send(("result", result))
        except Exception as error:
            connection.send(("error", error))
        else:
            connection.send(("end", None))
        status = 0
    except (OSError, SystemExit):
        pass  # the parent is gone, or wants no more
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(BaseException):
            results.close()
        os._exit(status)


def _leave(signum: int, frame: object) -> None:
    raise SystemExit


def _asked_for(connection: Connection) -> Iterator[Task]:
    while True:
        connection.send(("more", None))
        batch = connection.recv()
        if not batch:
            return
        yield from batch


def _await_end(pid: int) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(0.01)


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _BYTES_OF_A_LANE
