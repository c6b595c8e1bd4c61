"""The listed order begins with what finds most, and keeps ranks of a kind together."""

import itertools
from collections import Counter

from conformance.run.order import LISTED, Order
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.quick import cover, known_kills, load_all_kills, num_killed
from conformance.suite import load_scenarios


def test_what_kills_every_mutant_comes_first_and_then_what_asks_for_every_requirement() -> None:
    scenarios = load_scenarios()
    arranged = LISTED.apply(scenarios)
    assert sorted(one.id for one in arranged) == sorted(one.id for one in scenarios)
    kills = known_kills(scenarios, load_all_kills())
    telling = cover(kills)
    asking = {one.id for one in one_per_requirement(scenarios)} - telling
    ends = [0, len(telling), len(telling) + len(asking), len(arranged)]
    parts = [arranged[start:end] for start, end in itertools.pairwise(ends)]
    assert [{one.id for one in part} for part in parts[:2]] == [telling, asking]
    assert num_killed(parts[0], kills) == sum(map(bool, kills.values()))
    assert {name for part in parts[:2] for one in part for name in one.requirements} == {
        name for one in scenarios for name in one.requirements
    }
    for part in parts[:2]:
        kinds = [kind for kind, _ in itertools.groupby(part, key=lambda one: (is_option(one), one.kind_of_ranks))]
        assert len(kinds) == len(set(kinds))
        options = [option for option, _ in kinds]
        assert options == sorted(options), "what every DDP owes comes first"


def is_option(scenario: Scenario) -> bool:
    return load_catalogue().requirement(scenario.leading_requirement).level != "core"


def test_the_others_come_in_rounds_that_ask_everything_again() -> None:
    scenarios = load_scenarios()
    arranged = [one.id.rpartition("/")[0] for one in LISTED.apply(scenarios)]
    num_of_each = Counter(arranged)
    several = {requirement for requirement, number in num_of_each.items() if number >= 32}
    halfway = Counter(arranged[: len(arranged) // 2])
    assert len(several) > 20
    assert all(halfway[requirement] >= 15 for requirement in several)


def test_reversed_is_the_listed_order_from_its_end() -> None:
    scenarios = load_scenarios()[::50]
    assert Order("reversed").apply(scenarios) == LISTED.apply(scenarios)[::-1]
