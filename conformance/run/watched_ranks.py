"""Ranks that keep what they observed last, for those who want to see more of a run than its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conformance.observation import Facts, Observation
from conformance.run.scenario_runner import Ranks
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject


class WatchedRanks:
    """Runs scenarios on other ranks and keeps the last observations of one subject, and the last expected facts."""

    def __init__(self, ranks: Ranks, subject: Subject) -> None:
        """Watch `ranks` while they run `subject`; other subjects run unwatched."""
        self.observations: Mapping[int, Observation] = {}
        self.expected: Mapping[int, Facts] | None = None
        self._ranks = ranks
        self._subject = subject

    def start(
        self, scenario: Scenario, subject: Subject, *, fresh: bool = False
    ) -> Callable[[float], dict[int, Observation] | None]:
        """Start, and keep what comes of it, as `Ranks.start`."""
        wait = self._ranks.start(scenario, subject, fresh=fresh)

        def kept(silence_s: float) -> dict[int, Observation] | None:
            observations = wait(silence_s)
            if observations is not None and subject == self._subject:
                self.observations = observations
            return observations

        return kept

    def expect(self, scenario: Scenario) -> Callable[[], Mapping[int, Facts]]:
        """Start to compute the facts and keep them, as `Ranks.expect`."""
        wait = self._ranks.expect(scenario)

        def kept() -> Mapping[int, Facts]:
            self.expected = wait()
            return self.expected

        return kept
