"""Runs every scenario as a pytest test: `pytest --pyargs conformance.test_chapters -n 2 -k buckets`.

Each process (with `-n`, each xdist worker) starts its own ranks, which rendezvous in a private folder. For a failed
scenario pytest prints its explanation and the replay command, not a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conformance.errors import ConformanceError
from conformance.run.order import Order
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.profile import about_ddps, in_profile
from conformance.suite import load_scenarios
from conformance.verdict import Verdict

if TYPE_CHECKING:  # a session that only collects imports no torch
    from conformance.backends.backend import Backend
    from conformance.run.known_failures import Excuses
    from conformance.run.scenario_runner import ScenarioRunner
    from conformance.subjects.subject import Subject

#: Hides warnings of torch about its own modules.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per scenario, ordered by pool of ranks."""
    if "scenario" in metafunc.fixturenames:
        order = Order(metafunc.config.getoption("--ddp-order"), metafunc.config.getoption("--ddp-seed"))
        scenarios = order.apply(selected_scenarios(metafunc.config))
        metafunc.parametrize("scenario", scenarios, ids=[scenario.id for scenario in scenarios])


def selected_scenarios(config: pytest.Config) -> tuple[Scenario, ...]:
    """Return the scenarios that our options choose; pytest's own choose among them. Raises `pytest.UsageError`."""
    scenarios = load_scenarios()
    try:
        if profile := config.getoption("--ddp-profile"):
            scenarios = in_profile(profile, scenarios, load_catalogue())
        else:
            scenarios = about_ddps(scenarios, load_catalogue())
    except ConformanceError as error:
        raise pytest.UsageError(str(error)) from error
    return one_per_requirement(scenarios) if config.getoption("--one-per-requirement") else scenarios


def _excuses(config: pytest.Config, subject: Subject, backend: Backend) -> Excuses:
    from conformance.cli.known_failures import circumstances_here, either, excuses_from, shipped_excuses

    circumstances = circumstances_here(subject, backend)
    given = []
    if file := config.getoption("--ddp-expectations"):
        given.append(excuses_from(Path(file), load_scenarios(), circumstances))
    if config.getoption("--ddp-baseline"):
        given.append(shipped_excuses(circumstances))
    return either(*given)


@pytest.fixture(scope="module")
def scenario_runner(request: pytest.FixtureRequest) -> Iterator[ScenarioRunner]:
    """Own the ranks of this process, and stop the session if the subject or backend is unusable."""
    from conformance.programs.registry import preloads_of
    from conformance.run.runner import check, probe
    from conformance.run.scenario_runner import ScenarioRunner
    from conformance.workers.controller import Controller
    from conformance.workers.finder import find_backend, find_subject

    mistake = ""
    if "" not in sys.path:
        sys.path.append("")  # a DDP or a backend may lie in the current folder, as for `ddp-conformance run`
    try:
        subject = find_subject(request.config.getoption("--ddp"))
        backend = find_backend(request.config.getoption("--ddp-backend"))
        excuses = _excuses(request.config, subject, backend)
        chosen = _chosen(request)
        check(chosen, backend)
        zygote = request.getfixturevalue("zygote")
        with Controller(backend, preload=preloads_of(chosen), zygote=zygote) as controller:
            probe(subject, 1, controller, backend.source or backend.name)
            native = not request.config.getoption("--ddp-no-native")
            yield ScenarioRunner(subject, backend, controller, native=native, excuses=excuses)
    except ConformanceError as error:
        mistake = str(error)
    if mistake:
        request.session.shouldfail = mistake  # every further test would say the same
        pytest.fail(mistake, pytrace=False)


def _chosen(request: pytest.FixtureRequest) -> tuple[Scenario, ...]:
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    given = [each.params.get("scenario") for each in parameters if each is not None]
    return tuple(each for each in given if isinstance(each, Scenario))


def test_scenario(scenario: Scenario, scenario_runner: ScenarioRunner) -> None:
    """The subject keeps what the scenario's requirements promise."""
    outcome = scenario_runner.run(scenario)
    if outcome.is_failure:
        from conformance.report.blame import blamed
        from conformance.report.causes import cause_of
        from conformance.report.failure import failure_text, run_command

        backend = scenario_runner.backend.source or scenario_runner.backend.name
        replay = run_command(scenario.id, scenario_runner.subject.typed, backend)
        # The first line is what pytest's summary shows: which requirement is broken, and how.
        statements = load_catalogue().statements
        first = f"{blamed(outcome)}: {cause_of(outcome, statements).title}"
        pytest.fail(f"{first}\n{failure_text(outcome, backend, load_catalogue(), replay)}", pytrace=False)
    if outcome.contaminated_by:
        pytest.fail(outcome.subject.findings[0].summary, pytrace=False)
    if outcome.subject.verdict.is_failure and outcome.expectation is not None:
        pytest.xfail(outcome.expectation.describe(outcome.subject.verdict))
    if outcome.subject.verdict in (Verdict.UNSUPPORTED, Verdict.UNKNOWN):
        reasons = "; ".join(finding.summary for finding in outcome.subject.findings)
        pytest.skip(f"{outcome.subject.verdict.value}: {reasons}")
