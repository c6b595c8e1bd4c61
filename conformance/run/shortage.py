"""What the kernel denied the processes of this container: it counts that for every control group (cgroup).

A rank that may start no thread, or that is killed because its container has too little memory, fails whatever the DDP
under test does. Both limits are those that containers have (`docker run --pids-limit --memory`); the kernel's
documentation, Documentation/admin-guide/cgroup-v2.rst, describes `pids.events` and `memory.events`.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from conformance.checkers.explanation import counted

_MOUNT = Path("/sys/fs/cgroup")
_REFUSED, _KILLED = "refused", "killed"
#: The files that count, with the name of the count in it: by controller, for version 2 and version 1.
_COUNTS = {
    "pids": (("pids.events", "max", _REFUSED),),
    "memory": (("memory.events", "oom_kill", _KILLED), ("memory.oom_control", "oom_kill", _KILLED)),
}


def denials() -> Counter[str]:
    """Return how often the kernel has denied something so far to the cgroups of this process and those around."""
    counts: Counter[str] = Counter()
    for path, name, what in _files():
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue  # it has gone, or this user must not read it
        counts[what] += sum(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))
    return counts


def shortage_since(before: Mapping[str, int]) -> str:
    """Return a sentence about what was denied since `denials` returned `before`, empty if nothing was."""
    new = denials() - Counter(before)
    said = []
    if new[_REFUSED]:
        said.append(
            f"the kernel refused a process or thread {counted(new[_REFUSED], 'time')}, because this container may have"
            " no more (pids.max of its cgroup; docker run --pids-limit)"
        )
    if new[_KILLED]:
        said.append(
            f"the kernel killed a process {counted(new[_KILLED], 'time')}, because this container has no more memory"
            " (memory.max of its cgroup; docker run --memory)"
        )
    return " and ".join(said)


@cache
def _files() -> tuple[tuple[Path, str, str], ...]:
    """Return the files that count, with the name of the count in each and what it counts."""
    found = []
    for folder, controllers in _groups():
        for controller in controllers:
            found += [
                (path / file, name, what)
                for path in (folder, *folder.parents)
                if path.is_relative_to(_MOUNT)
                for file, name, what in _COUNTS.get(controller, ())
                if (path / file).exists()
            ]
    return tuple(dict.fromkeys(found))


def _groups() -> list[tuple[Path, tuple[str, ...]]]:
    """Return the folders of the cgroups that this process is in, each with its controllers."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []  # no Linux
    groups = []
    for line in lines:
        _, names, path = line.split(":", 2)
        below = path.lstrip("/")
        if not names:
            groups.append((_MOUNT / below, tuple(_COUNTS)))
        else:
            groups.append((_MOUNT / names / below, tuple(names.split(","))))
    return groups
