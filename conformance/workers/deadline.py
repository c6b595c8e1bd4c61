"""`Deadline`: until when ranks are waited for, given their progress and the time without a processor."""

import math
from collections.abc import Callable, Sequence

import trio

from conformance.observation import IMPORT
from conformance.recorder.flight_record import LastSeen, read_flight
from conformance.waiting import machine_time
from conformance.waiting.kept_waiting import KeptWaiting
from conformance.waiting.limits import LOOK_AGAIN_S

#: As long as some rank enters a phase, issues a collective or sends a part of its answer now and then, or could go on
#: if it had a processor, ranks may take this many deadlines, because the machine may be slow.
MOST_DEADLINES = 5
#: The same where a rank has failed, and the others have little time.
_MOST_GRACES = 20
#: Ranks that had a processor for less than this share of the time did not show what they would have done.
_STARVED = 0.1


class Deadline:
    """It passes when no rank has made progress for so many seconds.

    Seconds do not count in which a rank was ready and got no processor, or imported the subject, which shows no
    progress. Both are limited, since a rank may compute, or write into its flight record, for ever.
    """

    def __init__(
        self,
        silence_s: float,
        pids: Sequence[int],
        flights: Sequence[str],
        others: Callable[[float], float] = lambda own: own,
    ) -> None:
        """Begin to wait for the ranks with these process ids and flight records, at most for `MOST_DEADLINES`.

        As long as no rank has failed, `others` says until when to wait for ranks that alone would have until `own`.
        """
        self.patience_s = math.inf  #: of the failure that leaves the ranks the least time; infinite if none has failed
        self._pids, self._flights, self._others = pids, flights, others
        self._silence_s, self._end = silence_s, math.inf
        self._sleep = trio.CancelScope()
        self._begin(silence_s, MOST_DEADLINES)

    def _begin(self, silence_s: float, most: int) -> None:
        self._since = _now()
        self._answered_at = -math.inf
        self._silence_s = min(silence_s, self._silence_s)
        self._end = min(max(self._end, self._since + self._silence_s), self._since + most * self._silence_s)
        self._kept_waiting = KeptWaiting(self._pids)
        self._waits_still = False

    def cut_to(self, patience_s: float) -> None:
        """Wait from now on for `patience_s` seconds, if that is shorter, because a rank has failed.

        The wait ends after 20 times that, whatever the others do.
        """
        if patience_s < self.patience_s:
            self.patience_s = patience_s
            self._begin(patience_s, _MOST_GRACES)
            self._sleep.deadline = min(self._sleep.deadline, self.until())

    def note_progress(self) -> None:
        """Note that more of an answer has arrived: a rank with a long one waits for its reader."""
        self._answered_at = _now()

    async def passes(self, until: Callable[[float], float] = lambda own: own) -> None:
        """Return when it has passed; `until` may put off the moment that it is called with."""
        at = self._since + self._silence_s
        while at > _now():
            with trio.CancelScope(deadline=at) as self._sleep:
                await trio.sleep_forever()
            at = until(self.until())

    def until(self) -> float:
        """Return the moment, as of now, by the clock of `machine_time`."""
        own = self.given([read_flight(path) for path in self._flights])
        return self._others(own) if math.isinf(self.patience_s) else own

    def given(self, seen: Sequence[LastSeen]) -> float:
        """Return the moment for these flight records, without regard to remote ranks."""
        if math.isinf(self.patience_s) and any(one.phase == IMPORT for one in seen):
            return self._end  # where a rank has failed, nobody needs what the others import
        alive_at = machine_time.moment(max(one.alive_at for one in seen))  # long ago if no rank has made progress
        progress, now = max(self._since, self._answered_at, alive_at), _now()
        # No more than have passed: the clock leaves out seconds that the kernel counts as waits as well.
        kept_waiting_s = min(self._kept_waiting.seconds, now - self._since)
        until = progress + kept_waiting_s + self._silence_s
        if now < self._end:
            self._waits_still = until <= now and self._kept_waiting.goes_on()
            until = now + LOOK_AGAIN_S if self._waits_still else until
        return min(until, self._end)

    def starved(self) -> str:
        """Return that the ranks got hardly any processor, if that is why they took all deadlines; empty otherwise.

        Ranks that wait for each other divide the wait for a processor among them, and one may compute while it waits.
        """
        passed_s = _now() - self._since
        if passed_s < self._end - self._since:
            return ""
        idle = [(ran_s, waited_s) for ran_s, waited_s in self._kept_waiting.of_each() if ran_s < _STARVED * passed_s]
        all_waited_s = sum(min(waited_s, passed_s) for _, waited_s in idle)
        if not idle or not (self._waits_still or all_waited_s > passed_s / 2):
            return ""
        all_ran_s = sum(ran_s for ran_s, _ in idle)
        return (
            f"the machine let {len(idle)} of {len(self._pids)} ranks run for {all_ran_s:.2g} of {passed_s:.2g} s in all"
        )


def _now() -> float:
    machine_time.resume()  # who asks listens
    return machine_time.now()
