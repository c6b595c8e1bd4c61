"""How many of the machine's processors have nothing to do."""

import os
import time

#: Its first line says for how many ticks all processors together were in each state; the fourth is to do nothing.
_TIMES = "/proc/stat"
_IDLE = 4


class Processors:
    """Looks at the machine's processors from time to time."""

    def __init__(self) -> None:
        self._looked_at, self._idle_s = time.monotonic(), _idle_s()

    def num_idle(self) -> float:
        """Return how many had nothing to do since the last look, on average; 0 where the kernel does not say.

        It counts in hundredths of a second, so that looks should be some of these apart.
        """
        looked_at, idle_s = self._looked_at, self._idle_s
        self._looked_at, self._idle_s = time.monotonic(), _idle_s()
        return (self._idle_s - idle_s) / max(self._looked_at - looked_at, 1e-3)


def _idle_s() -> float:
    try:
        with open(_TIMES, encoding="ascii") as file:
            return int(file.readline().split()[_IDLE]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
