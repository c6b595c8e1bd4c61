"""The agent: runs in a process that torchrun, srun or mpirun has started, and forks one rank there.

The agent is not the rank: it forks one from a zygote of its own, as the controller of a single machine does, so it
survives the rank and can report how the rank ended. It only carries out the controller's orders. When the controller is
silent for too long, the agent raises an error that says what its rank was doing, and ends.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import replace

from msgspec.structs import replace as change

from conformance.errors import ConformanceError
from conformance.observation import Ending, Observation
from conformance.recorder.flight_record import LastSeen, read_flight
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
from conformance.workers.autopsy import death, describe, examine_living, tail
from conformance.workers.channel import Channel, MessageError, wait
from conformance.workers.hearing import EOF_GRACE_S, Waiting, answer, lost, not_an_answer
from conformance.workers.interpreter import START_TIMEOUT_S as INTERPRETER_TIMEOUT_S
from conformance.workers.messages import Answer, FromRank, Ready, Seat
from conformance.workers.pool import START_TIMEOUT_S
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


class Post:
    """One rank of this host: its seat, process and channel."""

    def __init__(self, zygote: ZygoteProcess, seat: Seat) -> None:
        """Fork the rank."""
        number, directory = zygote.new_pool()
        self.seat = change(seat, pool=number, directory=str(directory))
        (self.pid,), (self.channel,) = zygote.fork((self.seat,), START_TIMEOUT_S)
        self.open = True  # whether the rank may still send something
        self.ready = False
        self.waiting: Waiting | None = None


class Agent:
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
        self._posts: dict[int, Post] = {}
        self._heard_at = self._beaten_at = machine_time.now()
        self._others_until = 0.0  # until when other agents wait for their ranks, as the controller has last said
        self._beaten: LastSeen | None = None
        self._orders: list[RunOrder | Forget] = []
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
                    self._listen(timeout_s=BEAT_S)
                order = self._orders.pop(0)
                if isinstance(order, Forget):
                    self._forget(order.pool)
                else:
                    self._carry_out(order)
        except (Dismissed, EOFError, BrokenPipeError, ConnectionResetError):
            return
        finally:
            self._zygote.close()

    def _await_first_word(self) -> None:
        """Wait until the controller speaks, which it does when all agents have joined."""
        if not wait([self._channel], JOIN_TIMEOUT_S):
            raise ConformanceError(
                f"{self._host}: the controller has not begun after {JOIN_TIMEOUT_S:g} s: other processes have not"
                " joined, its host is down, or the link to it is cut"
            )
        self._heard_at = machine_time.now()

    def _carry_out(self, order: RunOrder) -> None:
        machine_time.resume()  # what was before is no part of this order
        post = self._posts.get(order.pool)
        observation: Observation | None = None
        if post is None:
            post = self._posts[order.pool] = Post(self._zygote, change(order.seat, device_index=self._local_index))
            observation = self._start(order, post)
        if observation is None:
            started = machine_time.now()
            with contextlib.suppress(OSError):  # the rank has just died; `_await` finds out how
                post.channel.send(order.job)
            message = self._await(order, post, order.deadline_s, order.job.number)
            if isinstance(message, Ready):  # never: `answer` refuses a second one
                raise TypeError("a rank that works cannot become ready")
            observation = message.observation if isinstance(message, Answer) else message
            elapsed_ns = max(0, int((machine_time.now() - started) * 1e9))
            observation = replace(observation, duration_ns=observation.duration_ns or elapsed_ns)
            if post.ready and observation.fate.kind != "returned":
                observation = replace(observation, stderr=tail(post.seat))
        observation = portable(replace(observation, host=self._host))
        self._channel.send(Reply(order.number, observation, post.ready))

    def _start(self, order: RunOrder, post: Post) -> Observation | None:
        """Wait until the rank is connected to the others; returns an observation of why it is not, else None."""
        message = self._await(order, post, START_TIMEOUT_S + (INTERPRETER_TIMEOUT_S if post.seat.apart else 0.0), 0)
        if isinstance(message, Observation):
            return message
        if not isinstance(message, Ready) or message.error is None:
            return None
        post.ready = False
        fate = Ending("raised", detail=f"raised {message.error}")
        return replace(describe(post.seat, fate), raised=message.error)

    def _await(self, order: RunOrder, post: Post, deadline_s: float, number: int) -> FromRank | Observation:
        """Return what the rank sends about job `number`, or an observation of why it does not; `post.ready` says which.

        The rank has as long as any rank of the order makes progress or waits for a processor. See `answer` for
        `number`.
        """
        post.ready = False
        post.waiting = waiting = Waiting(deadline_s, [post.pid], [post.seat.file("flight")])
        kind, deadline = "hung", machine_time.now() + deadline_s
        told_s = _TOLD_S if order.seat.world_size > 1 else 0.0
        while True:
            self._zygote.update()
            if post.open:
                try:
                    message = answer(post.channel, post.seat.rank, number)
                except (EOFError, OSError):
                    post.open = False
                    deadline = machine_time.now() + EOF_GRACE_S
                    continue
                except MessageError as error:
                    return not_an_answer(post.seat, error)
                if message is not None:
                    post.ready = True
                    return message
            if (status := self._zygote.exit_status(post.seat)) is not None:
                return describe(post.seat, death(status))
            if self._zygote.gone:
                return describe(post.seat, lost(self._zygote.end))
            machine_time.resume()
            if post.open and machine_time.now() >= deadline:
                own_until = waiting.until()
                deadline = own_until if kind == "abandoned" else max(own_until, self._others_until) + told_s
            left_s = deadline - machine_time.now()
            if left_s <= 0:
                half, deaf = ([post.seat.rank] if so else () for so in (post.channel.half_a_message, not post.open))
                return examine_living(self._zygote, {post.seat: post.pid}, kind, half, deaf)[post.seat.rank]
            sources = [*([post.channel] if post.open else ()), *self._zygote.sources]
            for hurry in self._listen(*sources, timeout_s=min(_RANK_BEAT_S, left_s), beat=(order, post)):
                if hurry.number == order.number and post.open:
                    post.waiting, kind = (waiting := waiting.cut_to(hurry.patience_s)), "abandoned"
                    deadline = min(deadline, waiting.until())

    def _listen(self, *sources: Channel, timeout_s: float, beat: tuple[RunOrder, Post] | None = None) -> list[Hurry]:
        """Wait for the controller or one of `sources`, queue orders, and send a beat of an order if it is due.

        Without one nobody reads what the agent sends, maybe for long.
        """
        wait([self._channel, *sources], timeout_s)
        hurries = []
        while (message := self._channel.arrived()) is not None:
            self._heard_at = machine_time.now()
            if isinstance(message, Goodbye):
                raise Dismissed
            if isinstance(message, Hurry):
                hurries.append(message)
            elif isinstance(message, Ping):
                self._others_until = self._heard_at + message.left_s
            else:
                self._orders.append(message)
        machine_time.resume()
        now = machine_time.now()
        if now - self._heard_at > LOST_S:
            raise ConformanceError(self._last_words(beat))
        if beat is not None and now - self._beaten_at >= _RANK_BEAT_S:
            self._beaten_at = now
            self._channel.send(self._beat(*beat))
        return hurries

    def _beat(self, order: RunOrder, post: Post) -> Beat:
        seen = read_flight(post.seat.file("flight"))
        seen = replace(seen, collectives=seen.collectives[-_BEATEN_COLLECTIVES:])
        own_until = post.waiting.given([seen]) if post.waiting is not None else 0.0
        left_s = own_until - machine_time.now()
        if seen == self._beaten:
            return Beat(order.number, left_s=left_s)
        self._beaten = seen
        return Beat(order.number, seen, left_s)

    def _last_words(self, beat: tuple[RunOrder, Post] | None) -> str:
        silence = f"no message from the controller for {LOST_S:g} s: its host is down or the link to it is cut"
        if beat is None:
            return f"{self._host}: {silence}; no scenario was running here"
        order, post = beat
        seen = read_flight(post.seat.file("flight"))
        last = seen.collectives[-1].describe() if seen.collectives else "none yet"
        return (
            f"{self._host}: {silence}. Rank {post.seat.rank} of {order.job.scenario['id']} is in phase {seen.phase},"
            f" its last collective {last}"
        )

    def _forget(self, pool: int) -> None:
        post = self._posts.pop(pool, None)
        if post is not None:
            self._zygote.signal(post.seat, signal.SIGKILL)
            post.channel.close()
