"""Which run a page shows, in a few words."""

from __future__ import annotations

from conformance.report.markdown import as_code, as_text
from conformance.run.report import Report


def run_text(report: Report) -> str:
    """Return which DDP was run on which backend, with which torch, when, and by which profile."""
    names = (report.subject.name, report.backend, report.package_version("torch"))
    profile = f"profile {report.selection.profile}" if report.selection.profile else "a selection"
    date = as_text(str(report.environment.get("date", "an unknown day")))
    return "{} on {} with torch {}, {}, {}".format(*map(as_code, names), date, as_text(profile))
