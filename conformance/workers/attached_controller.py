"""The controller of `--attach`: runs scenarios through one agent per process, on this host and others.

It has the interface of the controller of a single machine. But it cannot examine a rank itself: it has only the
reports of the rank's agent, and of a host that is cut off the last one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import trio
from torch._C._distributed_c10d import TCPStore

from conformance.backends.backend import Backend
from conformance.errors import ConformanceError
from conformance.observation import Ending, Facts, Observation, remembered
from conformance.programs import replica
from conformance.programs.registry import misuses
from conformance.recorder.flight_record import LastSeen
from conformance.scenario import Scenario
from conformance.subjects.subject import NO_DDP, Subject
from conformance.waiting import loop, machine_time
from conformance.waiting.kept_waiting import MOST_TIMES
from conformance.waiting.limits import DEATH_GRACE_S, JOIN_TIMEOUT_S, LOST_S, MARGIN_S, RAISE_GRACE_S, TURN_S
from conformance.workers.attached_messages import Beat, Forget, Goodbye, Hello, Ping, Reply, RunOrder, Shorten, ToAgent
from conformance.workers.channel import Channel, MessageError, wait
from conformance.workers.deadline import MOST_DEADLINES
from conformance.workers.messages import Seat
from conformance.workers.pool import nothing_left_behind, time_to_start

#: The controller gives up an agent whose answer is due and that has sent nothing for so long. It sends nothing while it
#: makes its rank, and while that writes a stack.
_SILENCE_S = LOST_S / 2
#: How long an agent may take to read a message of the controller, which sends nothing to the others meanwhile.
_SEND_TIMEOUT_S = LOST_S / 5
_NOTHING_SEEN = LastSeen("", -1, 0, 0, ())


@dataclass
class Reached:
    """An agent, as the controller sees it; `rank` and what follows are about the order that it carries out."""

    index: int
    host: str
    channel: Channel
    last_message_at: float
    lost: str = ""
    choked: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    rank: int = 0
    until: float = -math.inf  # until when the rank may be silent, as far as is known
    seen: LastSeen = _NOTHING_SEEN

    def begin(self, rank: int) -> None:
        """Note that an order is given; one who has none says nothing."""
        self.rank, self.until, self.seen, self.last_message_at = rank, -math.inf, _NOTHING_SEEN, machine_time.now()

    def send(self, message: ToAgent) -> None:
        """Send `message`; ignores errors, because `_Order` notices an agent that is gone.

        One that has not read an earlier message to its end gets no other.
        """
        with self.lock, contextlib.suppress(OSError):
            if not self.choked:
                try:
                    self.channel.send(message, _SEND_TIMEOUT_S)
                except TimeoutError:
                    self.choked = True


@dataclass
class _Order:
    """A scenario that `chosen` agents run, after their ranks have started, which may take `start_s` seconds."""

    number: int
    chosen: list[Reached]
    scenario: Scenario
    start_s: float
    observations: dict[int, Observation] = field(default_factory=dict)
    ready: list[bool] = field(default_factory=list)
    started: float = field(default_factory=trio.current_time)

    @property
    def patience_s(self) -> float:
        """How long ranks may take, whatever they do, however busy the machine is."""
        return MOST_DEADLINES * (MOST_TIMES * self.scenario.deadline_s + self.start_s)

    @property
    def due(self) -> float:
        """From when on an agent that is silent is given up."""
        return self.started + self.scenario.deadline_s + MARGIN_S

    @property
    def end(self) -> float:
        """When an agent is given up that only says that it is there."""
        return self.started + self.patience_s + MARGIN_S + LOST_S

    @property
    def until(self) -> float:
        """Until when some rank may be silent, as far as its agent knows."""
        known = (agent.until for agent in self.chosen if not agent.lost)
        return min(max([self.started, *known]), self.started + self.patience_s)

    def take_message(self, agent: Reached) -> None:
        """Take what an agent has sent; if it has ended, or sent what no agent sends, give it up."""
        try:
            message = agent.channel.arrived()
        except (EOFError, OSError, MessageError) as error:
            lost = f"sent what no agent sends ({error})" if isinstance(error, MessageError) else "ended"
            self._give_up(agent, lost, Ending("abandoned", detail=f"abandoned: the process that held it {lost}"))
            return
        if message is None:  # half of one
            return
        agent.last_message_at = trio.current_time()
        if isinstance(message, Beat) and message.number == self.number:
            agent.until = agent.last_message_at + min(self.patience_s, message.left_s)
            agent.seen = message.last_seen or agent.seen
        elif isinstance(message, Reply) and message.number == self.number:
            if message.observation.fate.kind == "returned":  # other ranks may just have received something from it
                agent.until = agent.last_message_at + self.scenario.deadline_s
            self.observations[agent.rank] = replace(message.observation, rank=agent.rank)
            self.ready.append(message.ready)
            patience_s = _patience_s(message.observation)
            if patience_s is not None and agent.rank not in self.scenario.expected_dead:
                for other in self.chosen:
                    if other.rank not in self.observations:
                        other.send(Shorten(self.number, patience_s))

    def give_up_silent(self, agent: Reached) -> None:
        """Give up an agent whose answer is due and that has sent nothing for long, or nothing that counts."""
        silent_s = trio.current_time() - agent.last_message_at
        where = agent.seen.phase or "an unknown phase"
        if silent_s >= _SILENCE_S:
            detail = f"unheard of for {silent_s:.0f} s, last seen in {where}"
            self._give_up(agent, f"has not been heard of for {silent_s:.0f} s", Ending("hung", detail=detail))
        else:
            lost = f"is there and has not answered for {self.end - self.started:.0f} s"
            self._give_up(agent, lost, Ending("hung", detail=f"hung: its host {lost}; last seen in {where}"))

    def _give_up(self, agent: Reached, lost: str, fate: Ending) -> None:
        agent.lost = lost
        self.observations[agent.rank] = _observation_of_lost(agent, fate)


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
        self._one_at_a_time = trio.Lock()  # an agent runs one rank at a time
        self._until = 0.0  # until when some rank may be silent, as far as its agent knows
        self._closed = threading.Event()
        self._pinging = threading.Thread(target=self._ping, daemon=True)
        self._pinging.start()

    @property
    def num_ranks(self) -> int:
        """How many ranks a scenario may have: one for each process that has joined, also if it has been lost since."""
        return len(self._agents)

    def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> Mapping[int, Observation]:
        """Run the scenario on as many agents as it has ranks, spread over the hosts; returns each rank's observation.

        With `fresh` on new ranks; otherwise on those that ran the same subject before, if they are unharmed.

        Raises:
            ConformanceError: too few agents are left.

        """
        return loop.run(self.observe, scenario, subject, fresh)

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        """Do what `run` does, from a coroutine, when all that was asked for before has ended."""
        async with self._one_at_a_time:
            return await self._observe(scenario, subject, fresh=fresh)

    async def _observe(self, scenario: Scenario, subject: Subject, *, fresh: bool) -> dict[int, Observation]:
        chosen = self._spread(scenario.world_size)
        key = subject.target, tuple(agent.index for agent in chosen), scenario.recorded, scenario.apart
        pool, after = self._pools.pop(key, (-1, ()))
        if fresh and after:
            self._forget(chosen, pool)
        if fresh or not after:
            pool, after = next(self._numbers), ()
        order = _Order(next(self._numbers), chosen, scenario, 0.0 if after else time_to_start(apart=scenario.apart))
        self._until = order.started
        meeting = (self._address, self._store.port, f"pool{pool}")
        try:
            for rank, agent in enumerate(chosen):
                backend = self._backend.source or self._backend.name
                seat = Seat(rank, scenario.world_size, backend, scenario.recorded, meeting, apart=scenario.apart)
                agent.send(RunOrder(order.number, pool, seat, scenario.to_json(), subject))
            async with trio.open_nursery() as nursery:
                for rank, agent in enumerate(chosen):
                    agent.begin(rank)
                    nursery.start_soon(self._follow, agent, order)
        finally:  # also when interrupted
            ready = len(order.ready) == len(chosen) and all(order.ready)
            spoilt = misuses(scenario.program)
            if ready and not spoilt and nothing_left_behind(order.observations, scenario.recorded):
                self._pools[key] = pool, remembered(after, scenario.id)
            else:
                self._forget(chosen, pool)
        return {rank: replace(seen, after=after) for rank, seen in sorted(order.observations.items())}

    def retire(self, scenario: Scenario, subject: Subject) -> None:
        """End the ranks that could run `scenario` on the subject: none runs while nobody asks."""
        meant = subject.target, scenario.world_size, scenario.recorded, scenario.apart
        for key in [key for key in self._pools if (key[0], len(key[1]), *key[2:]) == meant]:
            number, _ = self._pools.pop(key)
            self._forget([agent for agent in self._agents if agent.index in key[1]], number)

    async def expect(self, scenario: Scenario) -> Mapping[int, Facts]:
        """Have it computed what ranks must observe: by a replica, where a device has to.

        Raises:
            ReplicaError: the replica did not return.

        """
        return await replica.expect(scenario, lambda one: self.observe(one, NO_DDP))

    def close(self) -> None:
        """Send every agent `Goodbye` and close the connections."""
        self._closed.set()
        self._pinging.join()
        for agent in self._agents:
            agent.send(Goodbye())
            agent.channel.close()

    def __enter__(self) -> AttachedController:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _forget(self, agents: Sequence[Reached], pool: int) -> None:
        for agent in agents:
            agent.send(Forget(pool))

    def _spread(self, world_size: int) -> list[Reached]:
        """Return agents at equal distances in the list, so that even two ranks run on two hosts."""
        living = [agent for agent in self._agents if not agent.lost]
        if world_size > len(living):
            lost = "; ".join(dict.fromkeys(f"{agent.host} {agent.lost}" for agent in self._agents if agent.lost))
            raise ConformanceError(
                f"{world_size} ranks are needed, and {len(living)} of {len(self._agents)} are left: {lost}"
            )
        return [living[rank * len(living) // world_size] for rank in range(world_size)]

    async def _follow(self, agent: Reached, order: _Order) -> None:
        while agent.rank not in order.observations:
            with trio.move_on_at(min(order.end, max(order.due, agent.last_message_at + _SILENCE_S))) as waiting:
                await trio.lowlevel.wait_readable(agent.channel)
            if waiting.cancelled_caught:
                order.give_up_silent(agent)
            else:
                order.take_message(agent)
            self._until = order.until

    def _ping(self) -> None:
        while not self._closed.wait(TURN_S):
            left_s = self._until - machine_time.now()
            for agent in self._agents:
                if not agent.lost:
                    agent.send(Ping(left_s))


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


def _observation_of_lost(agent: Reached, fate: Ending) -> Observation:
    """Return an observation of a rank whose agent is lost, from the agent's last report."""
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
