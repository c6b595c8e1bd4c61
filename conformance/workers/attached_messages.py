"""The messages between the controller and the agents of `--attach`."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.observation import Observation
from conformance.recorder.flight_record import LastSeen
from conformance.workers.messages import Job, Seat

#: Both sides send a message at least this often ...
BEAT_S = 0.25
#: ... and a side that receives nothing for this long takes the other for lost: its host is down or the link is cut.
LOST_S = 10.0


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent to controller, once: its index and its host."""

    index: int
    host: str


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Controller to agent: run `job` on the rank of `seat`. The agent forks a new rank if it has none of that pool.

    The agent fills in its own parts of the seat: the pool's number in its zygote, the directory and the device index.
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
    """Controller to agent: another rank has failed in this order; wait for yours at most `patience_s` seconds."""

    number: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Controller to agent: the controller is alive."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Controller to agent: the run is over."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Agent to controller: the agent is alive; `last_seen` is what its rank was doing, if that has changed."""

    number: int = -1
    last_seen: LastSeen | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """Agent to controller: the result of an order; `ready` tells whether the rank can take another one."""

    number: int
    observation: Observation
    ready: bool


ToAgent = RunOrder | Forget | Hurry | Ping | Goodbye
FromAgent = Hello | Beat | Reply
