"""`Observation`: what one rank did and reported in one scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.history import Carried, Collective

#: Named facts in the order in which they were observed. Names are paths (`step0/grad/fc1.weight`); values are tensors
#: (detached, cloned, on the CPU), `Raised`, `Unmeasured`, or plain JSON data.
Facts = Mapping[str, Any]

#: What a fact may hold as it is. A subclass, such as a number of NumPy, is none of them.
PLAIN = frozenset((bool, int, float, str, type(None)))

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
        """Return type and message, as Python prints them."""
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Stands for a fact that a program could not measure here, and `why`, a clause: nothing is decided by it."""

    why: str

    def __str__(self) -> str:
        """Return why."""
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
        """Return a short phrase such as `killed by SIGKILL`."""
        return self.detail or self.kind


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
    """Everything that one rank reports; `stack` and `stderr` are set only if the rank failed or hung.

    `device_reports` are what the rank's device found wrong, such as races: see `Backend.noticed`.
    `host` is set only if ranks run on several hosts. `after` are the scenarios that the same process ran before, the
    latest last, and of many the latest; empty on a fresh rank. `carried` has an entry for each of `history` if somebody
    asked for them, else none.
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
