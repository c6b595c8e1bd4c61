"""The agent: runs in a process that torchrun, srun or mpirun has started, and runs one rank there.

The agent is not the rank: it has a zygote and, for each pool of the controller, a `Pool` of one rank. So it survives
the rank and can report how the rank ended. The controller sends it orders and news of the other hosts. When the
controller is silent for too long, the agent raises an error that says what its rank was doing, and ends.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import trio
from msgspec.structs import replace as change

from conformance.errors import ConformanceError
from conformance.recorder.flight_record import LastSeen
from conformance.scenario import Scenario
from conformance.waiting import loop
from conformance.waiting.limits import JOIN_TIMEOUT_S, LOOK_S, LOST_S, TURN_S
from conformance.workers.answers import RemoteRanks
from conformance.workers.attached_messages import Beat, Forget, Goodbye, Hello, Ping, Reply, RunOrder, Shorten
from conformance.workers.attached_place import Place
from conformance.workers.channel import Channel
from conformance.workers.pool import Pool
from conformance.workers.tensors import portable
from conformance.workers.zygote_process import ZygoteProcess

#: A report of another host's rank takes at most so long to arrive here.
_REPORT_DELAY_S = 4 * TURN_S
#: How many of a rank's collectives a beat carries; the controller needs them only when the link is cut.
_BEATEN_COLLECTIVES = 32


class Dismissed(Exception):  # noqa: N818 - how an agent ends, not an error
    """The controller has sent `Goodbye`, or is gone."""


class Agent(RemoteRanks):
    """Serves a controller over `channel` with ranks forked on this host."""

    def __init__(
        self,
        channel: Channel,
        place: Place,
        preload: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> None:
        """Start the zygote and send `Hello`; ranks use the device of `place` and get `environment`."""
        self._channel = channel
        self._host = place.host
        self._local_index = place.local_index
        self._zygote = ZygoteProcess(None, preload, environment)
        self._zygote.await_ready()
        self._pools: dict[int, Pool] = {}
        self._remote_deadline = 0.0  # until when other agents wait for their ranks, by the last `Ping`
        self._beaten: LastSeen | None = None
        self._working: tuple[RunOrder, Pool] | None = None
        channel.send(Hello(place.index, place.host))

    def serve(self) -> None:
        """Carry out the controller's orders until it sends `Goodbye`.

        Raises:
            ConformanceError: the controller was silent for `LOST_S` seconds, or `JOIN_TIMEOUT_S` before its first word.

        """
        try:
            loop.run(self._serve)
        except (Dismissed, EOFError, BrokenPipeError, ConnectionResetError):
            return
        finally:
            self._zygote.close()

    async def _serve(self) -> None:
        send, orders = trio.open_memory_channel[RunOrder | Forget](math.inf)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, send)
            async for order in orders:
                if isinstance(order, RunOrder):
                    await self._carry_out(order)
                elif (pool := self._pools.pop(order.pool, None)) is not None:
                    pool.close()

    async def _listen(self, orders: trio.MemorySendChannel[RunOrder | Forget]) -> None:
        """Take in what the controller sends: first when all agents have joined, and then something every `TURN_S`."""
        timeout_s, silence = JOIN_TIMEOUT_S, self._never_begun
        while True:
            with trio.move_on_after(timeout_s) as listening:
                await trio.lowlevel.wait_readable(self._channel)
            if listening.cancelled_caught:
                raise ConformanceError(silence())
            timeout_s, silence = LOST_S, self._last_words
            while (message := self._channel.arrived()) is not None:
                match message:
                    case Goodbye():
                        raise Dismissed
                    case Ping(left_s):
                        self._remote_deadline = trio.current_time() + left_s
                    case Shorten(number, patience_s):
                        if self._working and self._working[0].number == number:
                            self.patience_s = min(self.patience_s, patience_s)
                            self._working[1].shorten_deadline()
                    case _:
                        orders.send_nowait(message)

    def until(self, own: float) -> float:
        """Return the deadline of this host's rank: it lasts while any rank of the order makes progress."""
        alone = self._working is not None and self._working[0].seat.world_size == 1
        return own if alone else max(own, self._remote_deadline) + _REPORT_DELAY_S

    async def _carry_out(self, order: RunOrder) -> None:
        if order.pool not in self._pools:
            seat = change(order.seat, device_index=self._local_index)
            self._pools[order.pool] = Pool(self._zygote, [seat], remote=self)
        pool = self._pools[order.pool]
        self._working, self.patience_s = (order, pool), math.inf
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_beating, order, pool)
            observations = await pool.connect()
            if not observations:
                pool.begin(Scenario.from_json(order.scenario), order.subject)
                observations = await pool.finish()
            nursery.cancel_scope.cancel()
        self._working = None
        (observation,) = observations.values()
        observation = portable(replace(observation, host=self._host))
        self._channel.send(Reply(order.number, observation, pool.reusable))

    async def _keep_beating(self, order: RunOrder, pool: Pool) -> None:
        """Report to the controller what the rank does, as long as an order runs."""
        while True:
            await trio.sleep(LOOK_S)
            self._channel.send(self._beat(order, pool))

    def _never_begun(self) -> str:
        return (
            f"{self._host}: the controller has not begun after {JOIN_TIMEOUT_S:g} s: other processes have not"
            " joined, its host is down, or the link to it is cut"
        )

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
