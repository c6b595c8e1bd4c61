"""`Baton`: ranks are threads of one process; one of them runs at a time, and hands over where it must wait.

A run is therefore deterministic, and a deadlock is found at once, without a clock: no thread can go on. State of the
process that belongs to a rank, such as the random state, is saved and restored with the baton.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from conformance.errors import certain, present
from conformance.waiting.kept_waiting import MOST_TIMES, Stopwatch
from conformance.waiting.limits import TURN_S

#: How long the holder of the baton may compute, where the machine lets it, before the others raise.
DEADLINE_S = 100.0


class DesertedError(Exception):
    """Ranks wait for each other and none can go on; lists which rank waits where, and which has ended."""


class Carried(Protocol):
    """State that the process has once and each rank uses as its own."""

    def take(self) -> Any:
        """Return the state of the running rank."""

    def give(self, state: Any) -> None:
        """Install the state of the next rank."""


@dataclass(eq=False)
class Meeting:
    """A place where ranks meet once: for `what` each arrived, what it brought, and the `results` once all have."""

    place: tuple[object, ...]
    members: Sequence[int]
    what: dict[int, str] = field(default_factory=dict)
    brought: dict[int, Any] = field(default_factory=dict)
    results: Mapping[int, Any] | None = None

    @property
    def missing(self) -> list[int]:
        """The ranks that have not arrived."""
        return [rank for rank in self.members if rank not in self.brought]


#: Computes each rank's result from the values of all ranks, by ascending rank; runs once, on the last rank to arrive.
Combine = Callable[[Mapping[int, Any]], Mapping[int, Any]]


class Baton:
    """Lets one of several threads run at a time, and makes them meet."""

    def __init__(self, num_ranks: int, states: Mapping[int, Sequence[Any]], carried: Sequence[Carried]) -> None:
        """Begin with rank 0; `states` are each rank's states of `carried`."""
        self.num_ranks = num_ranks
        self._turn = threading.Condition()
        self._holder = 0
        self._threads: dict[int, int] = {}
        self._running = set(range(num_ranks))
        self._waits: dict[int, Meeting] = {}
        self._meetings: dict[tuple[object, ...], Meeting] = {}
        self._error: Exception | None = None
        self._carried = carried
        self._states: dict[int, Sequence[Any]] = dict(states)

    def begin(self, rank: int) -> None:
        """Wait for the first turn of this thread, which is `rank`."""
        self._threads[rank] = threading.get_ident()
        self._await_turn(rank)

    def end(self, rank: int) -> None:
        """Give the baton away for good."""
        with self._turn:
            self._running.discard(rank)
            self._hand_over(rank)
            if not self._running:  # it holds frames, and through them graphs whose hooks hold the ranks' group
                self._error = None

    def is_mine(self, rank: int) -> bool:
        """Whether the thread that asks is `rank`."""
        return self._threads.get(rank) == threading.get_ident()

    def arrive(self, rank: int, place: tuple[object, ...], members: Sequence[int], what: str, value: Any,
             combine: Combine) -> Meeting:  # fmt: skip
        """Bring `value` to the meeting at `place`, and go on; all `members` must arrive there for the same `what`.

        Raises `DesertedError` where another member arrived for something else; every rank raises what `combine` raises.
        """
        certain(self._holder == rank, f"rank {rank} meets others while another rank runs")
        meeting = self._meetings.setdefault(place, Meeting(place, members))
        certain(rank not in meeting.brought, f"rank {rank} arrived at {place} twice")
        meeting.what[rank], meeting.brought[rank] = what, value
        if meeting.missing:
            return meeting
        del self._meetings[place]
        try:
            if len(set(meeting.what.values())) > 1:
                each = (f"rank {one} for {text}" for one, text in sorted(meeting.what.items()))
                raise DesertedError(f"ranks meet for different things: {', '.join(each)}")
            meeting.results = combine({rank: meeting.brought[rank] for rank in sorted(meeting.brought)})
        except Exception as error:
            self._error = self._error or error
            raise
        return meeting

    def wait(self, rank: int, meeting: Meeting) -> Any:
        """Return the result of `rank` at `meeting`; others run until all members have arrived."""
        if meeting.results is None:
            with self._turn:
                self._waits[rank] = meeting
                self._hand_over(rank)
            self._await_turn(rank)
            self._waits.pop(rank, None)
            if meeting.results is None:
                raise present(self._error)
        return present(meeting.results)[rank]

    def _hand_over(self, rank: int) -> None:
        self._states[rank] = [one.take() for one in self._carried]
        order = [(rank + step) % self.num_ranks for step in range(1, self.num_ranks + 1)]
        if not any(map(self._can_go_on, order)) and self._running:
            self._error = DesertedError(self._who_waits())
        self._holder = next(filter(self._can_go_on, order), -1)
        self._turn.notify_all()

    def _can_go_on(self, rank: int) -> bool:
        if rank not in self._running:
            return False
        return self._error is not None or rank not in self._waits or self._waits[rank].results is not None

    def _who_waits(self) -> str:
        waits = [
            f"rank {rank} waits at {meeting.what[rank]} for rank {', '.join(map(str, meeting.missing))}"
            for rank, meeting in sorted(self._waits.items())
        ]
        ended = [f"rank {rank} has ended" for rank in range(self.num_ranks) if rank not in self._running]
        return "; ".join(waits + ended)

    def _await_turn(self, rank: int) -> None:
        with self._turn:
            stopwatch, began = None, time.monotonic()
            while not self._turn.wait_for(lambda: self._holder == rank, TURN_S):
                stopwatch = stopwatch or Stopwatch()
                if stopwatch.seconds > DEADLINE_S or time.monotonic() > began + MOST_TIMES * DEADLINE_S:
                    late = f"rank {self._holder} has reached no meeting for {DEADLINE_S:g} s; rank {rank} waits for it"
                    self._error = self._error or DesertedError(late)
                    raise self._error
            for one, state in zip(self._carried, self._states[rank], strict=True):
                one.give(state)
