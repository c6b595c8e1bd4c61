"""Upper bounds of times, on a machine that does other things as well."""

import os
from pathlib import Path


def at_this_load(seconds: float) -> float:
    """Return how long may take now what takes `seconds` at most on an idle machine: others want the processors, too."""
    runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    wanted = max(runnable, *os.getloadavg()[:2])
    return seconds * max(1.0, wanted / (os.cpu_count() or 1))
