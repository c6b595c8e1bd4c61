"""Prints a comparison for people, and writes it as JSON for machines."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.errors import ReportError
from conformance.upstream.comparison import Comparison, Row
from conformance.upstream.outcome import TestOutcome, TestRun

SCHEMA_VERSION = 1


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print what differs between the two DDPs, and the counts of both."""
    subject = comparison.subject
    missing = [(row, row.subject.explanation) for row in comparison.missing]
    ahead = [(row, row.native.explanation) for row in comparison.ahead]
    excluded = [
        (row, row.exclusion + (" (passed all the same)" if row.subject.outcome is TestOutcome.PASSED else ""))
        for row in comparison.excluded
    ]
    _print_rows(console, f"Passed by torch's DDP and not by {subject}", missing)
    _print_rows(console, f"Passed by {subject} and not by torch's DDP", ahead)
    _print_rows(console, "Excluded", excluded)
    console.print(_counts("torch's DDP", [row.native for row in comparison.rows]))
    console.print(_counts(subject, [row.subject for row in comparison.rows]))
    num_passed = len(comparison.counted) - len(comparison.missing)
    rest = f"; {len(excluded)} excluded" if excluded else ""
    console.print(f"Of {len(comparison.counted)} tests that torch's DDP passes, {subject} passes {num_passed}{rest}.")


def prepare_report(path: Path) -> None:
    """Check that `path` can be written before the run starts, and empty it, so that an old report cannot be mistaken.

    Raises:
        ReportError: it cannot.

    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; nothing was run. Name another --report") from error


def write_comparison(path: Path, comparison: Comparison, environment: Mapping[str, Any]) -> None:
    """Write all results of every test to `path`, with the `environment` in which they ran; raises `ReportError`."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "subject": comparison.subject,
        "conforms": comparison.conforms,
        "counts": {
            "tests": len(comparison.rows),
            "passed_by_torch": sum(row.native.outcome is TestOutcome.PASSED for row in comparison.rows),
            "passed_by_subject": sum(row.subject.outcome is TestOutcome.PASSED for row in comparison.rows),
            "excluded": len(comparison.excluded),
            "missing": len(comparison.missing),
            "ahead": len(comparison.ahead),
        },
        "tests": [_row_data(row) for row in comparison.rows],
    }
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from error


def _row_data(row: Row) -> dict[str, Any]:
    return {
        "test": str(row.name),
        "world_size": row.native.world_size,
        "counts": row.counts,
        "exclusion": row.exclusion or None,
        "torch": _run_data(row.native),
        "subject": _run_data(row.subject),
    }


def _run_data(run: TestRun) -> dict[str, Any]:
    return {
        "outcome": run.outcome,
        "seconds": round(run.seconds, 3),
        "explanation": run.explanation,
        "ranks": [
            {"rank": end.rank, "outcome": end.outcome, "constructed": end.num_constructed, "detail": end.detail}
            for end in run.ends
        ],
    }


def _print_rows(console: Console, title: str, rows: Sequence[tuple[Row, str]]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, expand=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    for row, text in rows:
        table.add_row(Text(f"{row.name}\n").append(f"{row.native.world_size} ranks", style="dim"), text)
    console.print(title, style="bold")
    console.print(table)
    console.print()


def _counts(who: str, runs: list[TestRun]) -> str:
    counts = Counter(run.outcome for run in runs)
    others = ", ".join(
        f"{counts[outcome]} {outcome}" for outcome in TestOutcome if counts[outcome] and outcome != "passed"
    )
    return f"{who}: {counts[TestOutcome.PASSED]} of {len(runs)} passed" + (f" ({others})" if others else "")
