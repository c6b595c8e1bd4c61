"""When which scenario ran in which lane, and what that says about more lanes. Values and pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from conformance.scenario import Scenario

#: So many scenarios at most go to a lane at once: fewer leave it more often with new ranks, more leave others idle.
_MOST_IN_A_BATCH = 8


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when a scenario ran, in seconds of this machine's monotonic clock, and in which lane."""

    lane: int
    scenario_id: str
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """The spans of a run with `jobs` lanes that began at `started_s` and ended at `ended_s`."""

    jobs: int
    spans: tuple[Span, ...]
    started_s: float
    ended_s: float

    @property
    def wall_s(self) -> float:
        """How long the run took."""
        return self.ended_s - self.started_s

    @property
    def longest(self) -> Span:
        """The critical path: scenarios wait for no other, so that no number of lanes ends sooner than this one."""
        return max(self.spans, key=lambda span: span.ended_s - span.started_s)

    @property
    def idle_share(self) -> float:
        """The share of the lanes' time in which they ran no scenario, starting them included."""
        busy_s = sum(_covered_s(span for span in self.spans if span.lane == lane) for lane in self.lanes)
        return max(0.0, 1.0 - busy_s / (self.jobs * self.wall_s))

    @property
    def lanes(self) -> frozenset[int]:
        """The lanes that ran something."""
        return frozenset(span.lane for span in self.spans)

    def __str__(self) -> str:
        """Return a sentence for who wonders whether more lanes would help."""
        if not self.spans:
            return f"{self.jobs} lane(s), no scenario."
        length_s = self.longest.ended_s - self.longest.started_s
        return (
            f"{self.jobs} lane(s), idle for {self.idle_share:.0%} of {self.wall_s:.1f} s; no number of them takes less"
            f" than the {length_s:.1f} s of {self.longest.scenario_id}."
        )


def batches_of(scenarios: tuple[Scenario, ...]) -> list[tuple[int, ...]]:
    """Return the places of `scenarios` in the parts that lanes get.

    Neighbours on ranks of the same kind stay together: each lane begins its own.
    """
    together = groupby(range(len(scenarios)), lambda place: scenarios[place].kind_of_ranks)
    return [
        places[start : start + _MOST_IN_A_BATCH]
        for places in (tuple(group) for _, group in together)
        for start in range(0, len(places), _MOST_IN_A_BATCH)
    ]


def _covered_s(spans: Iterable[Span]) -> float:
    """Return how long at least one of the spans lasted: a lane starts the next scenario before the last has ended."""
    covered_s, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.started_s):
        covered_s += max(0.0, span.ended_s - max(until, span.started_s))
        until = max(until, span.ended_s)
    return covered_s
