"""Chapters about features, and about compiled modules: complete, and no requirement that cannot fail."""

from __future__ import annotations

import pytest

from conformance.mutants.catalogue import load_deviations, load_mutants
from conformance.observation import Raised
from conformance.programs.registry import get_program
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.suite import load_scenarios
from conformance.truth.expected import Anything, mismatch

#: Every requirement of these has somebody who breaks it; `test_mutants` shows that it notices.
FEATURES = ("join", "static_graph", "comm_hooks")
CHAPTERS = (*FEATURES, "graph_split", "traced_reducer", "fusion")


def own_scenarios() -> list[Scenario]:
    return [scenario for scenario in load_scenarios() if scenario.chapter in CHAPTERS]


def one_of_each() -> list[Scenario]:
    """Return one scenario of each requirement and program."""
    found: dict[tuple[str, str], Scenario] = {}
    for scenario in sorted(own_scenarios(), key=lambda scenario: scenario.world_size):
        found.setdefault((scenario.id.split("/")[1], scenario.program), scenario)
    return list(found.values())


def test_every_requirement_has_scenarios() -> None:
    own = {requirement.id for requirement in load_catalogue() if requirement.chapter in CHAPTERS}
    assert {requirement for scenario in own_scenarios() for requirement in scenario.requirements} == own


def test_every_requirement_of_a_feature_has_who_breaks_it() -> None:
    own = {requirement.id for requirement in load_catalogue() if requirement.chapter in FEATURES}
    assert own <= {kill.requirement for breaker in (*load_mutants(), load_deviations()) for kill in breaker.kills}


def test_scenarios_travel_as_json_and_no_two_are_the_same() -> None:
    seen: dict[str, str] = {}
    for scenario in own_scenarios():
        assert Scenario.loads(scenario.dumps()) == scenario
        alike = scenario.replace(id="x", requirements=("X-01",), needs=(), deadline_s=1.0).dumps()
        assert alike not in seen, f"{scenario.id} is {seen.get(alike)}"
        seen[alike] = scenario.id


@pytest.mark.parametrize("scenario", one_of_each(), ids=lambda scenario: scenario.id)
def test_the_truth_can_be_computed_and_no_nonsense_satisfies_it(scenario: Scenario) -> None:
    expectation = get_program(scenario.program).expectation
    assert expectation is not None
    nonsense = Raised("SystemError", ("SystemError",), "nonsense")
    for rank, facts in expectation(scenario).items():
        demands = [value for value in facts.values() if not isinstance(value, Anything)]
        assert demands, f"nothing is required of rank {rank}"
        assert all(mismatch(value, nonsense) is not None for value in demands)
