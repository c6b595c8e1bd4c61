"""Known failures at the command line: reads the file, and says of an outcome what was known of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

from conformance.errors import KnownFailureError
from conformance.run.known_failures import (
    Circumstances,
    Excuse,
    Excuses,
    KnownFailure,
    check_names,
    excuse_for,
    read_known_failures,
)
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.verdict import Verdict


def read_file(path: Path) -> tuple[KnownFailure, ...]:
    """Return the entries of a file of known failures; raises `KnownFailureError` naming the file."""
    try:
        return read_known_failures(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise KnownFailureError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, KnownFailureError) as error:
        raise KnownFailureError(f"{path}: {error}") from error


def excuses_from(path: Path, scenarios: Iterable[Scenario], circumstances: Circumstances) -> Excuses:
    """Return a function that says what the file knows of a scenario.

    `scenarios` are all that exist, selected or not. Raises `KnownFailureError` before anything runs when an entry names
    none of them, or when two entries apply to one.
    """
    known = read_file(path)
    today = datetime.datetime.now(tz=datetime.UTC).date()

    def excuse(scenario: Scenario, verdict: Verdict) -> Excuse | None:
        return excuse_for(known, circumstances, today, scenario.id, scenario.world_size, verdict)

    scenarios = tuple(scenarios)
    try:
        check_names(known, {scenario.id: scenario.world_size for scenario in scenarios})
        for scenario in scenarios:
            excuse(scenario, Verdict.PASS)
    except KnownFailureError as error:
        raise KnownFailureError(f"{path}: {error}") from error
    return excuse


def circumstances_of(report: Report) -> Circumstances:
    """Return the circumstances of a finished run; nothing that the report names is imported."""
    device = str(report.environment.get("device_type", ""))
    return Circumstances(report.subject.name, report.backend, device, report.package_version("torch"))
