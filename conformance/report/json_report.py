"""The report folder: `report.json` for machines, and one scenario file per failure for replay.

report/report.json               everything that the run found (`schema_version` says how it is laid out)
report/failures/<scenario>.json  the scenario, for `ddp-conformance replay`
report/failures/<scenario>.txt   why it failed, as the terminal shows it
report/SHA256SUMS                checksums of all of it, after a certified run
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.errors import ReportError
from conformance.report.failure import failure_path, failure_text, replay_command
from conformance.run.known_failures import Expected
from conformance.run.outcome import Outcome, RequirementSummary, RunReport, counts, is_failure
from conformance.spec.catalogue import Catalogue
from conformance.verdict import ScenarioResult

SCHEMA_VERSION = 1
CHECKSUMS = "SHA256SUMS"


def prepare_folder(folder: Path) -> None:
    """Create the report folder and show that it can be written, before a run is spent on it.

    `report.json` and the failures of an earlier run are removed, so that nothing old can pass for a result of this run.

    Raises:
        ReportError: the folder cannot be created, is a file, or cannot be written.

    """
    try:
        (folder / "failures").mkdir(parents=True, exist_ok=True)
        stale = [path for path in (folder / "failures").iterdir() if path.suffix in (".json", ".txt")]
        for path in [folder / "report.json", folder / CHECKSUMS, *stale]:
            path.unlink(missing_ok=True)
        with tempfile.TemporaryFile(dir=folder), tempfile.TemporaryFile(dir=folder / "failures"):
            pass
    except OSError as error:
        raise ReportError(
            f"cannot write reports to {folder}: {error.strerror}; nothing was run. Choose another folder with --report"
        ) from error


def write_report(report: RunReport, catalogue: Catalogue, folder: Path) -> Path:
    """Write the report into `folder` and return the path of `report.json`; raises `ReportError`."""
    try:
        (folder / "failures").mkdir(parents=True, exist_ok=True)
        for outcome in report.failures:
            path = failure_path(folder, outcome.scenario)
            path.write_text(outcome.scenario.dumps(), encoding="utf-8")
            replay = replay_command(outcome.scenario, report.subject, report.backend, folder)
            text = failure_text(outcome, report.backend, catalogue, replay)
            path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
        path = folder / "report.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report_to_json(report, catalogue), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)  # a reader never sees half a report
    except OSError as error:
        raise ReportError(f"cannot write the report to {folder}: {error.strerror}") from error
    return path


def report_to_json(report: RunReport, catalogue: Catalogue) -> dict[str, Any]:
    """Return the report as plain JSON data."""
    summaries = report.summaries(catalogue)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": "ddp-conformance",
        "complete": report.complete,
        "interrupted": report.interrupted,
        "certified": report.assignment.certified,
        "green": report.is_green,
        "subject": {"name": report.subject, "target": report.subject_target},
        "backend": report.backend,
        "environment": dict(report.environment),
        "duration_s": round(report.duration_s, 3),
        "median_warm_scenario_ms": {str(size): round(ms, 3) for size, ms in report.median_warm_ms().items()},
        "selection": {
            "profile": report.assignment.profile,
            "shard": report.assignment.shard,
            "ids": list(report.assignment.ids),
            "order": report.assignment.order.name,
            "seed": report.assignment.order.seed,
        },
        "totals": {
            "selected": report.num_selected,
            "scenarios": len(report.outcomes),
            "requirements": len(summaries),
            "subject": counts(report.totals),
            "native": counts(report.native_totals),
        },
        "requirements": [_requirement_to_json(summary) for summary in summaries],
        "scenarios": [_outcome_to_json(outcome) for outcome in report.outcomes],
        "performance": [asdict(ratio) for ratio in report.performance],
    }


def _requirement_to_json(summary: RequirementSummary) -> dict[str, Any]:
    native = summary.native_verdict
    return {
        "id": summary.requirement.id,
        "chapter": summary.requirement.chapter,
        "level": summary.requirement.level,
        "statement": summary.requirement.statement,
        "scenarios": summary.num_scenarios,
        "subject": summary.verdict.value,
        "native": native.value if native is not None else None,
    }


def _outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    scenario = outcome.scenario
    return {
        "id": scenario.id,
        "requirements": list(scenario.requirements),
        "world_size": scenario.world_size,
        "seed": scenario.seed,
        "sha256": scenario.digest,
        "warm": outcome.warm,
        "notes": [{**asdict(note), "value": _finite(note.value)} for note in outcome.notes],
        "subject": _result_to_json(outcome.result),
        "native": _result_to_json(outcome.native) if outcome.native is not None else None,
        "expectation": _expected_to_json(outcome.expected) if outcome.expected is not None else None,
        "replay": scenario.to_json() if is_failure(outcome) else None,
    }


def _expected_to_json(expected: Expected) -> dict[str, Any]:
    known = expected.expectation
    return {
        "status": expected.status,
        "verdict": known.verdict.value,
        "reason": known.reason,
        "issue": known.issue,
        "expires": known.expires.isoformat(),
    }


def _finite(value: float) -> float | str:
    """Return `value`, or its name when it is a number that JSON cannot hold."""
    return value if math.isfinite(value) else str(value)


def _result_to_json(result: ScenarioResult) -> dict[str, Any]:
    return {
        "subject": result.subject,
        "verdict": result.verdict.value,
        "duration_ms": round(result.duration_ms, 3),
        "num_collectives": result.num_collectives,
        "findings": [{**asdict(finding), "verdict": finding.verdict.value} for finding in result.findings],
        "ranks": [asdict(rank) for rank in result.ranks],
    }
