"""One collective in flight: from the call that issues it until a wait completes it."""

import dataclasses
import time
from collections.abc import Callable

from conformance.observation import Collective
from conformance.recorder.look import Look


class Flight:
    """One issued collective. It lands once it has completed and the subject or the program has waited for it.

    `completed` asks the backend whether the collective has completed; None if that is known.
    """

    __slots__ = ("collective", "completed", "ended_ns", "finished", "look", "poll")

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.finished = False
        self.ended_ns = 0
        self.poll: Callable[[], bool] | None = None
        self.completed: Callable[[], bool] | None = None
        self.look: Look | None = None  # at its tensors, if asked for

    def land(self) -> None:
        """Record that the collective has completed and was waited for."""
        if not self.finished:
            self.ended_ns = time.perf_counter_ns()
            self.finished = True
            if self.look is not None:
                self.look.land()
            self.poll = self.completed = None  # both keep the tensors of the collective alive

    def landed(self) -> bool:
        """Whether the collective has landed; asks its future if the subject took it."""
        if self.poll is not None and self.poll():
            self.land()
        return self.finished

    def snapshot(self) -> Collective:
        """Return the current state of the collective."""
        if not self.landed():
            return self.collective
        duration_ns = self.ended_ns - self.collective.started_ns
        return dataclasses.replace(self.collective, finished=True, duration_ns=duration_ns)
