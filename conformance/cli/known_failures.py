"""Known failures at the command line: reads the file, and says of an outcome what was known of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.errors import KnownFailureError
from conformance.run.baseline import ALONE, Baseline, check_baseline, is_baseline, read_baseline, shipped_baseline
from conformance.run.environment import package_version
from conformance.run.known_failures import (
    Circumstances,
    Excuse,
    Excuses,
    KnownFailure,
    check_names,
    excuse_for,
    read_known_failures,
)
from conformance.run.outcome import NATIVE
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.verdict import ScenarioResult, Verdict

if TYPE_CHECKING:
    from conformance.backends.backend import Backend
    from conformance.subjects.subject import Subject


def read_file(path: Path) -> tuple[KnownFailure, ...]:
    """Return the entries of a file of known failures; raises `KnownFailureError` naming the file."""
    try:
        return read_known_failures(_text_of(path))
    except KnownFailureError as error:
        raise KnownFailureError(f"{path}: {error}") from error


def excuses_from(path: Path, scenarios: Iterable[Scenario], circumstances: Circumstances) -> Excuses:
    """Return a function that says what the file knows of a scenario.

    `scenarios` are all that exist, selected or not. Raises `KnownFailureError` before anything runs when an entry names
    none of them, or when two entries apply to one.
    """
    scenarios = tuple(scenarios)
    if is_baseline(text := _text_of(path)):
        return excuses_of(_baseline_in(path, text, scenarios), circumstances)
    known = read_file(path)
    today = datetime.datetime.now(tz=datetime.UTC).date()

    def meeting(scenario: Scenario, verdict: Verdict) -> Excuse | None:
        return excuse_for(known, circumstances, today, scenario.id, scenario.world_size, verdict)

    try:
        check_names(known, {scenario.id: scenario.world_size for scenario in scenarios})
        for scenario in scenarios:
            meeting(scenario, Verdict.PASS)
    except KnownFailureError as error:
        raise KnownFailureError(f"{path}: {error}") from error
    return lambda scenario, result: meeting(scenario, result.verdict)


def excuses_of(baseline: Baseline, circumstances: Circumstances) -> Excuses:
    """Return what `baseline` knows; raises `KnownFailureError` if the DDP under test is not torch's."""
    if circumstances.subject != NATIVE and not circumstances.without_ddp:
        raise KnownFailureError(
            f"a baseline says what torch's own DDP breaks; it goes with --ddp torch, got --ddp {circumstances.subject}."
            " For other DDPs write down what is known of them: docs/known_failures.md"
        )
    return baseline.excuse


def shipped_excuses(circumstances: Circumstances) -> Excuses:
    """Return what the shipped baselines know: that over gloo, and on a device that is no CPU also that over sim.

    Where a backend is tried by itself, what gloo breaks by itself.
    """
    if circumstances.without_ddp:
        return excuses_of(shipped_baseline(circumstances.torch, ALONE), circumstances)
    excuses = [excuses_of(shipped_baseline(circumstances.torch), circumstances)]
    if circumstances.device != "cpu":
        excuses.append(excuses_of(shipped_baseline(circumstances.torch, "sim"), circumstances))
    return either(*excuses)


def either(*several: Excuses) -> Excuses:
    """Return the first excuse that one of `several` has."""

    def excuse(scenario: Scenario, result: ScenarioResult) -> Excuse | None:
        return next((found for one in several if (found := one(scenario, result)) is not None), None)

    return excuse


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise KnownFailureError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KnownFailureError(f"{path}: {error}") from error


def _baseline_in(path: Path, text: str, scenarios: Iterable[Scenario]) -> Baseline:
    try:
        baseline = read_baseline(text)
        check_baseline(baseline, (scenario.id for scenario in scenarios))
    except KnownFailureError as error:
        raise KnownFailureError(f"{path}: {error}") from error
    return baseline


def circumstances_here(subject: Subject, backend: Backend) -> Circumstances:
    """Return the circumstances of a run of `subject` over `backend` on this machine."""
    torch = package_version("torch")
    return Circumstances(subject.name, backend.name, backend.device_type, torch, without_ddp=not subject.is_ddp)


def circumstances_of(report: Report) -> Circumstances:
    """Return the circumstances of a finished run; nothing that the report names is imported."""
    device = str(report.environment.get("device_type", ""))
    torch = report.package_version("torch")
    return Circumstances(report.subject.name, report.backend, device, torch, without_ddp=report.is_about_backend)
