"""The machine's processes, as `/proc` shows them."""

from pathlib import Path
from typing import NamedTuple


def processes() -> list[Path]:
    """Return the folder of every process of the machine; none where there is no /proc."""
    try:
        return [folder for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    except FileNotFoundError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether the process is in state T (stopped by a signal) or t (by a debugger)."""
    stat = _stat(pid)
    return stat is not None and stat.state in ("T", "t")


def children_of(pid: int) -> dict[int, str]:
    """Return the names of the children of process `pid` that it has not waited for, by their numbers.

    Kernels without a list of children need a search of all processes, which takes milliseconds or more.
    """
    numbers = _listed_children_of(pid)
    if numbers is None:
        numbers = [folder.name for folder in processes()]
    stats = {int(number): _stat(number) for number in numbers}
    return {number: stat.name for number, stat in stats.items() if stat is not None and stat.parent == pid}


def _listed_children_of(pid: int) -> list[str] | None:
    """Return the children of each thread from the kernel's list; None if it has none."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return None
    numbers: list[str] = []
    for thread in threads:
        try:
            numbers += (thread / "children").read_text().split()
        except OSError:
            if thread.exists():
                return None
    return numbers


class _Stat(NamedTuple):
    name: str
    state: str
    parent: int


def _stat(pid: int | str) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may contain any character
    state, parent = rest.split()[:2]
    return _Stat(name, state, int(parent))
