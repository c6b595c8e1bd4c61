"""The chapters about compiled modules: complete, each with a truth that can fail, and able to see what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.backends.backend import get_backend
from conformance.chapters.chapter import load_scenarios
from conformance.errors import ScenarioError
from conformance.observation import Raised
from conformance.oracles.expected import mismatch
from conformance.programs.compiled_context import PRELOAD, CompileOrder
from conformance.programs.program import get_program
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.tests.test_mutants import failures
from conformance.verdict import Verdict
from conformance.workers.controller import Controller

CHAPTERS = ("graph_split", "traced_reducer", "fusion")


def own_scenarios() -> list[Scenario]:
    return [scenario for scenario in load_scenarios() if scenario.chapter in CHAPTERS]


def one_of_each() -> list[Scenario]:
    return list({(one.id.split("/")[1], one.program): one for one in own_scenarios()}.values())


def named(scenario_id: str) -> Scenario:
    (scenario,) = [one for one in own_scenarios() if one.id == scenario_id]
    return scenario


def test_every_requirement_has_a_scenario_and_no_two_are_the_same() -> None:
    own = {one.id for one in load_catalogue() if one.chapter in CHAPTERS}
    assert {name for scenario in own_scenarios() for name in scenario.requirements} == own
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
    for facts in expectation(scenario).values():
        assert facts
        assert [name for name, value in facts.items() if mismatch(value, nonsense) is None] == []


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"backend": "indutcor"}, "compile backend must be one of eager, aot_eager"),
        ({"reduction": "graph"}, "compile reduction must be one of split, whole, in_graph"),
        ({"fulgraph": True}, r"unknown compile argument\(s\): fulgraph"),
    ],
)
def test_an_order_that_no_compilation_could_mean_is_refused(order: dict[str, object], message: str) -> None:
    scenario = Scenario("x/X-01/x", ("X-01",), "compiled", arguments={"compile": order})
    with pytest.raises(ScenarioError, match=message):
        CompileOrder.of(scenario)


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    with Controller(get_backend("gloo"), preload=PRELOAD) as controller:
        yield controller


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mutant", "scenario_id", "evidence"),
    [
        ("NeverCuts", "graph_split/SPLIT-04/one-mib-world2", "parts"),
        ("ReducesInDefaultGroup", "fusion/FUSE-09/groups-of-2-and-1-two-dtypes-concat-world2", "module1/grad"),
    ],
)
def test_a_mutant_is_told_from_torch(controller: Controller, mutant: str, scenario_id: str, evidence: str) -> None:
    scenario = named(scenario_id)
    found = failures(controller, f"conformance.mutants.compiled:{mutant}", [scenario]).get(scenario_id, ())
    wrong = [finding.summary + finding.explanation for finding in found if finding.verdict is Verdict.FAIL]
    assert any(evidence in text for text in wrong), found
    assert failures(controller, "torch", [scenario]) == {}
