"""Finding processes of ours, for the tests that say there are none, and what memory of theirs is in huge pages."""

import os
import platform
import select
from pathlib import Path

from conformance.tests.busy_machine import at_this_load
from conformance.workers.forked import MARKER

_KERNEL = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
#: Whether this kernel gathers memory in huge pages on request.
CAN_GATHER = _KERNEL >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").is_dir()


def huge_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def processes_under(directory: Path) -> list[int]:
    """Return every live process whose private directory lies in `directory`: zygotes, then ranks, by when they began.

    Not by their numbers, which begin anew: the kernel has 32,768 of them unless told otherwise.
    """
    marker = f"{MARKER}={directory}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker in (entry / "environ").read_bytes():
                found.append((_began_at(entry), int(entry.name)))
        except (OSError, ValueError):
            continue  # it ended meanwhile, or belongs to somebody else
    return [pid for _, pid in sorted(found)]


def _began_at(entry: Path) -> int:
    """Return when a process began, in ticks since the machine did; behind its name, which may hold any character."""
    _, _, fields = (entry / "stat").read_text().rpartition(")")
    return int(fields.split()[19])


def all_end(pids: list[int], within_s: float) -> bool:
    """Wait until the processes have ended; False when one is left after `within_s` seconds of an idle machine."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([handle], [], [], at_this_load(within_s))
        finally:
            os.close(handle)
        if not ended:
            return False
    return True
