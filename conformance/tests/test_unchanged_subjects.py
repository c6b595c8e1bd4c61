"""A DDP that is made from another one and changes nothing gets its base's verdicts: requirements judge by calling.

Every run takes a sample; the nightly job takes the cheapest scenario of each requirement.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from conformance.backends.backend import get_backend
from conformance.mutants.unchanged import UNCHANGED
from conformance.programs.registry import preloads_of
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.profile import in_profile
from conformance.subjects.subject import KNOWN, Subject
from conformance.suite import load_scenarios
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

#: What is about the class, and one training.
SAMPLE = ("CONS-24", "COMPAT-06", "COMPAT-07", "GRAD-01")
#: Programs that are about the class: they derive one from it, read its documentation, or look for what its package
#: offers for it. What holds a DDP has a class of its own, which may keep these promises or not.
ABOUT_THE_CLASS = {"derived_wrapper", "documented_names", "replicated_views", "recognised_wrapper"}
#: So are these: torch's join context and its checkpoints ask for an instance of their own classes, a DDP's package has
#: a normalisation for classes that derive from it, and who holds a DDP in a circle does not drop it.
ASK_FOR_AN_INSTANCE = {"JOIN-27", "COPY-13", "COMPAT-13", "GRAD-42"}


def scenarios() -> tuple[Scenario, ...]:
    cheapest = one_per_requirement(in_profile("full", load_scenarios(), load_catalogue()))
    return tuple(one for one in cheapest if one.chapter != "training")


@pytest.fixture(scope="module")
def controller(zygote: ZygoteProcess) -> Iterator[Controller]:
    with Controller(get_backend("gloo"), preload=preloads_of(scenarios()), zygote=zygote) as controller:
        yield controller


def verdicts(subject: Subject, controller: Controller, chosen: tuple[Scenario, ...]) -> dict[str, str]:
    runner = ScenarioRunner(subject, get_backend("gloo"), controller, native=False)
    return {one.id: runner.run(one).subject.verdict.value for one in chosen}


def is_about_the_class(scenario: Scenario) -> bool:
    return scenario.program in ABOUT_THE_CLASS or not ASK_FOR_AN_INSTANCE.isdisjoint(scenario.requirements)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("base", UNCHANGED)
def test_who_changes_nothing_gets_the_verdicts_of_its_base(controller: Controller, base: str, *, whole: bool) -> None:
    chosen = tuple(one for one in scenarios() if whole or one.id.split("/")[1] in SAMPLE)
    assert len(chosen) >= len(SAMPLE)
    expected = verdicts(KNOWN[base], controller, chosen)
    for name in UNCHANGED[base] if whole else UNCHANGED[base][:1]:
        unchanged = replace(KNOWN[base], name=name, target=f"conformance.mutants.unchanged:{name}")
        comparable = tuple(one for one in chosen if "Composed" not in name or not is_about_the_class(one))
        came = verdicts(unchanged, controller, comparable)
        assert came == {one.id: expected[one.id] for one in comparable}, name
