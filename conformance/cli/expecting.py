"""Reads the file given to `--expectations` and marks the outcomes that it excuses."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from conformance.errors import ExpectationError
from conformance.report.stored_report import StoredReport
from conformance.run.known_failures import Circumstances, Expectation, check_names, expected, read_expectations
from conformance.run.outcome import Outcome
from conformance.scenario import Scenario
from conformance.verdict import Verdict


def read_file(path: Path) -> tuple[Expectation, ...]:
    """Return the entries of an expectations file; raises `ExpectationError`, which names the file."""
    try:
        return read_expectations(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ExpectationError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, ExpectationError) as error:
        raise ExpectationError(f"{path}: {error}") from error


def expecting(path: Path, scenarios: Iterable[Scenario], circumstances: Circumstances) -> Callable[[Outcome], Outcome]:
    """Return a function that adds to an outcome what the file says about its scenario.

    `scenarios` are all scenarios of the suite, selected or not. Raises `ExpectationError` when an entry matches none of
    them, or when two entries apply to one scenario; that is before any scenario runs.
    """
    entries = read_file(path)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    scenarios = tuple(scenarios)
    try:
        check_names(entries, {scenario.id: scenario.world_size for scenario in scenarios})
        for scenario in scenarios:
            expected(entries, circumstances, today, scenario.id, scenario.world_size, Verdict.PASS)
    except ExpectationError as error:
        raise ExpectationError(f"{path}: {error}") from error

    def expect(outcome: Outcome) -> Outcome:
        one, verdict = outcome.scenario, outcome.result.verdict
        return replace(outcome, expected=expected(entries, circumstances, today, one.id, one.world_size, verdict))

    return expect


def circumstances_of(report: StoredReport) -> Circumstances:
    """Return the circumstances of a finished run, read from its report; imports neither its subject nor its backend."""
    device = str(report.environment.get("device_type", ""))
    return Circumstances(report.subject.name, report.backend, device, report.package_version("torch"))
