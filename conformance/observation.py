"""`Observation`: what one rank did and reported in one scenario, with each `Collective` that it issued."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Named facts in the order in which they were observed. Names are paths (`step0/grad/fc1.weight`); values are tensors
#: (detached, cloned, on the CPU), `Raised`, `Unmeasured`, or plain JSON data.
Facts = Mapping[str, Any]

#: The types of plain facts, without subclasses such as NumPy's numbers.
PLAIN = frozenset((bool, int, float, str, type(None)))

#: The phase in which a rank imports the subject.
IMPORT = "import"

#: Exceptions that end a process or a generator, and are raised again; every other exception is a fact. Some libraries
#: derive errors from BaseException, as torch.distributed.checkpoint its CheckpointException.
ENDINGS = (SystemExit, KeyboardInterrupt, GeneratorExit)


def _text(value: object) -> str:
    """Return `str(value)` without halves of surrogate pairs, so that it can be encoded."""
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
            message = f"<its message raised {type(second).__name__}>"
        return Raised(bases[0], bases, message, _text(traceback))

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A fact that a program could not measure here, and `why`, a clause: it decides nothing."""

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


#: Operations between two ranks of a group.
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a rank issued.

    `index` counts the rank's collectives in this group from 0; `op` is torch's name (`all_reduce`, `broadcast`, ...);
    `shapes` and `dtypes` describe the input tensors; `reduce_op` is `sum`, `avg`, ... or empty; `root` is the root rank
    or -1; `phase` is the program's (`construct`, `forward`, `backward`, ...); `step` counts its steps (-1 before the
    first); `sync`: outside `no_sync`; `finished`: it completed, and the subject or the program waited for it; `members`
    are the group's ranks, empty if unknown.
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
        """The number of elements of all input tensors."""
        return sum(map(math.prod, self.shapes))

    @property
    def signature(self) -> tuple[object, ...]:
        """The fields in which matching collectives of ranks are equal."""
        return (self.op, self.group, self.numel, self.dtypes, self.reduce_op, self.root)

    def describe(self) -> str:
        """Return e.g. `all_reduce #7 (4096 x float32, sum)`."""
        dtypes = "/".join(dict.fromkeys(self.dtypes)) or "no tensor"
        reduce_op = f", {self.reduce_op}" if self.reduce_op else ""
        return f"{self.op} #{self.index} ({self.numel} x {dtypes}{reduce_op})"


@dataclass(frozen=True, slots=True)
class Carried:
    """The first values of a collective's inputs (`given`) and results (`left`, empty while it is not finished).

    `issued_at` is the innermost line of Python code outside of torch: of the DDP, or of the program if the DDP is
    written in C++.
    """

    issued_at: str
    given: str
    left: str = ""


#: How many scenarios of a rank are remembered, to find the one that broke it.
_MOST_REMEMBERED = 50


def remembered(after: tuple[str, ...], scenario_id: str) -> tuple[str, ...]:
    """Return `Observation.after` of the next scenario of ranks that ran this one."""
    return (*after, scenario_id)[-_MOST_REMEMBERED:]


#: The name of a child process in `Observation.hygiene`.
PROCESSES = "child process"
#: What a process may keep once: a thread that all wrappers share, or a library's change at first use, as torch.compile
#: raises the recursion limit.
KEPT_ONCE = (
    *(f"{kind} left behind" for kind in ("thread", "process group", PROCESSES, "open file", "callback at exit")),
    *(f"{kind} changed" for kind in ("recursion limit", "path of modules")),
)


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that one rank reports; `stack` is set only if the rank hung or died.

    `stderr` is the end of its output. `device_reports` are mistakes that the rank's device found, see
    `Backend.noticed`. `host` is set only if ranks run on several hosts. `after` are the last scenarios that the same
    process ran before, the latest last. `carried` has an entry for each of `history` if asked for. `starved` says that
    a rank did not end on a machine that gave the ranks hardly any processor.
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
    starved: str = ""

    @property
    def frames(self) -> list[str]:
        """The frames of the main thread in `stack`, the latest call first; faulthandler writes that thread last."""
        lines = self.stack.splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith(("Thread", "Current thread"))]
        return [line for line in lines[starts[-1] + 1 if starts else 0 :] if line.strip()]


def by_member(histories: Mapping[int, Iterable[Collective]], group: str) -> dict[int, dict[int, Collective]]:
    """Return for every rank of `group` its collectives there by index, without point-to-point operations.

    A rank belongs to a group if it issued anything there, or if another rank's collective has it as a member. All ranks
    belong to the default group.
    """
    issued = {rank: [one for one in history if one.group == group] for rank, history in histories.items()}
    named = {rank for history in issued.values() for one in history for rank in one.members}
    return {
        rank: {one.index: one for one in history if one.op not in _POINT_TO_POINT}
        for rank, history in issued.items()
        if history or rank in named or group == "default"
    }
