"""`Hearing`: what the ranks of a pool have said about a job, and until when the others are waited for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from conformance.observation import IMPORT, Ending, Observation, Raised
from conformance.recorder.flight_record import LastSeen, read_flight
from conformance.waiting.kept_waiting import KeptWaiting
from conformance.workers import machine_time
from conformance.workers.autopsy import death, describe, examine_living
from conformance.workers.channel import Channel, MessageError, wait
from conformance.workers.messages import Answer, FromRank, Ready, Seat
from conformance.workers.zygote_process import ZygoteProcess

#: How long the other ranks may go on after one has died. gloo raises at once when a connection breaks; a rank that
#: takes longer would wait for ever.
DEATH_GRACE_S = 0.3
#: The same after one has raised. Its process lives, so the others get no error from the backend; on a busy machine they
#: may be about to raise the same exception.
RAISE_GRACE_S = 1.0
#: How long the zygote may take to report the death of a rank that has closed its connection, on a busy machine.
EOF_GRACE_S = 10.0
#: How long ranks may go on when nobody listened until their deadline, or when more of an answer has come since: one
#: with a long answer waits for its reader. So often, because a subject may write into its rank's connection for ever.
LATE_GRACE_S = 2.0
_MOST_GRACES = 20
#: By how much the graces can put a deadline off.
MOST_LATE_S = _MOST_GRACES * LATE_GRACE_S
#: Where a rank waits for a processor just when it would be given up, the controller looks again so much later.
_LOOK_AGAIN_S = 0.02
#: As long as some rank enters a phase or issues a collective now and then, or could go on if it had a processor, ranks
#: may take this many deadlines, because the machine may be slow.
MOST_DEADLINES = 5


class Waiting:
    """Until when ranks are waited for: until none has made progress for so many seconds.

    Those in which one was ready to go on and got no processor do not count, nor those in which one imports the subject:
    an import, which a process has one of, reads files or compiles, and shows no progress. All this has an end, since a
    rank may write into its flight record for ever, or compute.
    """

    def __init__(self, silence_s: float, pids: Sequence[int], flights: Sequence[str], end: float | None = None) -> None:
        """Begin to wait for the ranks with these process ids and flight records, at most for `MOST_DEADLINES`."""
        self._since = machine_time.now()
        self._silence_s = silence_s
        self._pids, self._flights = pids, flights
        self._kept_waiting = KeptWaiting(pids)
        self._end = self._since + MOST_DEADLINES * silence_s if end is None else end
        self._awaits_imports = end is None  # where a rank has failed, nobody needs what the others import

    def cut_to(self, silence_s: float) -> Waiting:
        """Return the wait that follows when a rank has failed: for `silence_s` seconds from now, if that is shorter.

        It ends after 20 times that, whatever the others do.
        """
        now, shorter_s = machine_time.now(), min(silence_s, self._silence_s)
        end = max(self._end, now + shorter_s)  # that of who listens late is over
        return Waiting(shorter_s, self._pids, self._flights, min(end, now + _MOST_GRACES * shorter_s))

    def until(self) -> float:
        """Return the moment, as of now, by the clock of `machine_time`."""
        return self.given([read_flight(path) for path in self._flights])

    def given(self, seen: Sequence[LastSeen]) -> float:
        """Return it, for who has read the flight records."""
        if self._awaits_imports and any(one.phase == IMPORT for one in seen):
            return self._end
        progress, now = max(self._since, alive_at(seen)), machine_time.now()
        # No more than have passed: the clock leaves out seconds that the kernel counts as waits as well.
        kept_waiting_s = min(self._kept_waiting.seconds, now - self._since)
        until = progress + kept_waiting_s + self._silence_s
        if until <= now < self._end and self._kept_waiting.goes_on():
            until = now + _LOOK_AGAIN_S
        return min(until, self._end)


class Elsewhere:
    """What becomes known, while ranks are waited for, of ranks on other hosts; of this class: there are none."""

    #: What to wait on besides the ranks, and how often to listen at least.
    sources: tuple[Channel, ...] = ()
    turn_s = math.inf
    #: For how long to wait for the ranks here, given how those on other hosts ended.
    patience_s = math.inf

    def listen(self) -> None:
        """Take in what has arrived from `sources`. Does not wait."""

    def until(self, own: float) -> float:
        """Return until when the ranks here are waited for that alone would be waited for until `own`."""
        return own


class Hearing:
    """One message of each rank is waited for; `messages` are those that came, `strange` what is known of other ranks.

    The wait ends when no rank has made progress for `deadline_s` seconds, not counting those in which one could not for
    want of a processor. It ends earlier when a rank has died or failed, because the others may then wait for it for
    ever.
    """

    def __init__(
        self,
        zygote: ZygoteProcess,
        seats: Sequence[Seat],
        pids: Sequence[int],
        channels: Sequence[Channel],
        *,
        number: int,
        deadline_s: float,
        doomed: Collection[int] = (),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Begin to wait for what the ranks on `seats` say about job `number` (0: that they are ready).

        The death of a `doomed` rank is part of the job: the others have as much time as before. So they may have
        because of ranks that are `elsewhere`.
        """
        self.messages: dict[int, FromRank] = {}
        self.strange: dict[int, Observation] = {}
        self._zygote = zygote
        self._seats = seats
        self._listening = dict(zip(channels, seats, strict=True))
        self._number = number
        self._doomed = doomed
        self._elsewhere = elsewhere or Elsewhere()
        self._pids = pids
        self._flights = [seat.file("flight") for seat in seats]
        self._patience_s = math.inf  # of the failure that leaves the others the least time; infinite if none has failed
        self._waiting = Waiting(deadline_s, pids, self._flights)
        self._deadline = machine_time.now() + deadline_s
        self._is_over = False
        self._num_graces = 0
        self._num_bytes = dict.fromkeys(channels, 0)  # of answers that have not come whole
        self._unexplained_until = -math.inf  # until when the death of a rank may be reported that has hung up
        self.ended_at = math.inf

    def listen(self, seconds: float = math.inf) -> bool:
        """Listen for so many seconds, or until the wait is over; return whether it is. 0: do not wait."""
        machine_time.resume()
        until = machine_time.now() + seconds
        if self._num_graces == 0 and machine_time.now() > self._deadline:
            self._grant()
        while not self._is_over:
            self._is_over = self._everybody_is_known() or self._hear(until) or self._everybody_is_known()
            if self._is_over:
                self.ended_at = machine_time.now()
            elif machine_time.now() >= until:
                break
        return self._is_over

    def last_seen(self) -> tuple[list[LastSeen], float]:
        """Return what the ranks were doing, and for how long they are waited for if they make no further progress."""
        seen = list(map(read_flight, self._flights))
        return seen, self._waiting.given(seen) - machine_time.now()

    def _everybody_is_known(self) -> bool:
        heard = [*self.messages, *self.strange]
        return len(heard) + len(self._dead(heard)) >= len(self._seats)

    def _hear(self, until: float) -> bool:
        """Wait until something happens, or the deadline or `until` passes; return whether it is time to give up."""
        left_s = max(0.0, min(self._deadline, until) - machine_time.now())
        sources = [*self._listening, *self._zygote.sources, *self._elsewhere.sources]
        ready = wait(sources, min(left_s, self._elsewhere.turn_s))
        self._zygote.update()
        self._elsewhere.listen()
        for channel in [channel for channel in self._listening if channel in ready]:
            rank = self._listening[channel].rank
            try:
                message = answer(channel, rank, self._number)
            except (EOFError, OSError):
                del self._listening[channel]
                self._unexplained_until = machine_time.now() + EOF_GRACE_S
            except MessageError as error:
                del self._listening[channel]
                self.strange[rank] = not_an_answer(self._seats[rank], error)
            else:
                if message is not None:
                    del self._listening[channel]
                    self.messages[rank] = message
        if (patience_s := min(self._patience(), self._elsewhere.patience_s)) < self._patience_s:
            self._patience_s = patience_s
            self._waiting = self._waiting.cut_to(patience_s)
            self._deadline = min(self._deadline, self._waiting.until())
        self._grant_for_more()
        machine_time.resume()
        if machine_time.now() < self._deadline:  # a rank that trickles bytes makes a channel ready for ever
            return False
        later = self._waiting.until()
        if math.isinf(self._patience_s):
            later = self._elsewhere.until(later)
        if self._one_hung_up():
            later = max(later, self._unexplained_until)
        if later <= self._deadline:
            return True
        self._deadline = later
        return False

    def _grant(self) -> None:
        self._num_graces += 1
        self._deadline = machine_time.now() + LATE_GRACE_S

    def _grant_for_more(self) -> None:
        """Put the deadline off where it has passed and more of an answer has come since it was last put off."""
        if machine_time.now() < self._deadline or self._num_graces >= _MOST_GRACES:
            return
        before, now = self._num_bytes, {channel: channel.num_waiting for channel in self._listening}
        self._num_bytes = now
        if len(now) < len(before) or any(num_bytes > before[channel] for channel, num_bytes in now.items()):
            self._grant()

    def others(self) -> dict[int, Observation]:
        """Return, when the wait is over, observations of the ranks that sent nothing, and of what is no message."""
        kind = "hung" if math.isinf(self._patience_s) else "abandoned"
        heard = [*self.messages, *self.strange]
        dead = self._dead(heard)
        observations = {seat.rank: describe(seat, fate) for seat, fate in dead.items()}
        living = {
            seat: pid
            for seat, pid in zip(self._seats, self._pids, strict=True)
            if seat.rank not in heard and seat not in dead
        }
        half = {seat.rank for channel, seat in self._listening.items() if channel.half_a_message}
        deaf = {seat.rank for seat in living if seat not in self._listening.values()}
        examined = examine_living(self._zygote, living, kind, half, deaf) if living else {}
        return self.strange | observations | examined

    def _dead(self, heard: Collection[int]) -> dict[Seat, Ending]:
        """Return the ranks that have died without an answer; a rank with an unread message is not among them."""
        unread = {seat.rank for channel, seat in self._listening.items() if channel.readable()}
        silent = [seat for seat in self._seats if seat.rank not in heard and seat.rank not in unread]
        dead = {seat: death(status) for seat in silent if (status := self._zygote.exit_status(seat)) is not None}
        if self._zygote.gone:  # the zygote would have reported how they ended
            dead |= {seat: lost(self._zygote.end) for seat in silent if seat not in self._listening.values()}
        return dead

    def _one_hung_up(self) -> bool:
        """Whether a rank has closed its connection without an answer, and nobody has reported its death yet."""
        heard = [*self.messages, *self.strange]
        known = {*heard, *(seat.rank for seat in (*self._dead(heard), *self._listening.values())), *self._doomed}
        return any(seat.rank not in known for seat in self._seats)

    def _patience(self) -> float:
        """Return how many seconds to wait for the remaining ranks, given how the others ended."""
        heard: Mapping[int, FromRank | Observation] = {**self.messages, **self.strange}
        if self._zygote.gone:  # all its ranks are killed, too, and end as soon as each gets a processor
            return EOF_GRACE_S
        if any(seat.rank not in self._doomed for seat in self._dead(heard)):
            return DEATH_GRACE_S
        if self._one_hung_up():
            return EOF_GRACE_S
        return RAISE_GRACE_S if any(map(_failed, heard.values())) else math.inf


#: Stands in the fate of a rank whose zygote ended.
LOST = "the process that forks ranks"


def lost(how: str = "") -> Ending:
    """Return the fate of a rank whose zygote ended, in the way `how` if that is known: the harness ends none so."""
    if not how:
        return Ending("abandoned", detail=f"abandoned: {LOST} ended first")
    by = "nobody of the harness did that, perhaps the subject or the kernel"
    return Ending("abandoned", detail=f"abandoned: {LOST} {how}; {by}")


def alive_at(seen: Iterable[LastSeen]) -> float:
    """Return when a rank last made progress, by its flight record and `machine_time`; long ago if none did."""
    return machine_time.moment(max(one.alive_at for one in seen))


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
