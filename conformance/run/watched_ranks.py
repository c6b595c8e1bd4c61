"""Ranks that keep their last observations, for callers that need more of a run than its verdict."""

from collections.abc import Mapping

from conformance.observation import Facts, Observation
from conformance.run.attempt import Ranks
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject


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

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        """Keep what comes of it, as `Ranks.observe`."""
        observations = await self._ranks.observe(scenario, subject, fresh)
        if subject == self._subject or not subject.is_ddp:
            self.observations = observations
        return observations

    def retire(self, scenario: Scenario, subject: Subject) -> None:
        """Let none of the ranks run another scenario, as `Ranks.retire`."""
        self._ranks.retire(scenario, subject)

    async def expect(self, scenario: Scenario) -> Mapping[int, Facts]:
        """Keep the facts, as `Ranks.expect`."""
        self.expected = await self._ranks.expect(scenario)
        return self.expected
