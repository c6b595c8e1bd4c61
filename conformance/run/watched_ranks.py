"""Ranks that keep what they observed last, for those who want to see more of a run than its verdict."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.observation import Facts, Observation
from conformance.run.attempt import Ranks
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject
from conformance.waiting.pending import Pending


class WatchedRanks:
    """Runs scenarios on other ranks and keeps the last observations of one subject, and the last expected facts.

    What ran without any DDP, as scenarios about a backend do, is kept as well: it is every subject's.
    """

    def __init__(self, ranks: Ranks, subject: Subject) -> None:
        """Watch `ranks` while they run `subject`; other DDPs run unwatched."""
        self.observations: Mapping[int, Observation] = {}
        self.expected: Mapping[int, Facts] | None = None
        self._ranks = ranks
        self._subject = subject

    def start(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> Pending[Mapping[int, Observation]]:
        """Start, and keep what comes of it, as `Ranks.start`."""

        def keep(observations: Mapping[int, Observation]) -> Mapping[int, Observation]:
            if subject == self._subject or not subject.is_ddp:
                self.observations = observations
            return observations

        return self._ranks.start(scenario, subject, fresh=fresh).then(keep)

    def retire(self, scenario: Scenario, subject: Subject) -> None:
        """Let none of the ranks run another scenario, as `Ranks.retire`."""
        self._ranks.retire(scenario, subject)

    def expect(self, scenario: Scenario) -> Pending[Mapping[int, Facts]]:
        """Start to compute the facts and keep them, as `Ranks.expect`."""

        def keep(facts: Mapping[int, Facts]) -> Mapping[int, Facts]:
            self.expected = facts
            return facts

        return self._ranks.expect(scenario).then(keep)
