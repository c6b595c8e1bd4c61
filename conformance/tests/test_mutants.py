"""Every broken DDP is caught by a requirement that says what is broken, and torch's own DDP is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conformance.backends.backend import get_backend
from conformance.chapters.chapter import load_scenarios
from conformance.judge import judge
from conformance.mutants import broken, subtle
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

    @property
    def subject(self) -> str:
        """The mutant as `--ddp` takes it."""
        module = broken if hasattr(broken, self.mutant) else subtle
        return f"{module.__name__}:{self.mutant}"


KILLS = (
    Kill("NoDivision", "GRAD-01", "grad"),
    Kill("ForgetsTheLastBucket", "BUCKET-01", "elements"),
    Kill("StaleBuffers", "BUFFER-01", "seen"),
    Kill("ReducesInsideNoSync", "ACCUM-01", "num_gradient_collectives"),
    Kill("ZeroesUnusedGradients", "UNUSED-01", "grad"),
    Kill("SkipsInitialSync", "CONS-01", "start/parameter"),
    Kill("SkipsInitialSync", "CONS-02", "start/buffer"),
    Kill("NamesWithoutPrefix", "CONS-18", "state_names"),
    Kill("CopiesArguments", "CONS-20", "arguments"),
    Kill("FlattensNamedTuples", "CONS-21", "structure"),
    Kill("SkipsModuleHooks", "CONS-23", "fired"),
    Kill("DifferentBits", "GRAD-02", "agrees"),
    Kill("ContiguousGradients", "GRAD-06", "strides"),
    Kill("Warns", "GRAD-07", "warnings"),
    Kill("NeverViews", "GRAD-08", "num_storages"),
    Kill("AlwaysViews", "GRAD-09", "num_storages"),
    Kill("SwallowsNan", "GRAD-25", "grad"),
    Kill("DividesLast", "GRAD-26", "grad"),
    Kill("ReducesTwice", "BUCKET-01", "elements"),
    Kill("RegistrationOrder", "BUCKET-02", "step0/buckets"),
    Kill("RegistrationOrder", "BUCKET-04", "buckets"),
    Kill("OneBucket", "BUCKET-05", "buckets"),
    Kill("OneBucket", "BUCKET-07", "buckets"),
    Kill("OneBucket", "BUCKET-10", "issued_before_last"),
    Kill("FloatingBuffersOnly", "BUFFER-02", "seen"),
    Kill("TellsAutograd", "BUFFER-03", "modified by an inplace operation"),
    Kill("KeepsFirstBuffers", "BUFFER-08", "seen"),
    Kill("InnerNoSyncEndsOuter", "ACCUM-04", "num_gradient_collectives"),
    Kill("NoSyncSurvivesException", "ACCUM-06", "grad"),
    Kill("UnusedHereStaysNone", "UNUSED-02", "grad"),
)


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    with Controller(get_backend("gloo")) as controller:
        yield controller


def scenarios_of(requirement: str) -> list[Scenario]:
    """Return up to six scenarios at world size 2 that give evidence for `requirement`."""
    fitting = [scenario for scenario in load_scenarios() if requirement in scenario.requirements]
    return [scenario for scenario in fitting if scenario.world_size == 2][:6]


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


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill.mutant}-{kill.requirement}")
def test_a_mutant_is_told_from_torch_by_the_requirement_that_it_breaks(controller: Controller, kill: Kill) -> None:
    scenarios = scenarios_of(kill.requirement)
    of_mutant = failures(controller, kill.subject, scenarios)
    of_torch = failures(controller, "torch", scenarios)
    telling = [finding for name, findings in of_mutant.items() if name not in of_torch for finding in findings]
    assert telling, f"no scenario of {kill.requirement} tells {kill.mutant} from torch's own DDP"
    wrong = [finding.summary + finding.explanation for finding in telling if finding.verdict is Verdict.FAIL]
    assert any(kill.evidence in text for text in wrong), wrong


@pytest.mark.parametrize("kill", [kill for kill in KILLS if hasattr(broken, kill.mutant)], ids=lambda kill: kill.mutant)
def test_torch_itself_passes_what_catches_a_broken_ddp(controller: Controller, kill: Kill) -> None:
    assert failures(controller, "torch", scenarios_of(kill.requirement)) == {}


@pytest.mark.parametrize("subject", sorted({kill.subject for kill in KILLS}), ids=lambda subject: subject.split(":")[1])
def test_a_mutant_is_broken_in_one_way_only(controller: Controller, subject: str) -> None:
    untouched = scenarios_of("CONS-17") + scenarios_of("CONS-08")
    found = failures(controller, subject, untouched)
    assert [name for name, findings in found.items() if findings[0].verdict is not Verdict.HARNESS_ERROR] == []
