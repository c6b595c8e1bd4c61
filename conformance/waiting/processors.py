"""Whether the machine has a processor with nothing to do."""

from __future__ import annotations

import os

#: Its fourth field says how many threads run or could run now, the reader's own included, and how many there are.
_LOADS = "/proc/loadavg"


def one_is_idle() -> bool:
    """Whether fewer threads could run than this process may use processors; False where the kernel does not say."""
    try:
        with open(_LOADS, encoding="ascii") as file:
            runnable = int(file.read().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return False
    return runnable - 1 < len(os.sched_getaffinity(0))
