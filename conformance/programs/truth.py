"""`truth_of`: what the ranks of a scenario must observe is what its program observes on plain ranks."""

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


def truth_of(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts that the scenario's program observes when its DDP is a `PlainDDP`.

    A fact with `must` (`RankContext.observe`) is expected to be that instead. All ranks are threads of this process. A
    program that is unsupported has no expected fact. Raises what the program raises; `DesertedError` where its ranks
    wait for each other; `InexactError` where a mean is not exact.
    """
    return plain_facts(scenario, PlainContext)


def plain_facts(scenario: Scenario, kind: type[PlainContext]) -> Mapping[int, Facts]:
    """Return the facts of a scenario's ranks in contexts of this `kind` on plain ranks; raises as `truth_of`."""
    with single_threaded():
        return on_plain_ranks(scenario.world_size, lambda rank, group: _observed(scenario, rank, group, kind))


#: Exceptions of a mistake in the program itself: as an expectation, every DDP would meet them.
_MISTAKES = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError"})


class PlainContext(RankContext):
    """A plain rank's view, in which a fact with `must` has that value."""

    def __init__(
        self, scenario: Scenario, rank: int, device: torch.device, group: PlainGroup, fixture: ModelFixture
    ) -> None:
        super().__init__(
            scenario, rank=rank, device=device, process_group=group, fixture=fixture, wrap=PlainDDP,
            wrap_named=lambda _: PlainDDP,
        )  # fmt: skip

    def observe(self, name: str, value: Any, *, must: Any = UNSTATED) -> None:
        """Report `must` as the expected fact, or the value that it has here if the program states no demand."""
        if must is UNSTATED:
            if isinstance(value, Raised):
                certain(value.type not in _MISTAKES, f"program {self.scenario.program} itself raises {value}")
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
