"""The warm ranks of one world size: runs one scenario at a time on them, and decides whether to reuse them."""

import contextlib
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import trio
from msgspec.structs import replace as change

from conformance.errors import present
from conformance.observation import KEPT_ONCE, Ending, Observation, remembered
from conformance.recorder.flight_record import LastSeen
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject
from conformance.surroundings.processes import is_stopped
from conformance.waiting.limits import CONNECT_TIMEOUT_S, START_TIMEOUT_S
from conformance.workers.answers import NO_REMOTE_RANKS, Answers, RemoteRanks
from conformance.workers.autopsy import observe_from_files, tail
from conformance.workers.messages import NOTHING, Answer, Inspection, Job, Ready, Seat
from conformance.workers.zygote_process import ZygoteProcess


class Pool:
    """Ranks with a connected default group; scenarios reuse them until one leaves them in doubt.

    They are all ranks of their world, or the ranks of one host, which may wait for `remote` ranks.
    """

    def __init__(
        self,
        zygote: ZygoteProcess,
        seats: Iterable[Seat],
        start_timeout_s: float = CONNECT_TIMEOUT_S,
        remote: RemoteRanks = NO_REMOTE_RANKS,
    ) -> None:
        """Fork the ranks; `connect` waits until they make no progress for `time_to_start`. Raises `ZygoteGoneError`."""
        self._zygote = zygote
        self._remote = remote
        number, self._directory = zygote.new_pool()
        seats = tuple(change(seat, pool=number, directory=str(self._directory)) for seat in seats)
        self._seats = {seat.rank: seat for seat in seats}
        self._start_timeout_s = time_to_start(start_timeout_s, apart=any(seat.apart for seat in seats))
        self._pids, self._channels = zygote.fork(seats, self._start_timeout_s)
        self._started = self._reusable = self._is_retired = False
        self._number = 0
        self._after: tuple[str, ...] = ()
        self._answers: Answers | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks the pool has on this host."""
        return len(self._seats)

    @property
    def is_whole(self) -> bool:
        """Whether every rank lives, as far as the zygote has reported."""
        return not self._zygote.gone and all(self._zygote.exit_status(seat) is None for seat in self._seats.values())

    async def connect(self) -> dict[int, Observation]:
        """Wait until every rank reports `Ready`; returns {} if all do, else an observation of each rank.

        The ranks that were ready count as `abandoned`. After a success later calls return at once.
        """
        if self._started:
            return {}
        answers = self._expect_answers(self._start_timeout_s)
        await answers.wait()
        messages, observations = answers.messages, answers.silent_ranks()
        for rank, message in messages.items():
            if isinstance(message, Ready) and message.error is not None:
                fate = Ending("raised", detail=f"raised {message.error}")
                observations[rank] = replace(observe_from_files(self._seats[rank], fate), raised=message.error)
        self._started = not observations
        if observations:
            ready = messages.keys() - observations.keys()
            observations |= {rank: observe_from_files(self._seats[rank], Ending("abandoned")) for rank in ready}
        return dict(sorted(observations.items()))

    def begin(self, scenario: Scenario, subject: Subject, inspection: Inspection = NOTHING) -> None:
        """Start a scenario on the ranks, which `finish` waits for; the pool is not reusable in between."""
        self._reusable = False  # until the checks of `finish` pass; also if that call is cancelled or never comes
        self._begun, self._begun_at = scenario, trio.current_time()
        self._number += 1
        job = Job(self._number, scenario.to_json(), subject, inspection)
        for channel in self._channels:
            with contextlib.suppress(OSError):  # the rank has just died; `Answers` finds out how
                channel.send(job)
        self._expect_answers(scenario.deadline_s, scenario.expected_dead)

    async def finish(self) -> dict[int, Observation]:
        """Wait for the scenario that `begin` has started and return an observation for every rank."""
        scenario, answers = self._begun, present(self._answers)
        await answers.wait()
        elapsed_ns = max(0, int((trio.current_time() - self._begun_at) * 1e9))
        observations = {rank: replace(seen, duration_ns=elapsed_ns) for rank, seen in answers.silent_ranks().items()}
        everybody_answered = not observations
        for rank, message in answers.messages.items():
            if isinstance(message, Answer):
                observations[rank] = replace(message.observation, stderr=tail(self._seats[rank]))
        self._reusable = everybody_answered and nothing_left_behind(observations, scenario.recorded)
        after, self._after = self._after, remembered(self._after, scenario.id)
        return {rank: replace(seen, after=after) for rank, seen in sorted(observations.items())}

    def last_seen(self) -> tuple[list[LastSeen], float]:
        """Return what the ranks were doing, and for how long they are waited for if they make no further progress."""
        return present(self._answers).last_seen()

    def shorten_deadline(self) -> None:
        """Take into account that a remote rank has failed."""
        if self._answers is not None:
            self._answers.changed()

    def retire(self) -> None:
        """Let no further scenario run here: something may have been left behind that nobody can see."""
        self._is_retired = True

    @property
    def reusable(self) -> bool:
        """Whether another scenario can run here with the same result as on new ranks.

        An idle rank sends nothing: if its channel is readable, the rank has ended or its program writes into it. One
        that a signal has stopped answers nothing either, and one whose zygote is gone is about to end.
        """
        return (
            self._reusable
            and not self._is_retired
            and not self._zygote.gone
            and not any(channel.readable() for channel in self._channels)
            and not any(map(is_stopped, self._pids))
        )

    def close(self) -> None:
        """Kill the ranks."""
        self.retire()
        for seat in self._seats.values():
            self._zygote.signal(seat, signal.SIGKILL)
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _expect_answers(self, deadline_s: float, expected_dead: frozenset[int] = frozenset()) -> Answers:
        answers = Answers(
            self._zygote,
            tuple(self._seats.values()),
            self._pids,
            self._channels,
            number=self._number,
            deadline_s=deadline_s,
            expected_dead=expected_dead,
            remote=self._remote,
        )
        self._answers = answers
        return answers


def time_to_start(connect_timeout_s: float = CONNECT_TIMEOUT_S, *, apart: bool) -> float:
    """Return for how long ranks that start may make no progress; those that are `apart` import torch themselves."""
    return connect_timeout_s + (START_TIMEOUT_S if apart else 0.0)


def nothing_left_behind(observations: Mapping[int, Observation], recorded: bool) -> bool:
    """Whether ranks that all answered ended alike, left no global state changed, and miss no collective.

    A collective that no rank waited for does no harm once all ranks have issued it: it will complete, and cannot match
    a later one. What a process may keep once is no reason to begin others, which would keep it as well. A rank may have
    raised after the others issued a collective that it did not issue; if all ranks issued equally many, that did not
    happen. In an unrecorded run the harness cannot tell, so only a plain return counts.
    """
    seen = list(observations.values())
    outcomes = {(one.raised and one.raised.type, one.unsupported) for one in seen}
    changed = any(not phrase.startswith(KEPT_ONCE) for one in seen for phrase in one.hygiene)
    if len(outcomes) > 1 or changed:
        return False
    all_returned = outcomes == {(None, "")}
    if not recorded:
        return all_returned
    if all_returned and all(collective.finished for one in seen for collective in one.history):
        return True
    first, *others = [Counter(collective.group for collective in one.history) for one in seen]
    return all(other == first for other in others)
