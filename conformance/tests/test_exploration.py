"""Random trainings: the same for a seed, found where a DDP is wrong, and shrunk to the simplest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from conformance.backends.backend import get_backend
from conformance.cli import main
from conformance.run.exploration import MODELS, REQUIREMENT, Exploration, explore
from conformance.run.outcome import Outcome
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario, Step
from conformance.spec.catalogue import load_catalogue
from conformance.subjects.subject import get_subject
from conformance.verdict import ScenarioResult, Verdict
from conformance.workers.controller import Controller

#: Its docstring says what is wrong with it.
NO_DIVISION = "conformance.chapters.gradients.mutants:NoDivision"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Controller]:
    with Controller(get_backend("gloo")) as controller:
        yield controller


class Imagined(ScenarioRunner):
    """Judges without running: `verdict_of` says what comes of a scenario."""

    def __init__(self, verdict_of: dict[str, Verdict]) -> None:
        self.verdict_of = verdict_of
        self.seen: list[Scenario] = []

    def run(self, scenario: Scenario) -> Outcome:
        """Look the model up."""
        self.seen.append(scenario)
        verdict = self.verdict_of.get(scenario.model, Verdict.PASS)
        return Outcome.of(scenario, ScenarioResult("imagined", verdict, 1.0, 1, (), ()), warm=True)


def scenario_of(found: Exploration) -> Scenario:
    """Return the scenario that failed, which must have been kept for replay."""
    assert found.failure is not None
    assert found.failure.replay is not None
    return Scenario.from_json(found.failure.replay)


def test_what_is_explored_belongs_to_a_requirement() -> None:
    assert REQUIREMENT in load_catalogue()


def test_a_seed_gives_the_same_trainings_and_another_one_others() -> None:
    drawn = []
    for seed in (5, 5, 6):
        imagined = Imagined({})
        explore(imagined, examples=20, seed=seed)
        drawn.append([scenario.id for scenario in imagined.seen])
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_simplest_failure_is_found() -> None:
    found = explore(Imagined({"gpt": Verdict.HANG}), examples=300, seed=0)
    smallest = scenario_of(found)
    assert (smallest.model, smallest.world_size, smallest.schedule) == ("gpt", 1, (Step(zero_grad="none"),))
    assert not smallest.options


def test_what_cannot_be_judged_is_counted_and_no_pass() -> None:
    everything = Imagined(dict.fromkeys(MODELS, Verdict.UNSUPPORTED))
    found = explore(everything, examples=10, seed=0)
    assert found == Exploration(0, 0, found.num_not_judged, None)
    assert found.num_not_judged >= 10


def test_a_ddp_that_does_not_divide_is_found_out(ranks: Controller) -> None:
    runner = ScenarioRunner(get_subject(NO_DIVISION), get_backend("gloo"), ranks, native=False)
    found = explore(runner, examples=30, seed=1, world_sizes=(1, 2))
    smallest = scenario_of(found)
    assert found.always_fails
    assert smallest.world_size == 2, "alone nothing is divided"
    assert len(smallest.schedule) == 1
    assert not smallest.options


def test_our_own_is_right(ranks: Controller) -> None:
    runner = ScenarioRunner(get_subject("ddp_impl"), get_backend("gloo"), ranks, native=False)
    found = explore(runner, examples=25, seed=2, world_sizes=(1, 2))
    assert found.failure is None
    assert found.num_judged >= 20


def test_a_ddp_that_is_none_is_a_mistake_in_the_question() -> None:
    result = CliRunner().invoke(main, ["explore", "--ddp", "json:loads", "--examples", "1", "--world-size", "1"])
    assert result.exit_code == 2, result.output
    assert "cannot be constructed around a small MLP" in result.output
