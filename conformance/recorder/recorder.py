"""The recorder of one rank: what was issued, by whom, in which phase, and whether somebody waited for it.

A recorder outlives scenarios: the rank's process groups report to it for as long as they live, and `start` begins a new
history. Nothing here communicates; the groups do (`recorded_group`).
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as GroupBackend

from conformance.history import Collective
from conformance.recorder.flight import Flight
from conformance.recorder.recorded_group import RecordedGroup, as_process_group


class Recorder:
    """The history of one rank, and a `PhaseListener`: every collective knows the phase in which it was issued.

    `on_collective` is called just before each collective is issued, with the collective as it will be recorded (not
    finished). It may raise or kill: then the collective was not issued and is not in the history.
    """

    def __init__(self, on_collective: Callable[[Collective], None] | None = None) -> None:
        """Begin an empty history."""
        self._on_collective = on_collective
        self.start()

    def start(self) -> None:
        """Forget everything: a new scenario begins."""
        self._flights: list[Flight] = []
        self._open: list[Flight] = []
        self._indices: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._phase, self._step, self._sync = "", -1, True

    def entered(self, phase: str, step: int, sync: bool) -> None:
        """Note what the program does from here on, and what has landed by now: its tensors can be let go."""
        self._phase, self._step, self._sync = phase, step, sync
        self._open = [flight for flight in self._open if not flight.landed()]

    def wrap(self, group: dist.ProcessGroup | GroupBackend, name: str) -> dist.ProcessGroup:
        """Return a process group that does what `group` does and reports here under `name`.

        With an empty `name` the group is called what torch calls it, once torch has given it a name. Not collective.
        """
        return RecordedGroup(as_process_group(group), self, name)

    def history(self) -> tuple[Collective, ...]:
        """Return every collective issued since `start`, in the order of issue."""
        return tuple(flight.settle() for flight in list(self._flights))

    def issue(
        self,
        op: str,
        group: str,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[str, ...],
        reduce_op: str = "",
        root: int = -1,
        members: tuple[int, ...] = (),
    ) -> Flight:
        """Record that this rank issues a collective now; called by recorded groups only.

        Point-to-point operations are counted apart: the other ranks of the group do not issue them, and the collectives
        of one index must meet.
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
