"""`Observation`: what one rank did and reported in one scenario, with each `Collective` that it issued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Named facts in the order in which they were observed. Names are paths (`step0/grad/fc1.weight`); values are tensors
#: (detached, cloned, on the CPU), `Raised`, `Unmeasured`, or plain JSON data.
Facts = Mapping[str, Any]

#: What a fact may hold as it is. A subclass, such as a number of NumPy, is none of them.
PLAIN = frozenset((bool, int, float, str, type(None)))

#: The phase in which a rank imports the subject.
IMPORT = "import"

#: Exceptions that end a process or a generator, and are handed on; every other one is something that was raised. Some
#: libraries derive errors from BaseException itself, as torch.distributed.checkpoint does its CheckpointException.
ENDINGS = (SystemExit, KeyboardInterrupt, GeneratorExit)


def _text(value: object) -> str:
    """Return `str(value)` as text that any encoding of Unicode takes: without halves of surrogate pairs."""
    return str(value).encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as a fact: its type's name, the names of all base classes, and its message with its notes."""

    type: str
    bases: tuple[str, ...]
    message: str
    traceback: str = ""

    @staticmethod
    def of(error: BaseException, traceback: str = "") -> Raised:
        """Describe `error` without keeping it or its frames alive."""
        bases = tuple(_text(base.__name__) for base in type(error).__mro__)
        try:
            message = "\n".join(map(_text, (error, *getattr(error, "__notes__", ()))))
        except Exception as second:
            message = f"<its message cannot be had: {type(second).__name__}>"
        return Raised(bases[0], bases, message, _text(traceback))

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Stands for a fact that a program could not measure here, and `why`, a clause: nothing is decided by it."""

    why: str

    def __str__(self) -> str:
        return f"not measured: {self.why}"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended: `returned`, `raised`, `exited`, `killed` (by a signal), `hung` or `abandoned`.

    `abandoned`: the harness ended the rank because another rank had died or hung.
    """

    kind: str
    code: int = 0
    detail: str = ""

    def __str__(self) -> str:
        return self.detail or self.kind


#: Operations between two ranks: the other ranks of the group do not take part.
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a rank issued.

    `index` counts the rank's collectives in this group from 0; `op` is torch's name (`all_reduce`, `broadcast`, ...);
    `shapes` and `dtypes` describe the tensors passed in; `reduce_op` is `sum`, `avg`, ... or empty; `root` is the root
    rank or -1; `phase` is what the program was doing (`construct`, `forward`, `backward`, ...); `step` counts the
    program's steps (-1 before the first); `sync` tells whether the program was outside `no_sync`; `finished` whether
    the subject or the program waited for it and it completed; `members` are the group's ranks, empty if unknown.
    """

    index: int
    op: str
    group: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    reduce_op: str = ""
    root: int = -1
    phase: str = ""
    step: int = -1
    sync: bool = True
    finished: bool = True
    started_ns: int = 0
    duration_ns: int = 0
    members: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements passed in, over all tensors."""
        total = 0
        for shape in self.shapes:
            product = 1
            for extent in shape:
                product *= extent
            total += product
        return total

    @property
    def signature(self) -> tuple[object, ...]:
        """What ranks must agree in for their collectives to match."""
        return (self.op, self.group, self.numel, self.dtypes, self.reduce_op, self.root)

    def describe(self) -> str:
        """Return e.g. `all_reduce #7 (4096 x float32, sum)`."""
        dtypes = "/".join(dict.fromkeys(self.dtypes)) or "no tensor"
        reduce_op = f", {self.reduce_op}" if self.reduce_op else ""
        return f"{self.op} #{self.index} ({self.numel} x {dtypes}{reduce_op})"


@dataclass(frozen=True, slots=True)
class Carried:
    """What one collective carried on a rank, in short: the first values it was `given`, and those that it `left`.

    `left` is empty while it has not finished. `issued_at` is the innermost line of Python code that is not torch's:
    that of the DDP, or of the program where the DDP is written in C++.
    """

    issued_at: str
    given: str
    left: str = ""


#: So many of the scenarios that a rank has run are remembered: enough to find the one that spoilt it.
_MOST_REMEMBERED = 50


def remembered(after: tuple[str, ...], scenario_id: str) -> tuple[str, ...]:
    """Return what `Observation.after` is in the next scenario of ranks that ran this one."""
    return (*after, scenario_id)[-_MOST_REMEMBERED:]


#: What `Observation.hygiene` calls a child process.
PROCESSES = "child process"
#: What a DDP may keep once per process, whatever the number of its wrappers: a thread that all of them share, say, or
#: what a library does when it is first used, as torch.compile raises the recursion limit.
KEPT_ONCE = (
    *(f"{kind} left behind" for kind in ("thread", "process group", PROCESSES, "open file", "callback at exit")),
    *(f"{kind} changed" for kind in ("recursion limit", "path of modules")),
)


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that one rank reports; `stack` is set only if the rank hung or died.

    `stderr` is the end of what it printed. `device_reports` are what the rank's device found wrong, such as races: see
    `Backend.noticed`. `host` is set only if ranks run on several hosts. `after` are the scenarios that the same process
    ran before, the latest last, and of many the latest; empty on a fresh rank. `carried` has an entry for each of
    `history` if somebody asked for them, else none.
    """

    rank: int
    fate: Ending
    facts: Facts = field(default_factory=dict)
    raised: Raised | None = None
    history: tuple[Collective, ...] = ()
    phase: str = ""
    faults_fired: int = 0
    hygiene: tuple[str, ...] = ()
    device_reports: tuple[str, ...] = ()
    interference: tuple[str, ...] = ()
    unsupported: str = ""
    stack: str = ""
    stderr: str = ""
    duration_ns: int = 0
    cpu_ns: int = 0
    host: str = ""
    after: tuple[str, ...] = ()
    carried: tuple[Carried, ...] = ()

    @property
    def frames(self) -> list[str]:
        """The frames of the main thread in `stack`, the latest call first; faulthandler writes that thread last."""
        lines = self.stack.splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith(("Thread", "Current thread"))]
        return [line for line in lines[starts[-1] + 1 if starts else 0 :] if line.strip()]


def by_member(histories: Mapping[int, Iterable[Collective]], group: str) -> dict[int, dict[int, Collective]]:
    """Return for every rank of `group` the collectives that it issued there, by index; point-to-point ones left out.

    A rank belongs to a group if it issued anything there, or if a collective of another rank names it as a member. All
    ranks belong to the default group.
    """
    issued = {rank: [one for one in history if one.group == group] for rank, history in histories.items()}
    named = {rank for history in issued.values() for one in history for rank in one.members}
    return {
        rank: {one.index: one for one in history if one.op not in _POINT_TO_POINT}
        for rank, history in issued.items()
        if history or rank in named or group == "default"
    }
