"""The truth is computed where the ranks compute: by their kernels, in a process that no subject enters."""

import pathlib
from collections.abc import Iterator
from functools import partial
from typing import Never

import pytest
import torch

from conformance.backends.backend import get_backend
from conformance.errors import ReplicaError
from conformance.observation import Facts
from conformance.programs.registry import get_program
from conformance.programs.replica import expect
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.subjects.subject import get_subject
from conformance.suite import load_scenarios
from conformance.truth.carried import packed, unpacked
from conformance.truth.difference import difference
from conformance.truth.expected import Raises, Right, Satisfies
from conformance.verdict import Verdict
from conformance.waiting import loop
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

OTHER_KERNELS = "fixtures.other_kernels:BACKEND"
ROUNDED = (
    "gradients/GRAD-01/cnn-world2",
    "gradients/GRAD-01/mlp-world2",
    "training/TRAIN-17/many-small-layers-float64-world2",
)


@pytest.fixture(scope="module")
def ranks(zygote: ZygoteProcess) -> Iterator[Controller]:
    with Controller(get_backend(OTHER_KERNELS), zygote=zygote) as controller:
        yield controller


def scenario(scenario_id: str) -> Scenario:
    return next(one for one in load_scenarios() if one.id == scenario_id)


def here(one: Scenario) -> dict[int, Facts]:
    expectation = get_program(one.program).expectation
    assert expectation is not None
    return dict(expectation(one))


@pytest.mark.nightly
@pytest.mark.parametrize("scenario_id", ROUNDED)
def test_ranks_with_other_kernels_conform(ranks: Controller, scenario_id: str) -> None:
    runner = ScenarioRunner(get_subject("torch"), get_backend(OTHER_KERNELS), ranks, native=False)
    result = runner.run(scenario(scenario_id)).subject
    assert result.verdict is Verdict.PASS, result.findings


@pytest.mark.nightly
def test_the_kernels_are_others(ranks: Controller) -> None:
    """Without this the test above could not fail."""
    differing = [one for one in ROUNDED if difference(here(scenario(one)), dict(loop.run(ranks.expect, scenario(one))))]
    assert differing


def test_an_expectation_that_raises_is_the_harness_s_failure(ranks: Controller) -> None:
    wrong = scenario(ROUNDED[0]).replace(dtype="complex64")
    with pytest.raises(ReplicaError, match="has dtypes"):
        loop.run(ranks.expect, wrong)
    assert loop.run(ranks.expect, scenario(ROUNDED[0]))[0]


def test_truths_that_are_asked_for_at_once_do_not_disturb_each_other(ranks: Controller) -> None:
    both = [scenario(name) for name in ROUNDED[:2]]
    found = loop.run(loop.together, *(partial(ranks.expect, one) for one in both))
    assert [one[0].keys() for one in found] == [here(one)[0].keys() for one in both]


def test_what_is_asked_of_a_backend_alone_needs_no_rank_and_no_device() -> None:
    def nobody(one: Scenario) -> Never:
        raise AssertionError

    kinds: set[type] = set()
    for one in load_scenarios():
        if get_program(one.program).without_ddp:
            for facts in loop.run(expect, one, nobody).values():
                kinds |= {type(value) for value in facts.values()}
    assert kinds == {Raises, Right}


def is_small(value: int, most: int, least: int = 1) -> bool:
    return least <= value <= most


def test_expected_facts_travel_whole() -> None:
    shared = torch.ones(2)
    facts = {
        0: {"a": shared, "b": [shared, None], "c": Satisfies("small", is_small, (3,)), "d": Raises(("ValueError",))}
    }
    came = unpacked(packed(facts))[0]
    assert came["a"] is came["b"][0]
    assert torch.equal(came["a"], shared)
    assert [came["c"].mismatch(value) is None for value in (0, 1, 3, 4)] == [False, True, True, False]
    assert came["d"] == Raises(("ValueError",))


@pytest.mark.parametrize(
    "data",
    [
        ["named", "os", "system"],
        ["function", "os", 0, None, None],
        ["function", "conformance.truth.carried", 10_000, None, None],
        ["record", "conformance.workers.controller", "Controller"],
        ["record", "conformance.truth.expected", "Raises", "too", "many", "fields"],
        ["enum", "conformance.truth.expected", "Raises", "x"],
        ["torch", "load"],
        ["tensor", 1],
        ["exec", "1"],
        [],
    ],
    ids=str,
)
def test_data_that_no_replica_writes_build_nothing(data: object) -> None:
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError)):
        unpacked({"tensors": [], "rest": data})


def test_what_this_package_does_not_define_is_no_expected_fact() -> None:
    for value in (pathlib.Path("x"), object(), pathlib.Path, 1j, Satisfies("any", lambda value: True)):
        with pytest.raises(TypeError):
            packed({0: {"a": value}})
