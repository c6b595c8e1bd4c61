"""ddp_impl on the simulated device: the cheapest scenario of each requirement about devices, a third of them by day."""

from collections.abc import Iterator

import pytest

from conformance.backends.backend import get_backend
from conformance.programs.registry import preloads_of
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.profile import in_profile
from conformance.subjects.subject import get_subject
from conformance.suite import load_scenarios
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

CHEAPEST = one_per_requirement(in_profile("gpu", load_scenarios(), load_catalogue()))
#: Every run takes each third one; the nightly job takes them all.
BY_DAY = CHEAPEST[::3]


@pytest.fixture(scope="module")
def runner(zygote: ZygoteProcess) -> Iterator[ScenarioRunner]:
    sim = get_backend("sim")
    with Controller(sim, preload=preloads_of(CHEAPEST), zygote=zygote) as controller:
        yield ScenarioRunner(get_subject("ddp_impl"), sim, controller, native=False)


@pytest.mark.timeout(1800)  # of the first on a machine: the device is compiled
@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, id=one.id, marks=() if one in BY_DAY else pytest.mark.nightly) for one in CHEAPEST],
)
def test_ddp_impl_keeps_what_is_promised_on_a_device(runner: ScenarioRunner, scenario: Scenario) -> None:
    result = runner.run(scenario).subject
    assert result.verdict is Verdict.PASS, result.summary
