"""A DDP that does things in ways of its own, which no requirement forbids, is not judged to be wrong for them."""

from collections.abc import Iterator

import pytest

from conformance.backends.backend import get_backend
from conformance.run.scenario_runner import ScenarioRunner
from conformance.suite import load_scenarios
from conformance.tests.peculiar_ddps import SUBJECTS
from conformance.verdict import ScenarioResult
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

SCENARIOS = {scenario.id: scenario for scenario in load_scenarios()}


@pytest.fixture(scope="module")
def controller(zygote: ZygoteProcess) -> Iterator[Controller]:
    with Controller(get_backend("gloo"), zygote=zygote) as controller:
        yield controller


def run(controller: Controller, subject: str, where: str) -> ScenarioResult:
    runner = ScenarioRunner(SUBJECTS[subject], get_backend("gloo"), controller, native=False)
    return runner.run(SCENARIOS[where]).subject


@pytest.mark.parametrize(
    ("subject", "where"),
    [
        ("HooksTensors", "gradients/GRAD-01/mlp-world2"),
        ("OwnGroup", "gradients/GRAD-01/mlp-world2"),
        ("SharesAThread", "compatibility/COMPAT-12/used-world2"),
        ("SharesAThread", "compatibility/COMPAT-12/freed-world2"),
        ("SharesAThread", "gradients/GRAD-01/mlp-world3"),
        ("SharesAGroup", "compatibility/COMPAT-12/used-world2"),
        ("SharesAGroup", "gradients/GRAD-01/mlp-world3"),
        ("AlwaysLooks", "unused/UNUSED-05/detached-world2"),
        ("NeverLooks", "unused/UNUSED-05/detached-world2"),
        ("OwnErrors", "construction/CONS-04/shape-world2"),
        ("OwnErrors", "construction/CONS-06/dtype-world2"),
        ("OwnErrors", "construction/CONS-08/all-frozen-world2"),
        ("OwnErrors", "construction/CONS-12/function-world2"),
        ("OwnErrors", "construction/CONS-13/lazy-world2"),
        ("Flattens", "construction/CONS-17/identity-world2"),
        ("AgreesAtFirst", "buffers/BUFFER-09/no-buffers-world2"),
        ("GathersBytes", "buffers/BUFFER-10/announced-world2"),
    ],
)
def test_what_is_not_forbidden_is_not_judged(controller: Controller, subject: str, where: str) -> None:
    result = run(controller, subject, where)
    assert result.verdict.value == "PASS", result.summary


def test_what_every_wrapper_keeps_is_a_failure(controller: Controller) -> None:
    result = run(controller, "StartsAThread", "compatibility/COMPAT-12/used-world2")
    assert (result.verdict.value, result.broken) == ("FAIL", ("COMPAT-12",))
    assert "thread left behind" in result.summary


@pytest.mark.parametrize(("subject", "verdict"), [("Flattens", "PASS"), ("StartsAThread", "FAIL")])
def test_a_ddp_is_not_blamed_for_the_threads_of_the_backend(zygote: ZygoteProcess, subject: str, verdict: str) -> None:
    lazy = get_backend("conformance.tests.lazy_pool:LAZY_POOL")
    with Controller(lazy, zygote=zygote) as controller:
        runner = ScenarioRunner(SUBJECTS[subject], lazy, controller, native=False)
        result = runner.run(SCENARIOS["compatibility/COMPAT-12/used-world2"]).subject
    assert result.verdict.value == verdict, result.summary
    assert "worker of the pool" not in result.summary


def test_agreeing_once_is_excepted_and_no_more(controller: Controller) -> None:
    result = run(controller, "AgreesTwice", "buffers/BUFFER-09/no-buffers-world2")
    assert result.verdict.value == "FAIL"
    assert "agreements" in result.summary


@pytest.mark.timeout(1800)  # of its first run: the device is compiled
def test_a_ddp_without_the_option_device_ids_can_be_judged_on_a_device(zygote: ZygoteProcess) -> None:
    sim = get_backend("sim")
    with Controller(sim, zygote=zygote) as controller:
        runner = ScenarioRunner(SUBJECTS["NeverLooks"], sim, controller, native=False)
        result = runner.run(SCENARIOS["gradients/GRAD-01/mlp-world2"]).subject
    assert result.verdict.value == "PASS", result.summary
