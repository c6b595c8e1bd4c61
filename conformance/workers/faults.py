"""Injects a scenario's faults into a rank, at a counted place and never by the clock."""

import ctypes
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn

from conformance.observation import Collective
from conformance.scenario import Fault

#: What a rank exits with when a fault says `exit`.
EXIT_CODE = 3
#: For how long a rank waits when a fault says `slow`: long beside a scenario, and no hang.
SLOW_S = 0.5


class InjectedError(RuntimeError):
    """The exception of a fault of kind `raise`; no program expects it."""


class FaultInjector:
    """Fires one rank's faults; a `PhaseListener`.

    A rank reaches a place when the program enters a phase, not when it returns to one from an inner phase. The listener
    is called for both, so it keeps a stack of phases. It calls `before_firing` before the fault, because this process
    does not survive most faults.
    """

    def __init__(self, faults: Iterable[Fault], before_firing: Callable[[], None]) -> None:
        """Arm `faults`; all of them must be of this rank."""
        self.num_fired = 0
        self._faults = tuple(faults)
        self._before_firing = before_firing
        self._reached: Counter[str] = Counter()
        self._entered: list[tuple[str, int]] = [("start", -1)]

    def entered(self, phase: str, step: int, sync: bool) -> None:
        """Fire what is due when the program enters `phase`."""
        if self._entered[-2:-1] == [(phase, step)]:
            self._entered.pop()
            return
        self._entered.append((phase, step))
        self._reach(phase)

    def before_collective(self, collective: Collective) -> None:
        """Fire what is due just before this rank issues its next collective, whatever the group."""
        self._reach("collective")

    def _reach(self, place: str) -> None:
        occurrence = self._reached[place]
        self._reached[place] += 1
        for fault in self._faults:
            if (fault.at, fault.occurrence) == (place, occurrence):
                self.num_fired += 1
                self._before_firing()
                _FIRE[fault.kind](fault)


def _raise(fault: Fault) -> NoReturn:
    raise InjectedError(f"injected on rank {fault.rank} at {fault.at} (occurrence {fault.occurrence})")


def _loop(fault: Fault) -> NoReturn:
    while True:  # the rank is busy, not stopped: it uses a processor and can still write its stack
        pass


_FIRE: dict[str, Callable[[Fault], object]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": _loop,
    "slow": lambda fault: time.sleep(SLOW_S),
    "exit": lambda fault: os._exit(EXIT_CODE),
    "segfault": lambda fault: ctypes.string_at(0),
    "raise": _raise,
}
