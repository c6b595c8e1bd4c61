"""`expected_of` a scenario's ranks is what its program states, else `truth_of`: what it observes on plain ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from conformance.errors import certain
from conformance.models.catalogue import ModelFixture, get_fixture
from conformance.observation import Facts, Raised
from conformance.programs.rank_context import UNSTATED, RankContext, Unsupported
from conformance.programs.registry import get_program
from conformance.scenario import Scenario
from conformance.truth.device import replica_device, single_threaded
from conformance.truth.on_processes import PlainDDP
from conformance.truth.plain_group import PlainGroup
from conformance.truth.plain_ranks import on_plain_ranks


def expected_of(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts that it must observe: from the function given to `expects`, else `truth_of`."""
    return (get_program(scenario.program).stated or truth_of)(scenario)


def truth_of(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts that the scenario's program observes when its DDP is a `PlainDDP`.

    Where the program says what a fact must be (`RankContext.observe`), that is expected instead. All ranks are threads
    of this process. Where the program does not apply, no fact is expected. Raises what the program raises;
    `DesertedError` where its ranks wait for each other; `InexactError` where a mean is not exact.
    """
    return plain_facts(scenario, PlainContext)


def plain_facts(scenario: Scenario, kind: type[PlainContext]) -> Mapping[int, Facts]:
    """Return what the ranks of a scenario report to contexts of this `kind` on plain ranks; raises as `truth_of`."""
    with single_threaded():
        return on_plain_ranks(scenario.world_size, lambda rank, group: _observed(scenario, rank, group, kind))


#: What a mistake of the program's own raises, of whatever DDP: as an expectation it would hold for every one.
_MISTAKES = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError"})


class PlainContext(RankContext):
    """A plain rank's view: a fact that must be something is that, whatever the plain DDP has made of it."""

    def __init__(
        self, scenario: Scenario, rank: int, device: torch.device, group: PlainGroup, fixture: ModelFixture
    ) -> None:
        """Bind a scenario to a plain rank."""
        super().__init__(
            scenario, rank=rank, device=device, process_group=group, fixture=fixture, wrap=PlainDDP,
            wrap_named=lambda _: PlainDDP,
        )  # fmt: skip

    def observe(self, name: str, value: Any, *, must: Any = UNSTATED) -> None:
        """Report as expected what the fact must be, the value that it has here if the program does not say."""
        if must is UNSTATED:
            is_mistake = isinstance(value, Raised) and value.type in _MISTAKES
            certain(not is_mistake, f"program {self.scenario.program} itself raises {value}")
            super().observe(name, value)
        else:
            certain(name not in self.facts, f"fact {name} observed twice")
            self.facts[name] = must


def _observed(scenario: Scenario, rank: int, group: PlainGroup, kind: type[PlainContext]) -> Facts:
    context = kind(scenario, rank, replica_device(), group, get_fixture(scenario.model))
    try:
        get_program(scenario.program).body(context)
    except Unsupported:
        return {}
    return context.facts
