"""One collective in flight: from the call that issues it until a wait completes it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from conformance.observation import Collective
from conformance.recorder.look import Look


class Flight:
    """One issued collective. It lands once it has completed and the subject or the program has waited for it.

    `completed` asks the backend whether it has completed, whoever waits for it, and is None where nobody need ask.
    """

    __slots__ = ("collective", "completed", "ended_ns", "finished", "look", "poll")

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.finished = False
        self.ended_ns = 0
        self.poll: Callable[[], bool] | None = None
        self.completed: Callable[[], bool] | None = None
        self.look: Look | None = None  # at what it carries, if somebody asked for it

    def land(self) -> None:
        """Record that the collective has completed and that somebody has waited for it."""
        if not self.finished:
            self.ended_ns = time.perf_counter_ns()
            self.finished = True
            if self.look is not None:
                self.look.land()
            self.poll = self.completed = None  # both keep the tensors of the collective alive

    def landed(self) -> bool:
        """Whether the collective is finished by now; if the subject took its future, asks the future."""
        if self.poll is not None and self.poll():
            self.land()
        return self.finished

    def settle(self) -> Collective:
        """Return the collective as it stands now."""
        if not self.landed():
            return self.collective
        duration_ns = self.ended_ns - self.collective.started_ns
        return dataclasses.replace(self.collective, finished=True, duration_ns=duration_ns)
