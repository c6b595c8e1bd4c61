"""`Deadline`: until when ranks are waited for, given their progress and the time without a processor."""

import math
from collections.abc import Callable, Sequence

import trio

from conformance.observation import IMPORT
from conformance.recorder.flight_record import LastSeen, read_flight
from conformance.waiting import machine_time
from conformance.waiting.kept_waiting import MOST_TIMES, KeptWaiting
from conformance.waiting.limits import LOOK_S

#: As long as some rank enters a phase, issues a collective or sends a part of its answer now and then, ranks may take
#: this many deadlines, because the machine may be slow.
MOST_DEADLINES = 5
#: The same where a rank has failed, and the others have little time; by the clock, whatever keeps them waiting.
_MOST_GRACES = 20
#: A rank that had a processor for this share of the time, and did not get on, would not have done with more of it.
_STARVED = 0.1


class Deadline:
    """It passes when no rank has made progress for so many seconds.

    Seconds do not count in which a rank was ready and got no processor, nor does the silence of one that imports the
    subject. Ranks that get on for ever are given up after `MOST_DEADLINES`. However busy the machine is, `MOST_TIMES`
    these seconds by the clock are the limit.
    """

    def __init__(
        self,
        silence_s: float,
        pids: Sequence[int],
        flights: Sequence[str],
        others: Callable[[float], float] = lambda own: own,
    ) -> None:
        """Begin to wait for the ranks with these process ids and flight records.

        As long as no rank has failed, `others` says until when to wait for ranks that alone would have until `own`.
        """
        self.patience_s = math.inf  #: of the failure that leaves the ranks the least time; infinite if none has failed
        self._pids, self._flights, self._others = pids, flights, others
        self._sleep = trio.CancelScope()
        most_s = MOST_DEADLINES * silence_s
        self._begin(silence_s, most_s, MOST_TIMES * most_s)

    def _begin(self, silence_s: float, most_s: float, most_by_the_clock_s: float) -> None:
        self._kept_waiting = KeptWaiting(self._pids)  # first: this process may be kept waiting, too
        self._since = self._looked_at = _now()
        self._answered_at = -math.inf
        self._silence_s, self._most_s, self._most_by_the_clock_s = silence_s, most_s, most_by_the_clock_s
        self._last = self._since + most_by_the_clock_s

    def cut_to(self, patience_s: float) -> None:
        """Wait from now on for `patience_s` seconds, if that is shorter, because a rank has failed.

        The wait ends after 20 times that, whatever the others do.
        """
        if patience_s < self.patience_s:
            self.patience_s = patience_s
            most_s = _MOST_GRACES * patience_s
            self._begin(min(patience_s, self._silence_s), most_s, most_s)
            self._sleep.deadline = min(self._sleep.deadline, self.until())

    def note_progress(self) -> None:
        """Note that more of an answer has arrived: a rank with a long one waits for its reader."""
        self._answered_at = _now()

    async def passes(self, until: Callable[[float], float] = lambda own: own) -> None:
        """Return when it has passed; `until` may put off the moment that it is called with."""
        while (at := until(self.until())) > self._looked_at:  # not the present moment: this may have been kept waiting
            with trio.CancelScope(deadline=at) as self._sleep:
                await trio.sleep_forever()

    def until(self) -> float:
        """Return the moment, as of now, by the clock of `machine_time`."""
        now = _now()  # before the records are read: a rank may get on while this process is kept waiting
        own = self.given([read_flight(path) for path in self._flights], now)
        return self._others(own) if math.isinf(self.patience_s) else own

    def given(self, seen: Sequence[LastSeen], now: float) -> float:
        """Return the moment for these flight records, read at `now` or later, without regard to remote ranks."""
        self._looked_at = now
        # Where a rank has failed, nobody needs what the others import.
        imports = math.isinf(self.patience_s) and any(one.phase == IMPORT for one in seen)
        alive_at = machine_time.moment(max(one.alive_at for one in seen))  # long ago if no rank has made progress
        silent_since = math.inf if imports else max(self._since, self._answered_at, alive_at)
        end = min(silent_since + self._silence_s, self._since + self._most_s)
        self._last = min(silent_since + MOST_TIMES * self._silence_s, self._since + self._most_by_the_clock_s)
        if end + self._kept_s <= now < self._last and self._kept_waiting.goes_on():
            return now + LOOK_S
        return min(end + self._kept_s, self._last)  # the kernel may have counted a wait just now, because it ended

    @property
    def _kept_s(self) -> float:
        """No more than has passed: the clock leaves out seconds that the kernel counts as waits as well."""
        return min(self._kept_waiting.in_turn_s, self._looked_at - self._since)

    def starved(self) -> str:
        """Return that the ranks got hardly any processor, if that is why they took the most time; empty otherwise."""
        passed_s, ran_s = self._looked_at - self._since, self._kept_waiting.ran_s
        if self._looked_at < self._last or ran_s >= _STARVED * passed_s:
            return ""
        return f"the machine let no thread of this host's ranks run for more than {ran_s:.2g} of {passed_s:.2g} s"


def _now() -> float:
    machine_time.resume()  # who asks listens
    return machine_time.now()
