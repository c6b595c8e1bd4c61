"""The order in which scenarios run: verdicts must not depend on it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from conformance.errors import certain
from conformance.scenario import Scenario
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.quick import cover, known_kills, load_kills

ORDERS = ("listed", "reversed", "shuffled")


@dataclass(frozen=True, slots=True)
class Order:
    """One of `ORDERS`; `seed` decides how scenarios are shuffled."""

    name: str = "listed"
    seed: int = 0

    def __post_init__(self) -> None:
        certain(self.name in ORDERS, self.name)

    def __str__(self) -> str:
        """Return e.g. `reversed` or `shuffled with seed 7`."""
        return f"{self.name} with seed {self.seed}" if self.name == "shuffled" else self.name

    def apply(self, scenarios: Iterable[Scenario]) -> tuple[Scenario, ...]:
        """Return `scenarios` in this order; those that share a pool of ranks stay together, so that it starts once.

        Listed are those that together kill every mutant, then the cheapest of each requirement, then all others: what
        is broken is red early, whatever it is. In each part pools come by ascending world size, unrecorded ones last;
        shuffled ones in any order.
        """
        scenarios = tuple(scenarios)
        if self.name == "shuffled":
            arranged = sorted(scenarios, key=_pool)
            random.Random(self.seed).shuffle(arranged)
            pools = list(dict.fromkeys(map(_pool, arranged)))
            return tuple(sorted(arranged, key=lambda scenario: pools.index(_pool(scenario))))
        telling = cover(known_kills(scenarios, load_kills()))
        asking = {scenario.id for scenario in one_per_requirement(scenarios)} - telling
        parts: dict[str, int] = {**dict.fromkeys(telling, 0), **dict.fromkeys(asking, 1)}
        listed = sorted(scenarios, key=lambda scenario: (parts.get(scenario.id, 2), _pool(scenario)))
        return tuple(reversed(listed) if self.name == "reversed" else listed)


LISTED = Order()


def _pool(scenario: Scenario) -> tuple[int, bool, bool]:
    return scenario.world_size, not scenario.recorded, scenario.apart
