"""Subjects that do to their process what no DDP should: each gets its verdict, and the scenarios after it theirs.

Every run takes a sample; the nightly job takes them all.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hostile_subjects import AT_IMPORT, HOSTILE, SEED

from conformance.backends.backend import get_backend
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario, Step
from conformance.subjects.subject import Subject
from conformance.verdict import Verdict
from conformance.workers.controller import Controller

TRAIN = Scenario("gradients/GRAD-01/hostile", ("GRAD-01",), "train", schedule=(Step(), Step()), deadline_s=3.0)
#: What runs after the scenario in which the subject misbehaves; torch's DDP, which it is otherwise, passes them all.
AFTER = (
    TRAIN.replace(id="gradients/GRAD-01/after-1"),
    TRAIN.replace(id="gradients/GRAD-01/after-2", model="moe", options={"find_unused_parameters": True}),
    TRAIN.replace(id="gradients/GRAD-01/after-3", seed=7, schedule=(Step(local_backwards=1), Step())),
    TRAIN.replace(id="gradients/GRAD-01/after-4", options={"gradient_as_bucket_view": True}),
    TRAIN.replace(id="gradients/GRAD-01/after-5", world_size=1),
)
SAMPLE = (
    "patches_all_reduce", "adds_saved_tensor_hooks", "exits_without_streams", "stops_itself", "raises_without_text",
    "child", "closes_the_connection", "flight_record_is_a_pipe",
)  # fmt: skip
#: What a module may do to its process when it is imported without any harm to its verdicts, and what it may not.
SAMPLE_AT_IMPORT = ("standard_error", "exits_0", "closes_everything")


def _named(sample: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in sample else pytest.mark.nightly) for name in HOSTILE]


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    with Controller(get_backend("gloo")) as controller:
        yield controller


def test_there_are_many_of_them() -> None:
    assert len(HOSTILE) >= 60
    assert {*SAMPLE, *SAMPLE_AT_IMPORT} <= set(HOSTILE)


@pytest.mark.parametrize("name", _named(SAMPLE))
def test_a_hostile_subject_gets_its_verdict_and_spoils_no_other(controller: Controller, name: str) -> None:
    """Neither its own later scenarios, nor torch's DDP beside it in any of them."""
    runner = ScenarioRunner(Subject(name, f"hostile_subjects:{name}"), get_backend("gloo"), controller)
    hostile = runner.run(TRAIN.replace(seed=SEED))
    assert hostile.subject.verdict.value in HOSTILE[name].verdicts, hostile.subject.findings
    outcomes = [hostile, *map(runner.run, AFTER)]
    assert [one.native.verdict for one in outcomes if one.native] == [Verdict.PASS] * 6, outcomes
    assert [one.subject.verdict for one in outcomes[1:]] == [Verdict.PASS] * 5, outcomes
    assert [one.contaminated_by for one in outcomes] == [""] * 6


@pytest.mark.parametrize("name", _named(SAMPLE_AT_IMPORT))
def test_what_a_module_does_at_its_import_has_the_same_verdict_in_every_scenario(
    controller: Controller, name: str
) -> None:
    """It is part of the subject, which no other scenario is accused of, and no other subject suffers from."""
    runner = ScenarioRunner(Subject(name, f"hostile_subjects:{AT_IMPORT}{name}"), get_backend("gloo"), controller)
    outcomes = [runner.run(scenario) for scenario in (TRAIN, *AFTER[:2])]
    verdicts = {one.subject.verdict.value for one in outcomes}
    assert len(verdicts) == 1, outcomes
    assert verdicts <= {"PASS", *HOSTILE[name].verdicts}, outcomes
    assert [one.native.verdict for one in outcomes if one.native] == [Verdict.PASS] * 3, outcomes
    assert [one.contaminated_by for one in outcomes] == [""] * 3
