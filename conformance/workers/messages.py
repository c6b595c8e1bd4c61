"""The messages between controller, zygote and ranks. They are data: a `Channel` says how they travel."""

import signal
from typing import Any

from msgspec import Struct

from conformance.observation import Observation, Raised
from conformance.subjects.subject import Subject

# ---------------------------------------------------------------------------------------------- controller <-> rank


class Inspection(Struct, frozen=True):
    """What to show of a run besides its observations.

    `carried`: the values of each collective. `debugged`: the rank that a person debugs at the `terminal` (a path);
    negative where the scenario runs once more. Calls of `breakpoint()` on other ranks do nothing then.
    """

    carried: bool = False
    debugged: int = -1
    terminal: str = ""


NOTHING = Inspection()


class Job(Struct, frozen=True, tag=True):
    """Controller to rank: run this scenario on this subject. The scenario is sent as its JSON data."""

    number: int
    scenario: dict[str, Any]
    subject: Subject
    inspection: Inspection = NOTHING


class Ready(Struct, frozen=True, tag=True):
    """Rank to controller, once: the default group is connected (`error` is None), or the error that prevented it."""

    error: Raised | None = None


class Answer(Struct, frozen=True, tag=True):
    """Rank to controller: the result of job `number`; `observation` is `portable`."""

    number: int
    observation: Observation


#: Rank to controller: `Ready` once, then an `Answer` per `Job`.
FromRank = Ready | Answer

#: Makes a rank write every thread's Python stack into its stack file, whatever it is doing. A real-time signal, because
#: programs and subjects may use SIGUSR1 themselves.
STACK_SIGNAL = signal.SIGRTMIN + 3

# -------------------------------------------------------------------------------------------- controller <-> zygote


class Seat(Struct, frozen=True):
    """Everything that a forked process must know to become a rank.

    `backend` is the argument of `get_backend`. Without `recorded`, the default group is the backend's own, without a
    recorder. Ranks of several hosts rendezvous through a TCP store at `meeting` (host, port, prefix); `device_index`
    counts within a host. A rank that is to be `apart` gets an interpreter of its own. The pool fills in its number and
    its `directory`, which is private to it and holds the rendezvous file and the ranks' files.
    """

    rank: int
    world_size: int
    backend: str
    recorded: bool = True
    meeting: tuple[str, int, str] | None = None
    device_index: int | None = None
    apart: bool = False
    pool: int = 0
    directory: str = ""

    def file(self, kind: str) -> str:
        """Return the path of this rank's file of that kind: `flight`, `stack` or `output`."""
        return f"{self.directory}/rank{self.rank}.{kind}"


class ForkPool(Struct, frozen=True, tag=True):
    """Controller to zygote: fork these ranks; the rank's end of each connection follows as a handle."""

    seats: tuple[Seat, ...]


class SignalRank(Struct, frozen=True, tag=True):
    """Controller to zygote: send `signum` to a rank and the processes that it has started, if it still lives."""

    pool: int
    rank: int
    signum: int


class Preload(Struct, frozen=True, tag=True):
    """Controller to zygote: import these modules, too; `Preloaded` answers."""

    modules: tuple[str, ...]


class Preloaded(Struct, frozen=True, tag=True):
    """Zygote to controller, at its start and for each `Preload`: imports are done, or the traceback of what failed."""

    error: str = ""


class Branched(Struct, frozen=True, tag=True):
    """Zygote to the controller that has just connected: its process id, or the traceback of what imports failed."""

    pid: int
    error: str = ""


class Forked(Struct, frozen=True, tag=True):
    """Zygote to controller: the process ids, in the order of the seats, or why there are none."""

    pool: int
    pids: tuple[int, ...]
    error: str = ""


class Ended(Struct, frozen=True, tag=True):
    """Zygote to controller: a rank has ended; `status` is from `os.waitstatus_to_exitcode` (negative: a signal)."""

    pool: int
    rank: int
    status: int


ToZygote = ForkPool | SignalRank | Preload
FromZygote = Preloaded | Branched | Forked | Ended
