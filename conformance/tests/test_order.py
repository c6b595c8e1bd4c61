"""The listed order asks for every requirement once before it asks for any twice, and keeps ranks of a kind together."""

from __future__ import annotations

import itertools

from conformance.run.order import LISTED, Order
from conformance.spec.cheapest import one_per_requirement
from conformance.suite import load_scenarios


def test_every_requirement_is_asked_for_before_any_is_asked_for_again() -> None:
    scenarios = load_scenarios()
    arranged = LISTED.apply(scenarios)
    assert sorted(one.id for one in arranged) == sorted(one.id for one in scenarios)
    first = one_per_requirement(scenarios)
    assert {one.id for one in arranged[: len(first)]} == {one.id for one in first}
    assert {name for one in first for name in one.requirements} == {
        name for one in scenarios for name in one.requirements
    }
    for part in (arranged[: len(first)], arranged[len(first) :]):
        kinds = [kind for kind, _ in itertools.groupby(part, key=lambda one: one.kind_of_ranks)]
        assert len(kinds) == len(set(kinds))


def test_reversed_is_the_listed_order_from_its_end() -> None:
    scenarios = load_scenarios()[::50]
    assert Order("reversed").apply(scenarios) == LISTED.apply(scenarios)[::-1]
