"""The agent: runs in a process that torchrun, srun or mpirun has started, and runs one rank there.

The agent is not the rank: it has a zygote and, for each pool of the controller's, a `Pool` of one rank, as the
controller of a single machine has one of all. So it survives the rank and can report how the rank ended. What it hears
of the other hosts while it waits, it hears from the controller, whose orders it carries out. When the controller is
silent for too long, the agent raises an error that says what its rank was doing, and ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from msgspec.structs import replace as change

from conformance.errors import ConformanceError
from conformance.recorder.flight_record import LastSeen
from conformance.scenario import Scenario
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
)
from conformance.workers.attached_place import Place
from conformance.workers.channel import Channel, wait
from conformance.workers.hearing import Elsewhere
from conformance.workers.pool import Pool
from conformance.workers.tensors import portable
from conformance.workers.zygote_process import ZygoteProcess

#: While a rank works, its agent beats so often that the controller knows the rank's state if the link is cut.
_RANK_BEAT_S = 0.05
#: What another host's rank does is known here so much later.
_TOLD_S = 4 * BEAT_S
#: How many of a rank's collectives a beat carries; the controller needs them only when the link is cut.
_BEATEN_COLLECTIVES = 32


class Dismissed(Exception):  # noqa: N818 - how an agent ends, not an error
    """The controller has sent `Goodbye`, or is gone."""


class Agent(Elsewhere):
    """Serves a controller over `channel` with ranks forked on this host."""

    turn_s = _RANK_BEAT_S

    def __init__(
        self,
        channel: Channel,
        place: Place,
        preload: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> None:
        """Start the zygote and send `Hello`; ranks use the device of `place` and get `environment`."""
        self.sources = (channel,)
        self._channel = channel
        self._host = place.host
        self._local_index = place.local_index
        self._zygote = ZygoteProcess(None, preload, environment)
        self._zygote.await_ready()
        self._pools: dict[int, Pool] = {}
        self._heard_at = self._beaten_at = machine_time.now()
        self._others_until = 0.0  # until when other agents wait for their ranks, as the controller has last said
        self._beaten: LastSeen | None = None
        self._orders: list[RunOrder | Forget] = []
        self._working: tuple[RunOrder, Pool] | None = None
        channel.send(Hello(place.index, place.host))

    def serve(self) -> None:
        """Carry out the controller's orders until it sends `Goodbye`.

        Raises:
            ConformanceError: the controller has sent nothing for `LOST_S` seconds, `JOIN_TIMEOUT_S` at the beginning.

        """
        try:
            self._await_first_word()
            while True:
                while not self._orders:
                    wait(self.sources, BEAT_S)
                    self.listen()
                order = self._orders.pop(0)
                if isinstance(order, RunOrder):
                    self._carry_out(order)
                elif (pool := self._pools.pop(order.pool, None)) is not None:
                    pool.close()
        except (Dismissed, EOFError, BrokenPipeError, ConnectionResetError):
            return
        finally:
            self._zygote.close()

    def listen(self) -> None:
        """Take in what the controller has sent, and tell it what the rank does, if that is due.

        Without an order nobody reads what the agent sends, maybe for long.
        """
        while (message := self._channel.arrived()) is not None:
            self._heard_at = machine_time.now()
            match message:
                case Goodbye():
                    raise Dismissed
                case Ping(left_s):
                    self._others_until = self._heard_at + left_s
                case Hurry(number, patience_s):
                    if self._working and self._working[0].number == number:
                        self.patience_s = min(self.patience_s, patience_s)
                case _:
                    self._orders.append(message)
        machine_time.resume()
        now = machine_time.now()
        if now - self._heard_at > LOST_S:
            raise ConformanceError(self._last_words())
        if self._working and now - self._beaten_at >= _RANK_BEAT_S:
            self._beaten_at = now
            self._channel.send(self._beat(*self._working))

    def until(self, own: float) -> float:
        """Return until when this host waits for its rank: as long as any rank of the order goes on."""
        alone = self._working is not None and self._working[0].seat.world_size == 1
        return own if alone else max(own, self._others_until) + _TOLD_S

    def _await_first_word(self) -> None:
        """Wait until the controller speaks, which it does when all agents have joined."""
        if not wait(self.sources, JOIN_TIMEOUT_S):
            raise ConformanceError(
                f"{self._host}: the controller has not begun after {JOIN_TIMEOUT_S:g} s: other processes have not"
                " joined, its host is down, or the link to it is cut"
            )
        self._heard_at = machine_time.now()

    def _carry_out(self, order: RunOrder) -> None:
        machine_time.resume()  # what was before is no part of this order
        if order.pool not in self._pools:
            seat = change(order.seat, device_index=self._local_index)
            self._pools[order.pool] = Pool(self._zygote, [seat], elsewhere=self)
        pool = self._pools[order.pool]
        self._working, self.patience_s = (order, pool), math.inf
        observations = pool.start()
        if not observations:
            pool.begin(Scenario.from_json(order.scenario), order.subject)
            observations = pool.finish()
        self._working = None
        (observation,) = observations.values()
        observation = portable(replace(observation, host=self._host))
        self._channel.send(Reply(order.number, observation, pool.reusable))

    def _beat(self, order: RunOrder, pool: Pool) -> Beat:
        (seen,), left_s = pool.last_seen()
        seen = replace(seen, collectives=seen.collectives[-_BEATEN_COLLECTIVES:])
        if seen == self._beaten:
            return Beat(order.number, left_s=left_s)
        self._beaten = seen
        return Beat(order.number, seen, left_s)

    def _last_words(self) -> str:
        silence = f"no message from the controller for {LOST_S:g} s: its host is down or the link to it is cut"
        if self._working is None:
            return f"{self._host}: {silence}; no scenario was running here"
        order, pool = self._working
        (seen,), _ = pool.last_seen()
        last = seen.collectives[-1].describe() if seen.collectives else "none yet"
        return (
            f"{self._host}: {silence}. Rank {order.seat.rank} of {order.scenario['id']} is in phase {seen.phase},"
            f" its last collective {last}"
        )
