"""`Answers`: waits until each rank of a pool has answered one job or cannot answer it any more."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import trio

from conformance.observation import Ending, Observation, Raised
from conformance.recorder.flight_record import LastSeen, read_flight
from conformance.waiting.limits import DEATH_GRACE_S, LOST_S, RAISE_GRACE_S
from conformance.workers.autopsy import death, examine_living, observe_from_files
from conformance.workers.channel import Channel, MessageError
from conformance.workers.deadline import Deadline
from conformance.workers.messages import Answer, FromRank, Ready, Seat
from conformance.workers.zygote_process import ZygoteProcess


class RemoteRanks:
    """Ranks of the same world on other hosts; this base class stands for none."""

    #: For how long to wait for the local ranks, given how the remote ranks ended.
    patience_s = math.inf

    def until(self, own: float) -> float:
        """Return the deadline of the local ranks, which without remote ranks would be `own`."""
        return own


NO_REMOTE_RANKS = RemoteRanks()


class Answers:
    """One message of each rank: `messages`, or in `malformed` an observation of a rank that wrote something else.

    The wait ends when no rank has made progress for `deadline_s` seconds, see `Deadline`. It ends earlier when a rank
    has died or failed, because the other ranks may then wait for it for ever.
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
        expected_dead: Collection[int] = (),
        remote: RemoteRanks = NO_REMOTE_RANKS,
    ) -> None:
        """Expect the answers of the ranks on `seats` to job `number` (0: that they are ready).

        The death of an `expected_dead` rank is part of the job and shortens no deadline. `remote` ranks may extend it.
        """
        self.messages: dict[int, FromRank] = {}
        self.malformed: dict[int, Observation] = {}
        self._zygote = zygote
        self._seats = seats
        self._pids = pids
        self._listening = dict(zip(channels, seats, strict=True))
        self._number = number
        self._expected_dead = expected_dead
        self._remote = remote
        self._flights = [seat.file("flight") for seat in seats]
        self._deadline = Deadline(deadline_s, pids, self._flights, remote.until)
        self._unexplained_until = -math.inf  # until when the zygote may report the death of a rank that hung up
        self._all_accounted_for = trio.Event()

    async def wait(self) -> None:
        """Return when every rank has answered or ended, or the deadline has passed."""
        async with trio.open_nursery() as nursery:
            for channel in self._listening:
                nursery.start_soon(self._take, channel)
            nursery.start_soon(self._follow_zygote)
            nursery.start_soon(self._expire)
            self.changed()
            await self._all_accounted_for.wait()
            nursery.cancel_scope.cancel()

    def changed(self) -> None:
        """Take into account how a local or remote rank has ended."""
        reported = [*self.messages, *self.malformed]
        if len(reported) + len(self._dead(reported)) >= len(self._seats):
            self._all_accounted_for.set()
        self._deadline.cut_to(min(self._patience(), self._remote.patience_s))

    def last_seen(self) -> tuple[list[LastSeen], float]:
        """Return the ranks' flight records, and the seconds left until the deadline if no rank makes progress."""
        now, seen = trio.current_time(), list(map(read_flight, self._flights))
        return seen, self._deadline.given(seen, now) - now

    async def _take(self, channel: Channel) -> None:
        rank, message = self._listening[channel].rank, None
        try:
            while message is None:
                await trio.lowlevel.wait_readable(channel)
                message = answer(channel, rank, self._number)
                self._deadline.note_progress()
        except (EOFError, OSError):
            self._unexplained_until = trio.current_time() + LOST_S
        except MessageError as error:
            self.malformed[rank] = malformed_message(self._seats[rank], error)
        else:
            self.messages[rank] = message
        del self._listening[channel]
        self.changed()

    async def _follow_zygote(self) -> None:
        while not self._zygote.gone:
            await self._zygote.wait_for_report()
            self.changed()

    async def _expire(self) -> None:
        await self._deadline.passes(lambda at: max(at, self._unexplained_until) if self._one_hung_up() else at)
        self._all_accounted_for.set()

    def silent_ranks(self) -> dict[int, Observation]:
        """Return, when the wait is over, an observation of each rank that sent no message, or a malformed one."""
        kind = "hung" if math.isinf(self._deadline.patience_s) else "abandoned"
        reported = [*self.messages, *self.malformed]
        dead = self._dead(reported)
        observations = {seat.rank: observe_from_files(seat, fate) for seat, fate in dead.items()}
        living = {
            seat: pid
            for seat, pid in zip(self._seats, self._pids, strict=True)
            if seat.rank not in reported and seat not in dead
        }
        half = {seat.rank for channel, seat in self._listening.items() if channel.half_a_message}
        deaf = {seat.rank for seat in living if seat not in self._listening.values()}
        starved = self._deadline.starved() if living and kind == "hung" else ""  # before they write their stacks
        examined = examine_living(self._zygote, living, kind, half, deaf) if living else {}
        if starved:
            examined = {rank: replace(seen, starved=starved) for rank, seen in examined.items()}
        return self.malformed | observations | examined

    def _dead(self, reported: Collection[int]) -> dict[Seat, Ending]:
        """Return the ranks that have died without an answer; a rank with an unread message is not among them."""
        unread = {seat.rank for channel, seat in self._listening.items() if channel.readable()}
        silent = [seat for seat in self._seats if seat.rank not in reported and seat.rank not in unread]
        dead = {seat: death(status) for seat in silent if (status := self._zygote.exit_status(seat)) is not None}
        if self._zygote.gone:  # the zygote would have reported how they ended
            dead |= {seat: lost(self._zygote.end) for seat in silent if seat not in self._listening.values()}
        return dead

    def _one_hung_up(self) -> bool:
        """Whether a rank has closed its connection without an answer, and nobody has reported its death yet."""
        reported = [*self.messages, *self.malformed]
        explained = {seat.rank for seat in (*self._dead(reported), *self._listening.values())}
        known = explained.union(reported, self._expected_dead)
        return any(seat.rank not in known for seat in self._seats)

    def _patience(self) -> float:
        """Return how many seconds to wait for the remaining ranks, given how the others ended."""
        reported: Mapping[int, FromRank | Observation] = {**self.messages, **self.malformed}
        if self._zygote.gone:  # all its ranks are killed, too, and end as soon as each gets a processor
            return LOST_S
        if any(seat.rank not in self._expected_dead for seat in self._dead(reported)):
            return DEATH_GRACE_S
        if self._one_hung_up():
            return LOST_S
        return RAISE_GRACE_S if any(map(_failed, reported.values())) else math.inf


#: Stands in the fate of a rank whose zygote ended.
LOST = "the process that forks ranks"


def lost(how: str = "") -> Ending:
    """Return the fate of a rank whose zygote ended, in the way `how` if that is known: the harness ends none so."""
    if not how:
        return Ending("abandoned", detail=f"abandoned: {LOST} ended first")
    by = "nobody of the harness did that, perhaps the subject or the kernel"
    return Ending("abandoned", detail=f"abandoned: {LOST} {how}; {by}")


def answer(channel: Channel, rank: int, number: int) -> FromRank | None:
    """Return the rank's message about job `number` (0: that it is ready), None if not all of it is here.

    Raises as `Channel.arrived` does, also `MessageError` for an answer to another job: the subject runs in the rank's
    process and may write into its connection.
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


def malformed_message(seat: Seat, error: MessageError) -> Observation:
    """Return an observation of a rank that sent a malformed message."""
    text = f"something in this rank's process wrote into its connection to the harness: {error}"
    raised = Raised(type(error).__name__, (type(error).__name__,), text)
    return replace(observe_from_files(seat, Ending("raised", detail=f"raised {raised}")), raised=raised)


def _failed(message: FromRank | Observation) -> bool:
    """Whether the message says that the rank has raised and takes no further part."""
    if isinstance(message, Ready):
        return message.error is not None
    return (message.observation if isinstance(message, Answer) else message).raised is not None
