"""The warm ranks of one world size: runs one scenario at a time on them, and decides whether to reuse them."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from conformance.backends.backend import Backend
from conformance.observation import Ending, Observation, Raised
from conformance.recorder.flight_record import read_flight
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject
from conformance.workers.autopsy import death, describe, examine_living, tail
from conformance.workers.channel import Channel, MessageError, wait
from conformance.workers.forked import is_stopped
from conformance.workers.messages import Answer, FromRank, Job, Ready, Seat
from conformance.workers.zygote_process import ZygoteProcess

#: How long the other ranks may go on after one has died. gloo raises at once when a connection breaks; a rank that
#: takes longer would wait for ever.
DEATH_GRACE_S = 0.3
#: The same after one has raised. Its process lives, so the others get no error from the backend; on a busy machine they
#: may be about to raise the same exception.
RAISE_GRACE_S = 1.0
#: How long the zygote may take to report the death of a rank that has closed its connection, on a busy machine.
EOF_GRACE_S = 10.0
#: Connecting the ranks takes tens of milliseconds, but the first use of a GPU may take many seconds.
START_TIMEOUT_S = 60.0
#: The fate of a rank whose zygote is gone.
LOST = Ending("abandoned", detail="abandoned: the process that had forked it ended first")
#: As long as some rank enters a phase or issues a collective now and then, ranks may take this many deadlines, because
#: the machine may be slow.
MOST_DEADLINES = 5


class Pool:
    """`world_size` ranks with a connected default group; scenarios reuse them until one leaves them in doubt."""

    def __init__(
        self, zygote: ZygoteProcess, backend: Backend, world_size: int, *, recorded: bool, start_timeout_s: float
    ) -> None:
        """Fork the ranks; `start` waits for them, at most `start_timeout_s` seconds. Raises `ZygoteGoneError`."""
        self._zygote = zygote
        self._start_timeout_s = start_timeout_s
        number, self._directory = zygote.new_pool()
        self._seats = tuple(
            Seat(number, rank, world_size, backend.source or backend.name, str(self._directory), recorded)
            for rank in range(world_size)
        )
        self._pids, self._channels = zygote.fork(self._seats, start_timeout_s)
        self._started = self._reusable = False
        self._number = 0
        self._after = ""

    def start(self) -> dict[int, Observation]:
        """Wait until the ranks are connected to each other; returns observations of why they are not, else nothing.

        Later calls return at once.
        """
        if self._started:
            return {}
        messages, observations = self._gather(self._start_timeout_s)
        for rank, message in messages.items():
            if isinstance(message, Ready) and message.error is not None:
                fate = Ending("raised", detail=f"raised {message.error}")
                observations[rank] = replace(describe(self._seats[rank], fate), raised=message.error)
        self._started = not observations
        if observations:
            bystanders = messages.keys() - observations.keys()
            observations |= {rank: describe(self._seats[rank], Ending("abandoned")) for rank in bystanders}
        return dict(sorted(observations.items()))

    def run(self, scenario: Scenario, subject: Subject) -> dict[int, Observation]:
        """Run one scenario and return an observation for every rank: its own, or the controller's if it sent none."""
        self.begin(scenario, subject)
        return self.finish()

    def begin(self, scenario: Scenario, subject: Subject) -> None:
        """Start a scenario on the ranks, which `finish` waits for; the pool is not reusable in between."""
        self._reusable = False  # until the checks of `finish` pass; also if that call is interrupted or never comes
        self._begun = scenario
        self._number += 1
        job = Job(self._number, scenario.to_json(), subject)
        for channel in self._channels:
            with contextlib.suppress(OSError):  # the rank has just died; `_gather` finds out how
                channel.send(job)

    def finish(self) -> dict[int, Observation]:
        """Wait for the scenario that `begin` has started and return an observation for every rank."""
        scenario, started = self._begun, time.monotonic()
        messages, observations = self._gather(scenario.deadline_s)
        elapsed_ns = int((time.monotonic() - started) * 1e9)
        observations = {rank: replace(seen, duration_ns=elapsed_ns) for rank, seen in observations.items()}
        everybody_answered = not observations
        for rank, message in messages.items():
            if isinstance(message, Answer):
                seen = message.observation
                observations[rank] = (
                    seen if seen.fate.kind == "returned" else replace(seen, stderr=tail(self._seats[rank]))
                )
        self._reusable = everybody_answered and nothing_left_behind(observations, scenario.recorded)
        after, self._after = self._after, scenario.id
        return {rank: replace(seen, after=after) for rank, seen in sorted(observations.items())}

    @property
    def reusable(self) -> bool:
        """Whether another scenario can run here with the same result as on new ranks.

        An idle rank sends nothing: if its channel is readable, the rank has ended or its program writes into it. One
        that a signal has stopped answers nothing either.
        """
        return (
            self._reusable
            and not any(channel.readable() for channel in self._channels)
            and not any(map(is_stopped, self._pids))
        )

    def close(self) -> None:
        """Kill the ranks."""
        for seat in self._seats:
            self._zygote.signal(seat, signal.SIGKILL)
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _gather(self, deadline_s: float) -> tuple[dict[int, FromRank], dict[int, Observation]]:
        """Wait for one message of each rank; returns those, and observations of the ranks that sent none.

        The wait ends when no rank has made progress for `deadline_s` seconds. It ends earlier when a rank has died or
        failed, because the others may then wait for it for ever.
        """
        messages: dict[int, FromRank] = {}
        strange: dict[int, Observation] = {}
        listening = dict(zip(self._channels, self._seats, strict=True))
        started = time.monotonic()
        deadline, patience_s = started + deadline_s, math.inf
        while len(messages) + len(strange) + len(self._dead([*messages, *strange], listening)) < len(self._seats):
            ready = wait([*listening, *self._zygote.sources], max(0.0, deadline - time.monotonic()))
            self._zygote.update()
            for channel in [channel for channel in listening if channel in ready]:
                rank = listening[channel].rank
                try:
                    message = answer(channel, rank, self._number)
                except (EOFError, OSError):
                    del listening[channel]
                except MessageError as error:
                    del listening[channel]
                    strange[rank] = not_an_answer(self._seats[rank], error)
                else:
                    if message is not None:
                        del listening[channel]
                        messages[rank] = message
            patience_s = self._patience_s({**messages, **strange}, listening)
            deadline = min(deadline, time.monotonic() + patience_s)
            if time.monotonic() >= deadline or not ready:  # a rank that trickles bytes makes a channel ready for ever
                later = prolonged(started, deadline_s, *(seat.file("flight") for seat in self._seats))
                if later <= deadline or not math.isinf(patience_s):
                    break
                deadline = later
        kind = "hung" if math.isinf(patience_s) else "abandoned"
        return messages, strange | self._examine([*messages, *strange], listening, kind)

    def _dead(self, heard: Collection[int], listening: Mapping[Channel, Seat]) -> dict[Seat, Ending]:
        """Return the ranks that have died without an answer; a rank with an unread message is not among them."""
        unread = {seat.rank for channel, seat in listening.items() if channel.readable()}
        silent = [seat for seat in self._seats if seat.rank not in heard and seat.rank not in unread]
        dead = {seat: death(status) for seat in silent if (status := self._zygote.exit_status(seat)) is not None}
        if self._zygote.gone:  # the zygote would have reported how they ended
            dead |= {seat: LOST for seat in silent if seat not in listening.values()}
        return dead

    def _patience_s(self, heard: Mapping[int, FromRank | Observation], listening: Mapping[Channel, Seat]) -> float:
        """Return how long to wait for the remaining ranks, given how the others ended."""
        if self._dead(heard, listening):
            return DEATH_GRACE_S
        if len(heard) + len(listening) < len(self._seats):
            return EOF_GRACE_S
        return RAISE_GRACE_S if any(map(_failed, heard.values())) else math.inf

    def _examine(self, heard: Collection[int], listening: Mapping[Channel, Seat], kind: str) -> dict[int, Observation]:
        dead = self._dead(heard, listening)
        observations = {seat.rank: describe(seat, fate) for seat, fate in dead.items()}
        living = {
            seat: pid
            for seat, pid in zip(self._seats, self._pids, strict=True)
            if seat.rank not in heard and seat not in dead
        }
        half = {seat.rank for channel, seat in listening.items() if channel.half_a_message}
        deaf = {seat.rank for seat in living if seat not in listening.values()}
        return observations | (examine_living(self._zygote, living, kind, half, deaf) if living else {})


def prolonged(started: float, deadline_s: float, *flights: str) -> float:
    """Return when to give up ranks that started at `started`, extended by the progress in their flight records."""
    alive_at = max(read_flight(path).alive_at for path in flights)
    return min(max(started, alive_at) + deadline_s, started + MOST_DEADLINES * deadline_s)


def answer(channel: Channel, rank: int, number: int) -> FromRank | None:
    """Return the rank's message about job `number` (0: that it is ready), None if not all of it is here.

    Raises as `Channel.arrived` does, also `MessageError` for an answer that was not asked for: the subject runs in the
    rank's process and may write into its connection.
    """
    message: FromRank | None = channel.arrived()
    match message:
        case Answer(given, observation) if (given, observation.rank) != (number, rank):
            raise MessageError(f"an answer of rank {observation.rank} to job {given}")
        case Ready() if number:
            raise MessageError("a second notice that it is ready")
        case Answer() if not number:
            raise MessageError("an answer before any job")
    return message


def not_an_answer(seat: Seat, error: MessageError) -> Observation:
    """Return an observation of a rank that sent what no rank sends."""
    text = f"something in this rank's process wrote into its connection to the harness: {error}"
    raised = Raised(type(error).__name__, (type(error).__name__,), text)
    return replace(describe(seat, Ending("raised", detail=f"raised {raised}")), raised=raised)


def _failed(message: FromRank | Observation) -> bool:
    """Whether the message says that the rank has raised and takes no further part."""
    if isinstance(message, Ready):
        return message.error is not None
    return (message.observation if isinstance(message, Answer) else message).raised is not None


def nothing_left_behind(observations: Mapping[int, Observation], recorded: bool) -> bool:
    """Whether ranks that all answered ended alike, left no global state changed, and miss no collective.

    A collective that no rank waited for does no harm once all ranks have issued it: it will complete, and cannot match
    a later one. A rank may have raised after the others issued a collective that it did not issue; if all ranks issued
    equally many, that did not happen. In an unrecorded run the harness cannot tell, so only a plain return counts.
    """
    seen = list(observations.values())
    outcomes = {(one.raised and one.raised.type, one.unsupported) for one in seen}
    if len(outcomes) > 1 or any(one.hygiene for one in seen):
        return False
    all_returned = outcomes == {(None, "")}
    if not recorded:
        return all_returned
    if all_returned and all(collective.finished for one in seen for collective in one.history):
        return True
    first, *others = [Counter(collective.group for collective in one.history) for one in seen]
    return all(other == first for other in others)
