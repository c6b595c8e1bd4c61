"""The controller of `--attach`: runs scenarios through one agent per process, on this host and others.

It has the interface of the controller of a single machine. But it cannot examine a rank itself: the rank's agent
reports on it, and of a host that is cut off the controller knows only the last report.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch._C._distributed_c10d import TCPStore

from conformance.backends.backend import Backend
from conformance.errors import ConformanceError
from conformance.observation import Ending, Facts, Observation, remembered
from conformance.programs import replica
from conformance.recorder.flight_record import LastSeen
from conformance.scenario import Scenario
from conformance.subjects.subject import NO_DDP, Subject
from conformance.waiting.pending import Pending
from conformance.workers import machine_time
from conformance.workers.attached_messages import (
    BEAT_S,
    JOIN_TIMEOUT_S,
    LOST_S,
    Beat,
    Forget,
    Goodbye,
    Hello,
    Hurry,
    Ping,
    Reply,
    RunOrder,
    ToAgent,
)
from conformance.workers.channel import Channel, MessageError, wait
from conformance.workers.hearing import DEATH_GRACE_S, MOST_DEADLINES, MOST_LATE_S, RAISE_GRACE_S
from conformance.workers.messages import Seat
from conformance.workers.pool import nothing_left_behind, time_to_start

#: How much later than the deadline an agent may answer: it asks what others know, and makes its rank write a stack.
_MARGIN_S = 3.0
#: The controller gives up an agent whose answer is due and that has sent nothing for so long. It sends nothing while it
#: makes its rank, and while that writes a stack.
_SILENCE_S = LOST_S / 2
#: How long an agent may take to read what the controller sends; the others hear nothing meanwhile.
_SEND_TIMEOUT_S = LOST_S / 5
_NOTHING_SEEN = LastSeen("", -1, 0, 0, ())


@dataclass
class Reached:
    """An agent, as the controller sees it; `rank` and what follows are about the order that it carries out."""

    index: int
    host: str
    channel: Channel
    heard_at: float
    lost: str = ""
    choked: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    rank: int = 0
    until: float = -math.inf  # until when the rank may be silent, as far as is known
    seen: LastSeen = _NOTHING_SEEN

    def begin(self, rank: int) -> None:
        """Note that an order is given; one who has none says nothing."""
        self.rank, self.until, self.seen, self.heard_at = rank, -math.inf, _NOTHING_SEEN, machine_time.now()

    def tell(self, message: ToAgent) -> None:
        """Send `message`; ignores errors, because `_gather` notices an agent that is gone.

        One that has not read an earlier message to its end gets no other.
        """
        with self.lock, contextlib.suppress(OSError):
            if not self.choked:
                try:
                    self.channel.send(message, _SEND_TIMEOUT_S)
                except TimeoutError:
                    self.choked = True


class AttachedController:
    """Hands scenarios to the agents behind `channels`; a context manager, for one thread."""

    def __init__(self, backend: Backend, channels: Sequence[Channel], address: str) -> None:
        """Receive every agent's `Hello`. Ranks rendezvous through a store on this host's `address`.

        Raises:
            ConformanceError: an agent has ended, or not said hello for `JOIN_TIMEOUT_S` seconds.

        """
        self._backend = backend
        self._address = address
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        try:
            self._agents = _greeted(channels)
        except BaseException:
            for channel in channels:  # the other agents wait for a first word
                channel.close()
            raise
        self._pools: dict[tuple[str, tuple[int, ...], bool, bool], tuple[int, tuple[str, ...]]] = {}
        self._numbers = itertools.count(1)
        self._until = 0.0  # until when some rank may be silent, as far as its agent knows
        self._closed = threading.Event()
        self._pinging = threading.Thread(target=self._ping, daemon=True)
        self._pinging.start()

    @property
    def num_ranks(self) -> int:
        """How many ranks a scenario may have: one for each process that has joined, also if it has been lost since."""
        return len(self._agents)

    def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
        """Run the scenario on as many agents as it has ranks, spread over the hosts; returns each rank's observation.

        With `fresh` on new ranks; otherwise on those that ran the same subject before, if they are unharmed.

        Raises:
            ConformanceError: too few agents are left.

        """
        chosen = self._spread(scenario.world_size)
        key = subject.target, tuple(agent.index for agent in chosen), scenario.recorded, scenario.apart
        pool, after = self._pools.pop(key, (-1, ()))
        if fresh and after:
            self._forget(chosen, pool)
        if fresh or not after:
            pool, after = next(self._numbers), ()
        number = next(self._numbers)
        meeting = (self._address, self._store.port, f"pool{pool}")
        observations: dict[int, Observation] = {}
        ready: list[bool] = []
        try:
            for rank, agent in enumerate(chosen):
                backend = self._backend.source or self._backend.name
                seat = Seat(rank, scenario.world_size, backend, scenario.recorded, meeting, apart=scenario.apart)
                agent.tell(RunOrder(number, pool, seat, scenario.to_json(), subject))
            start_s = 0.0 if after else time_to_start(apart=scenario.apart)
            patience_s = MOST_DEADLINES * (scenario.deadline_s + start_s)
            observations, ready = self._gather(number, chosen, scenario, patience_s)
        finally:  # also when interrupted
            if len(ready) == len(chosen) and all(ready) and nothing_left_behind(observations, scenario.recorded):
                self._pools[key] = pool, remembered(after, scenario.id)
            else:
                self._forget(chosen, pool)
        return {rank: replace(seen, after=after) for rank, seen in sorted(observations.items())}

    def start(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> Pending[Mapping[int, Observation]]:
        """Return what `run` returns; it runs, however long it takes, when asked: an agent runs one rank at a time."""
        return Pending.waiting_for(lambda: self.run(scenario, subject, fresh=fresh))

    def retire(self, scenario: Scenario, subject: Subject) -> None:
        """End the ranks that could run `scenario` on the subject: none runs while nobody asks."""
        meant = subject.target, scenario.world_size, scenario.recorded, scenario.apart
        for key in [key for key in self._pools if (key[0], len(key[1]), *key[2:]) == meant]:
            number, _ = self._pools.pop(key)
            self._forget([agent for agent in self._agents if agent.index in key[1]], number)

    def expect(self, scenario: Scenario) -> Pending[Mapping[int, Facts]]:
        """Return what ranks must observe: by a replica, where a device has to compute it.

        That starts when it is asked for: an agent runs one rank at a time.

        Raises, when the facts are asked for:
            ReplicaError: the replica did not return.

        """
        return replica.expect(scenario, lambda one: self.start(one, NO_DDP))

    def close(self) -> None:
        """Send every agent `Goodbye` and close the connections."""
        self._closed.set()
        self._pinging.join()
        for agent in self._agents:
            agent.tell(Goodbye())
            agent.channel.close()

    def __enter__(self) -> AttachedController:
        """Return the controller."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the controller."""
        self.close()

    def _forget(self, agents: Sequence[Reached], pool: int) -> None:
        for agent in agents:
            agent.tell(Forget(pool))

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
        self, number: int, chosen: list[Reached], scenario: Scenario, patience_s: float
    ) -> tuple[dict[int, Observation], list[bool]]:
        """Wait until every agent has answered or the controller has given it up."""
        machine_time.resume()
        self._until = started = machine_time.now()
        due, end = started + scenario.deadline_s + _MARGIN_S, started + patience_s + MOST_LATE_S + _MARGIN_S + LOST_S
        waiting = {agent.channel: agent for agent in chosen}
        for rank, agent in enumerate(chosen):
            agent.begin(rank)
        observations: dict[int, Observation] = {}
        ready: list[bool] = []

        def give_up(agent: Reached, lost: str, fate: Ending) -> None:
            agent.lost = lost
            observations[agent.rank] = _last_heard(agent, fate)
            del waiting[agent.channel]

        while waiting:
            ready_now = wait(list(waiting), BEAT_S)
            for agent in [agent for channel, agent in waiting.items() if channel in ready_now]:
                try:
                    message = agent.channel.arrived()
                except (EOFError, OSError, MessageError) as error:
                    lost = f"sent what no agent sends ({error})" if isinstance(error, MessageError) else "ended"
                    give_up(agent, lost, Ending("abandoned", detail=f"abandoned: the process that held it {lost}"))
                    continue
                if message is None:  # half of one
                    continue
                agent.heard_at = machine_time.now()
                if isinstance(message, Beat) and message.number == number:
                    agent.until = agent.heard_at + min(patience_s, message.left_s)
                    agent.seen = message.last_seen or agent.seen
                elif isinstance(message, Reply) and message.number == number:
                    if message.observation.fate.kind == "returned":  # the others may just have heard from it
                        agent.until = agent.heard_at + scenario.deadline_s
                    observations[agent.rank] = replace(message.observation, rank=agent.rank)
                    ready.append(message.ready)
                    del waiting[agent.channel]
                    hurry_s = _patience_s(message.observation)
                    if hurry_s is not None and agent.rank not in scenario.doomed:
                        for other in waiting.values():
                            other.tell(Hurry(number, hurry_s))
            machine_time.resume()
            now = machine_time.now()
            self._until = min(max(started, *(agent.until for agent in chosen if not agent.lost)), started + patience_s)
            for agent in list(waiting.values()):
                silent_s = now - agent.heard_at
                where = agent.seen.phase or "an unknown phase"
                if now > due and silent_s > _SILENCE_S:
                    lost = f"has not been heard of for {silent_s:.0f} s"
                    fate = Ending("hung", detail=f"unheard of for {silent_s:.0f} s, last seen in {where}")
                    give_up(agent, lost, fate)
                elif now > end:
                    lost = f"is there and has not answered for {end - started:.0f} s"
                    give_up(agent, lost, Ending("hung", detail=f"hung: its host {lost}; last seen in {where}"))
        return observations, ready

    def _ping(self) -> None:
        while not self._closed.wait(BEAT_S):
            left_s = self._until - machine_time.now()
            for agent in self._agents:
                if not agent.lost:
                    agent.tell(Ping(left_s))


def _greeted(channels: Sequence[Channel]) -> list[Reached]:
    """Return the agents by their index, once each has said hello; until then none hears anything."""
    agents: list[Reached] = []
    waiting = list(channels)
    until = machine_time.now() + JOIN_TIMEOUT_S
    while waiting:
        ready = wait(waiting, max(0.0, until - machine_time.now()))
        missing = sorted({*range(len(channels))} - {agent.index for agent in agents})
        if not ready:
            raise ConformanceError(
                f"of {len(channels)} processes {_listed(missing)} said nothing for {JOIN_TIMEOUT_S:g} s after they"
                " had joined: the host is down or the link to it is cut"
            )
        for channel in [channel for channel in waiting if channel in ready]:
            try:
                hello = channel.arrived()
            except (EOFError, OSError, MessageError) as error:
                raise ConformanceError(
                    f"a process ended before it was ready ({str(error) or 'its connection is closed'}), of"
                    f" {_listed(missing)}; its own output says why"
                ) from error
            if hello is None:  # half of one
                continue
            if not isinstance(hello, Hello):
                raise ConformanceError(f"an agent must say hello first, got {type(hello).__name__}")
            agents.append(Reached(hello.index, hello.host, channel, machine_time.now()))
            waiting.remove(channel)
    return sorted(agents, key=lambda one: one.index)


def _listed(processes: Sequence[int]) -> str:
    return f"number {', '.join(map(str, processes))}"


def _last_heard(agent: Reached, fate: Ending) -> Observation:
    seen = agent.seen
    return Observation(
        agent.rank,
        fate,
        history=seen.collectives,
        phase=seen.phase,
        faults_fired=seen.faults_fired,
        host=agent.host,
    )


def _patience_s(observation: Observation) -> float | None:
    """Return how long to wait for the other ranks after this one's end; None for their own deadline."""
    if observation.fate.kind in ("exited", "killed"):
        return DEATH_GRACE_S
    return RAISE_GRACE_S if observation.raised is not None else None
