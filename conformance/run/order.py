"""The order in which scenarios run: verdicts must not depend on it."""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass

from conformance.errors import certain
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.quick import cover, known_kills, load_all_kills

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

        Listed are first the scenarios that together kill every mutant, then the cheapest of each requirement, then all
        others in rounds, so that any bug fails early. Each part has level core before options, and pools by ascending
        world size, unrecorded ones last; with `shuffled` in any order.
        """
        scenarios = tuple(scenarios)
        if self.name == "shuffled":
            arranged = sorted(scenarios, key=_pool)
            random.Random(self.seed).shuffle(arranged)
            pools = list(dict.fromkeys(map(_pool, arranged)))
            return tuple(sorted(arranged, key=lambda scenario: pools.index(_pool(scenario))))
        telling = cover(known_kills(scenarios, load_all_kills()))
        asking = {scenario.id for scenario in one_per_requirement(scenarios)} - telling
        rounds = {**_rounds(scenarios), **dict.fromkeys(asking, -1), **dict.fromkeys(telling, -2)}
        owed = {requirement.id for requirement in load_catalogue() if requirement.level == "core"}
        listed = sorted(scenarios, key=lambda one: (rounds[one.id], one.leading_requirement not in owed, _pool(one)))
        return tuple(reversed(listed) if self.name == "reversed" else listed)


LISTED = Order()
#: So many scenarios of a requirement have come by the end of each round but the last.
_SO_MANY_BY_ROUND = (3, 15)


def _rounds(scenarios: Iterable[Scenario]) -> dict[str, int]:
    """Return each scenario's round: of a requirement with many, three are in the first, twelve in the second.

    A round takes scenarios that are far apart: neighbours are alike, and mostly miss the same bugs.
    """
    of_each: dict[str, list[str]] = {}
    for scenario in scenarios:
        of_each.setdefault(scenario.id.rpartition("/")[0], []).append(scenario.id)
    rounds: dict[str, int] = {}
    for ids in of_each.values():
        is_few = len(ids) <= _SO_MANY_BY_ROUND[-1]
        for number, id_ in enumerate(sorted(ids, key=lambda one: hashlib.sha256(one.encode()).digest())):
            rounds[id_] = 0 if is_few else sum(number >= most for most in _SO_MANY_BY_ROUND)
    return rounds


def _pool(scenario: Scenario) -> tuple[int, bool, bool]:
    return scenario.world_size, not scenario.recorded, scenario.apart
