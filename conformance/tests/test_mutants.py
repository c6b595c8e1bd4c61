"""Every broken DDP is caught by a requirement that says what is broken, and torch's own DDP is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conformance.backends.backend import get_backend
from conformance.chapters.chapter import load_scenarios
from conformance.judge import judge
from conformance.programs.program import get_program
from conformance.scenario import Scenario
from conformance.subjects.subject import get_subject
from conformance.verdict import Finding, Verdict
from conformance.workers.controller import Controller


@dataclass(frozen=True)
class Kill:
    """A mutant, the requirement that it breaks, and a word of the evidence."""

    mutant: str
    requirement: str
    evidence: str


KILLS = (
    Kill("NoDivision", "GRAD-01", "grad"),
    Kill("ForgetsTheLastBucket", "BUCKET-01", "elements"),
    Kill("StaleBuffers", "BUFFER-01", "seen"),
    Kill("ReducesInsideNoSync", "ACCUM-01", "num_gradient_collectives"),
    Kill("ZeroesUnusedGradients", "UNUSED-01", "grad"),
)


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    with Controller(get_backend("gloo")) as controller:
        yield controller


def scenarios_of(requirement: str) -> list[Scenario]:
    """Return up to six scenarios at world size 2 that are named after `requirement`."""
    named = [scenario for scenario in load_scenarios() if scenario.id.split("/")[1] == requirement]
    return [scenario for scenario in named if scenario.world_size == 2][:6]


def failures(controller: Controller, subject: str, scenarios: list[Scenario]) -> dict[str, tuple[Finding, ...]]:
    """Run `scenarios` and return the findings of those that did not pass, by id."""
    found = {}
    for scenario in scenarios:
        program = get_program(scenario.program)
        observations = controller.run(scenario, get_subject(subject))
        expected = program.expectation(scenario) if program.expectation else None
        verdict, findings = judge(scenario, program, observations, expected, None)
        if verdict is not Verdict.PASS:
            found[scenario.id] = findings
    return found


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.mutant)
def test_a_mutant_is_caught_by_the_requirement_that_it_breaks(controller: Controller, kill: Kill) -> None:
    found = failures(controller, f"conformance.mutants.broken:{kill.mutant}", scenarios_of(kill.requirement))
    assert found, f"{kill.mutant} passed every scenario of {kill.requirement}"
    wrong = [finding for findings in found.values() for finding in findings if finding.verdict is Verdict.FAIL]
    assert any(kill.evidence in finding.summary + finding.explanation for finding in wrong), wrong


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.requirement)
def test_torch_itself_passes_what_catches_its_mutant(controller: Controller, kill: Kill) -> None:
    assert failures(controller, "torch", scenarios_of(kill.requirement)) == {}


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.mutant)
def test_a_mutant_is_broken_in_one_way_only(controller: Controller, kill: Kill) -> None:
    untouched = scenarios_of("CONS-17") + scenarios_of("CONS-08")
    assert failures(controller, f"conformance.mutants.broken:{kill.mutant}", untouched) == {}
