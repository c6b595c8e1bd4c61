"""The controller of `--attach`: runs scenarios through one agent per process, on this host and others.

It has the interface of the controller of a single machine. But it cannot examine a rank itself: the rank's agent
reports on it, and of a host that is cut off the controller knows only the last report.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from torch._C._distributed_c10d import TCPStore

from conformance.backends.backend import Backend
from conformance.errors import ConformanceError
from conformance.observation import Ending, Facts, Observation
from conformance.programs.replica import expected_by, replica_of
from conformance.recorder.flight_record import LastSeen
from conformance.scenario import Scenario
from conformance.subjects.subject import NO_DDP, Subject
from conformance.workers.attached_messages import (
    BEAT_S,
    LOST_S,
    Beat,
    Forget,
    FromAgent,
    Goodbye,
    Hello,
    Hurry,
    Ping,
    Reply,
    RunOrder,
    ToAgent,
)
from conformance.workers.messages import Job, Seat, dumps, receive
from conformance.workers.pool import (
    DEATH_GRACE_S,
    MOST_DEADLINES,
    RAISE_GRACE_S,
    START_TIMEOUT_S,
    nothing_left_behind,
)

#: How much later than the deadline an agent may answer: it makes its rank write a stack first.
_MARGIN_S = 2.0
#: The controller gives up an agent whose answer is due and that has sent nothing for so long.
_SILENCE_S = 8 * BEAT_S


@dataclass
class Reached:
    """An agent, as the controller sees it."""

    index: int
    host: str
    connection: Connection
    heard_at: float
    lost: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, message: ToAgent) -> None:
        """Send `message`; ignores errors, because `_gather` notices an agent that is gone."""
        with self.lock, contextlib.suppress(OSError):
            self.connection.send_bytes(dumps(message))


class AttachedController:
    """Hands scenarios to the agents behind `connections`; a context manager, for one thread."""

    def __init__(self, backend: Backend, connections: Sequence[Connection], address: str) -> None:
        """Receive every agent's `Hello`. Ranks rendezvous through a store on this host's `address`."""
        self._backend = backend
        self._address = address
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._agents = sorted((_greeted(connection) for connection in connections), key=lambda one: one.index)
        self._pools: dict[tuple[tuple[int, ...], bool, bool], int] = {}
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._pinging = threading.Thread(target=self._ping, daemon=True)
        self._pinging.start()

    @property
    def num_ranks(self) -> int:
        """How many ranks a scenario may have: one for each process that has joined, also if it has been lost since."""
        return len(self._agents)

    def run(self, scenario: Scenario, subject: Subject) -> dict[int, Observation]:
        """Run the scenario on as many agents as it has ranks, spread over the hosts; returns each rank's observation.

        Raises:
            ConformanceError: too few agents are left.

        """
        return self._run(scenario, subject, replica=False)

    def expect(self, scenario: Scenario) -> Callable[[], Mapping[int, Facts]]:
        """Return a function that has a replica, a rank that no subject ever runs in, compute what ranks must observe.

        The replica starts when the function is called: an agent runs one rank at a time.

        Raises, when the facts are asked for:
            ReplicaError: the replica did not return.

        """
        return lambda: expected_by(self._run(replica_of(scenario), NO_DDP, replica=True)[0])

    def _run(self, scenario: Scenario, subject: Subject, *, replica: bool) -> dict[int, Observation]:
        chosen = self._spread(scenario.world_size)
        key = tuple(agent.index for agent in chosen), scenario.recorded, replica
        fresh = key not in self._pools
        pool = self._pools.pop(key) if not fresh else next(self._numbers)
        number = next(self._numbers)
        job = Job(scenario.to_json(), subject)
        meeting = (self._address, self._store.port, f"pool{pool}")
        observations: dict[int, Observation] = {}
        ready: list[bool] = []
        try:
            for rank, agent in enumerate(chosen):
                source = self._backend.source or self._backend.name
                seat = Seat(pool, rank, scenario.world_size, source, "", scenario.recorded, meeting)
                agent.tell(RunOrder(number, pool, seat, job, scenario.deadline_s))
            patience_s = MOST_DEADLINES * (scenario.deadline_s + (START_TIMEOUT_S if fresh else 0.0))
            observations, ready = self._gather(number, chosen, scenario.deadline_s, patience_s)
        finally:  # also when interrupted
            if len(ready) == len(chosen) and all(ready) and nothing_left_behind(observations, scenario.recorded):
                self._pools[key] = pool
            else:
                for agent in chosen:
                    agent.tell(Forget(pool))
        return dict(sorted(observations.items()))

    def close(self) -> None:
        """Send every agent `Goodbye` and close the connections."""
        self._closed.set()
        self._pinging.join()
        for agent in self._agents:
            agent.tell(Goodbye())
            agent.connection.close()

    def __enter__(self) -> AttachedController:
        """Return the controller."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the controller."""
        self.close()

    def _spread(self, world_size: int) -> list[Reached]:
        """Return agents at equal distances in the list, so that even two ranks run on two hosts."""
        living = [agent for agent in self._agents if not agent.lost]
        if world_size > len(living):
            lost = "; ".join(dict.fromkeys(f"{agent.host} {agent.lost}" for agent in self._agents if agent.lost))
            raise ConformanceError(
                f"{world_size} ranks are needed, and {len(living)} of {len(self._agents)} are left: {lost}"
            )
        return [living[rank * len(living) // world_size] for rank in range(world_size)]

    def _gather(
        self, number: int, chosen: list[Reached], deadline_s: float, patience_s: float
    ) -> tuple[dict[int, Observation], list[bool]]:
        """Wait until every agent has answered or the controller has given it up."""
        now = time.monotonic()
        due, end = now + deadline_s + _MARGIN_S, now + patience_s + _MARGIN_S + LOST_S
        ranks = {agent.index: rank for rank, agent in enumerate(chosen)}
        waiting = {agent.connection: agent for agent in chosen}
        seen: dict[int, LastSeen] = {}
        observations: dict[int, Observation] = {}
        ready: list[bool] = []
        while waiting:
            for source in wait(list(waiting), BEAT_S):
                assert isinstance(source, Connection)
                agent = waiting[source]
                try:
                    message: FromAgent = receive(source)
                except (EOFError, OSError):
                    agent.lost = "ended"
                    fate = Ending("abandoned", detail="abandoned: the process that held it has ended")
                    observations[ranks[agent.index]] = _last_heard(agent, ranks, seen, fate)
                    del waiting[source]
                    continue
                agent.heard_at = time.monotonic()
                if isinstance(message, Beat) and message.number == number and message.last_seen is not None:
                    seen[ranks[agent.index]] = message.last_seen
                elif isinstance(message, Reply) and message.number == number:
                    observations[ranks[agent.index]] = message.observation
                    ready.append(message.ready)
                    del waiting[source]
                    if (hurry_s := _patience_s(message.observation)) is not None:
                        for other in waiting.values():
                            other.tell(Hurry(number, hurry_s))
            now = time.monotonic()
            for connection, agent in list(waiting.items()):
                silent_s = now - agent.heard_at
                if (now > due and silent_s > _SILENCE_S) or now > end:
                    agent.lost = f"has not been heard of for {silent_s:.0f} s"
                    where = seen[rank].phase if (rank := ranks[agent.index]) in seen else "an unknown phase"
                    fate = Ending("hung", detail=f"unheard of for {silent_s:.0f} s, last seen in {where}")
                    observations[rank] = _last_heard(agent, ranks, seen, fate)
                    del waiting[connection]
        return observations, ready

    def _ping(self) -> None:
        while not self._closed.wait(BEAT_S):
            for agent in self._agents:
                if not agent.lost:
                    agent.tell(Ping())


def _greeted(connection: Connection) -> Reached:
    hello = receive(connection)
    assert isinstance(hello, Hello), f"an agent must say hello first, got {hello!r}"
    return Reached(hello.index, hello.host, connection, time.monotonic())


def _last_heard(agent: Reached, ranks: dict[int, int], seen: dict[int, LastSeen], fate: Ending) -> Observation:
    rank = ranks[agent.index]
    last_seen = seen.get(rank, LastSeen("", -1, 0, 0, ()))
    return Observation(
        rank,
        fate,
        history=last_seen.collectives,
        phase=last_seen.phase,
        faults_fired=last_seen.faults_fired,
        host=agent.host,
    )


def _patience_s(observation: Observation) -> float | None:
    """Return how long to wait for the other ranks after this one's end; None for their own deadline."""
    if observation.fate.kind in ("exited", "killed"):
        return DEATH_GRACE_S
    return RAISE_GRACE_S if observation.raised is not None else None
