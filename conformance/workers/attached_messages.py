"""What the controller says to the agents that hold a rank each on some host, and they to it."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.observation import Observation
from conformance.recorder.flight_record import LastSeen
from conformance.workers.messages import Job, Seat

#: Both sides say something at least so often ...
BEAT_S = 0.25
#: ... and when nothing was heard for so long, the other side is lost: its host is down or the link is cut.
LOST_S = 10.0


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent to controller, once: who it is."""

    index: int
    host: str


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Controller to agent: run this in the seat; a new rank is forked where the agent has none of that pool.

    The agent fills in the parts of the seat that are its own: number of the pool in its zygote, and directory.
    """

    number: int
    pool: int
    seat: Seat
    job: Job
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Controller to agent: end the rank of that pool."""

    pool: int


@dataclass(frozen=True, slots=True)
class Hurry:
    """Controller to agent: another rank has failed in this order; wait for yours no longer than so many seconds."""

    number: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Controller to agent: I am there."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Controller to agent: the run is over."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Agent to controller: I am there; and what my rank was doing, if that has changed."""

    number: int = -1
    last_seen: LastSeen | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """Agent to controller: what became of an order; `ready` tells whether the rank can take another one."""

    number: int
    observation: Observation
    ready: bool


ToAgent = RunOrder | Forget | Hurry | Ping | Goodbye
FromAgent = Hello | Beat | Reply
