"""`Recorder`: a rank's history of collectives: group, phase, and whether the rank waited for each.

A rank keeps its recorder over many scenarios, since its process groups report to it; `start` begins a new history.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as GroupBackend

from conformance.observation import Carried, Collective
from conformance.recorder.flight import Flight
from conformance.recorder.recorded_group import RecordedGroup, as_process_group


class Recorder:
    """The history of one rank, and a `PhaseListener`: it records every collective with the phase of its issue.

    The recorder calls `on_collective` just before it records a collective, with the collective (not finished). If
    `on_collective` raises or kills the process, the rank does not issue the collective, and the history lacks it.
    """

    def __init__(self, on_collective: Callable[[Collective], None] | None = None) -> None:
        self._on_collective = on_collective
        self.start()

    def start(self, *, looks: bool = False) -> None:
        """Begin an empty history for a new scenario; with `looks`, look at the tensors of each collective."""
        self.looks = looks
        # A gloo group that is freed waits for its threads and holds the interpreter, which a thread needs to drop the
        # last reference to a collective. So a scenario's groups are freed when the next one starts.
        self._groups: list[dist.ProcessGroup] = []
        self._flights: list[Flight] = []
        self._open: list[Flight] = []
        self._indices: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._phase, self._step, self._sync = "", -1, True
        #: The Python threads that calls into the backend have started, such as a pool's.
        self.backend_threads: set[threading.Thread] = set()

    @contextmanager
    def calling_backend(self) -> Iterator[None]:
        """Count threads that start in this block as the backend's."""
        before = set(threading.enumerate())
        try:
            yield
        finally:
            self.backend_threads.update(thread for thread in threading.enumerate() if thread not in before)

    def entered(self, phase: str, step: int, sync: bool) -> None:
        """Record the program's phase; drop landed flights, so that their tensors can be freed."""
        self._phase, self._step, self._sync = phase, step, sync
        self._open = [flight for flight in self._open if not flight.landed()]

    def wrap(self, group: dist.ProcessGroup | GroupBackend, name: str) -> dist.ProcessGroup:
        """Return a process group that delegates to `group` and reports to this recorder under `name`, or torch's name.

        Not collective.
        """
        real = as_process_group(group)
        self._groups.append(real)
        return RecordedGroup(real, self, name)

    def history(self) -> tuple[Collective, ...]:
        """Return every collective issued since `start`, in the order of issue."""
        return tuple(flight.snapshot() for flight in list(self._flights))

    def carried(self) -> tuple[Carried, ...]:
        """Return the looks at every collective issued since `start`, if asked for."""
        return tuple(flight.look.carried() for flight in list(self._flights) if flight.look is not None)

    def in_flight(self, among: int) -> int:
        """Return how many of the first `among` collectives since `start` the backend has not completed."""
        return sum(flight.completed is not None and not flight.completed() for flight in self._flights[:among])

    def issue(
        self, op: str, group: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], reduce_op: str = "",
        root: int = -1, members: tuple[int, ...] = (),
    ) -> Flight:  # fmt: skip
        """Record that this rank issues a collective now; only recorded groups call it.

        Point-to-point operations count apart, since collectives of one index must match on all ranks.
        """
        series = f"{group} point-to-point" if op in ("send", "recv") else group
        collective = Collective(
            next(self._indices[series]), op, group, shapes, dtypes, reduce_op, root,
            self._phase, self._step, self._sync, False, time.perf_counter_ns(), 0, members,
        )  # fmt: skip
        if self._on_collective is not None:
            self._on_collective(collective)
        flight = Flight(collective)
        self._flights.append(flight)
        self._open.append(flight)
        return flight
