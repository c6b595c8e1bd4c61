"""The messages between the controller and the agents of `--attach`."""

import math
from typing import Any

from msgspec import Struct

from conformance.observation import Observation
from conformance.recorder.flight_record import LastSeen
from conformance.subjects.subject import Subject
from conformance.workers.messages import Seat


class Challenge(Struct, frozen=True, tag=True):
    """Controller to a new connection: prove with `nonce` that you have the secret."""

    nonce: bytes


class Proof(Struct, frozen=True, tag=True):
    """Agent to controller, and back: an HMAC of both nonces under the secret; `nonce` is the sender's own challenge."""

    mac: bytes
    nonce: bytes = b""


class Hello(Struct, frozen=True, tag=True):
    """Agent to controller, once: its index and its host."""

    index: int
    host: str


class RunOrder(Struct, frozen=True, tag=True):
    """Controller to agent: run this scenario, sent as its JSON data, on the rank of `seat`.

    The agent forks a new rank if it has none of that `pool`, which is the controller's number of it. It fills in its
    own part of the seat, the device index.
    """

    number: int
    pool: int
    seat: Seat
    scenario: dict[str, Any]
    subject: Subject


class Forget(Struct, frozen=True, tag=True):
    """Controller to agent: end the rank of that pool."""

    pool: int


class Shorten(Struct, frozen=True, tag=True):
    """Controller to agent: another rank has failed in this order; wait for yours at most `patience_s` seconds."""

    number: int
    patience_s: float


class Ping(Struct, frozen=True, tag=True):
    """Controller to agent: the controller is alive; some rank of the order may be silent for `left_s` more seconds.

    Fewer than none if it should have ended before.
    """

    left_s: float = -math.inf


class Goodbye(Struct, frozen=True, tag=True):
    """Controller to agent: the run is over."""


class Beat(Struct, frozen=True, tag=True):
    """Agent to controller: the agent is alive; `last_seen` is what its rank was doing, if that has changed.

    If the rank makes no progress, the agent waits for it `left_s` more seconds; see `Ping`.
    """

    number: int
    last_seen: LastSeen | None = None
    left_s: float = -math.inf


class Reply(Struct, frozen=True, tag=True):
    """Agent to controller: the result of an order; `ready` tells whether the rank can take another one."""

    number: int
    observation: Observation
    ready: bool


ToAgent = Challenge | Proof | RunOrder | Forget | Shorten | Ping | Goodbye
FromAgent = Proof | Hello | Beat | Reply
