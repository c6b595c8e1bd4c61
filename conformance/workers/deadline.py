"""`Deadline`: until when ranks are waited for, given their progress and the time without a processor."""

import math
from collections.abc import Callable, Sequence

import trio

from conformance.observation import IMPORT
from conformance.recorder.flight_record import LastSeen, read_flight
from conformance.waiting import machine_time
from conformance.waiting.kept_waiting import MOST_TIMES, KeptWaiting
from conformance.waiting.limits import LOOK_AGAIN_S

#: As long as some rank enters a phase, issues a collective or sends a part of its answer now and then, ranks may take
#: this many deadlines, because the machine may be slow.
MOST_DEADLINES = 5
#: The same where a rank has failed, and the others have little time.
_MOST_GRACES = 20


class Deadline:
    """It passes when no rank has made progress for so many seconds.

    Seconds do not count in which a rank was ready and got no processor, nor does the silence of one that imports the
    subject. Ranks that go on for ever are given up after `MOST_DEADLINES`, and after `MOST_TIMES` that by the clock.
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
        self._silence_s = self._most_s = math.inf
        self._sleep = trio.CancelScope()
        self._begin(silence_s, MOST_DEADLINES * silence_s)

    def _begin(self, silence_s: float, most_s: float) -> None:
        self._since = self._looked_at = _now()
        self._answered_at = -math.inf
        self._silence_s, self._most_s = min(silence_s, self._silence_s), min(most_s, self._most_s)
        self._kept_waiting = KeptWaiting(self._pids)

    def cut_to(self, patience_s: float) -> None:
        """Wait from now on for `patience_s` seconds, if that is shorter, because a rank has failed.

        The wait ends after 20 times that, whatever the others do.
        """
        if patience_s < self.patience_s:
            self.patience_s = patience_s
            self._begin(patience_s, _MOST_GRACES * patience_s)
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
        own = self.given([read_flight(path) for path in self._flights])
        return self._others(own) if math.isinf(self.patience_s) else own

    def given(self, seen: Sequence[LastSeen]) -> float:
        """Return the moment for these flight records, without regard to remote ranks."""
        now = self._looked_at = _now()
        # Where a rank has failed, nobody needs what the others import.
        imports = math.isinf(self.patience_s) and any(one.phase == IMPORT for one in seen)
        alive_at = machine_time.moment(max(one.alive_at for one in seen))  # long ago if no rank has made progress
        silent_since = math.inf if imports else max(self._since, self._answered_at, alive_at)
        end = min(silent_since + self._silence_s, self._since + self._most_s)
        if end + self._kept_s <= now < self._last and self._kept_waiting.goes_on():
            return now + LOOK_AGAIN_S
        return min(end + self._kept_s, self._last)  # the kernel may have counted a wait just now, because it ended

    @property
    def _last(self) -> float:
        return self._since + MOST_TIMES * self._most_s

    @property
    def _kept_s(self) -> float:
        """No more than has passed: the clock leaves out seconds that the kernel counts as waits as well."""
        return min(self._kept_waiting.seconds, self._looked_at - self._since)

    def starved(self) -> str:
        """Return that the ranks got hardly any processor, if that is why they took the most time; empty otherwise."""
        if self._looked_at < self._last:
            return ""
        passed_s = self._looked_at - self._since
        return f"the machine let this host's ranks run for {self._kept_waiting.ran_s:.2g} of {passed_s:.2g} s in all"


def _now() -> float:
    machine_time.resume()  # who asks listens
    return machine_time.now()
