"""Results over time: stored reports as pages, one for each DDP on a backend or backend alone, and a badge for each."""

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.checkers.explanation import counted
from conformance.errors import ReportError
from conformance.report.headline import badge_svg, headline
from conformance.report.markdown import as_text
from conformance.report.read import read_report
from conformance.run.report import Report
from conformance.verdict import Verdict

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_MOST_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Stored:
    """A report and the day of its run."""

    date: datetime.date
    report: Report

    @property
    def name(self) -> str:
        """What was judged, as a file's name."""
        return re.sub(r"[^\w.-]+", "_", self.report.tested.replace(" over ", "-"))

    @property
    def column(self) -> str:
        """The day, the profile and the version of torch."""
        profile = self.report.selection.profile or "a selection"
        return f"{self.date.isoformat()} {profile}, torch {self.report.package_version('torch')}"


def stored_reports(folders: Iterable[Path]) -> tuple[Stored, ...]:
    """Return the reports below `folders`, the oldest first; raises `ReportError` for none, and for one without date."""
    places = sorted({file.parent for folder in folders for file in folder.rglob("report.json*")})
    if not places:
        raise ReportError("there is no report.json below the given folders: `ddp-conformance run --report FOLDER`")
    stored = [Stored(_date_of(report, place), report) for place in places for report in [read_report(place)]]
    return tuple(sorted(stored, key=lambda one: (one.date, one.name, one.column)))


def _date_of(report: Report, place: Path) -> datetime.date:
    told = _DATE.findall(str(report.environment.get("date", ""))) or _DATE.findall(place.as_posix())
    try:
        return datetime.date.fromisoformat(told[-1])
    except (IndexError, ValueError) as error:
        raise ReportError(f"{place} has no date: store it in a folder that is called by it, as 2026-11-21") from error


def results_pages(stored: Sequence[Stored]) -> Mapping[str, str]:
    """Return the pages in Markdown and the badges in SVG by path; `stored` is ordered by date."""
    by_name: dict[str, list[Stored]] = {}
    for one in stored:
        by_name.setdefault(one.name, []).append(one)
    pages = {"index.md": _index(by_name)}
    for name, history in by_name.items():
        pages[f"{name}.md"] = _page(name, history, stored)
        pages[f"{name}.svg"] = badge_svg(history[-1].report)
    return pages


def _index(by_name: Mapping[str, Sequence[Stored]]) -> str:
    lines = ["# Results"]
    for judged, alone in (("DDP over a backend", False), ("backend by itself", True)):
        rows = [
            f"| [{as_text(last.report.tested)}]({name}.md) | {as_text(last.column)} |"
            f" {as_text(headline(last.report))} | {len(history)} |"
            for name, history in by_name.items()
            if (last := history[-1]).report.is_about_backend is alone
        ]
        if rows:
            lines += ["", f"| {judged} | last run | result | runs |", "|---|---|---|--:|", *rows]
    return "\n".join(lines) + "\n"


def _page(name: str, history: Sequence[Stored], everything: Sequence[Stored]) -> str:
    last = history[-1].report
    lines = [
        f"# {as_text(last.tested)}",
        "",
        f"![{as_text(headline(last))}]({name}.svg)",
        "",
        "## Runs",
        "",
        "| run | ddp-conformance | result |",
        "|---|---|---|",
        *(
            f"| {as_text(one.column)} | {as_text(one.report.package_version('ddp-conformance'))} |"
            f" {as_text(headline(one.report))} |"
            for one in reversed(history)
        ),
        "",
        "## What only it fails",
        "",
        *_alone(history[-1], everything),
        "",
        "## Requirements over time",
        "",
        *_verdicts_over_time(history[-_MOST_COLUMNS:]),
    ]
    return "\n".join(lines) + "\n"


def _alone(last: Stored, everything: Sequence[Stored]) -> list[str]:
    """Return the requirements that this subject breaks, and every other one that was asked keeps, in its last run."""
    latest = {one.name: one for one in everything if one.name != last.name}
    kept: dict[str, bool] = {}
    for other in latest.values():
        for each in other.report.requirements:
            kept[each.id] = kept.get(each.id, True) and each.subject is Verdict.PASS
    found = [one for one in last.report.requirements if one.subject.is_failure and kept.get(one.id, False)]
    if not found:
        return ["Nothing: whatever it breaks, another DDP or backend of these results breaks too, or none was asked."]
    return [f"- {_linked(one.id)}: {as_text(one.statement)}" for one in found]


def _verdicts_over_time(history: Sequence[Stored]) -> list[str]:
    """Return a Markdown table: a column for each stored run, a row for each requirement that did not pass in all."""
    columns = [{one.id: one.subject for one in stored.report.requirements} for stored in history]
    titles = " | ".join(as_text(stored.column) for stored in history)
    head = [f"| requirement | {titles} |", "|---|" + "---|" * len(history)]
    names = dict.fromkeys(name for column in columns for name in column)
    not_kept = [name for name in names if any(column.get(name) is not Verdict.PASS for column in columns)]
    cells = {name: [column[name].value if name in column else "-" for column in columns] for name in not_kept}
    rows = [f"| {_linked(name)} | {' | '.join(verdicts)} |" for name, verdicts in cells.items()]
    summary = f"{counted(len(names) - len(not_kept), 'requirement')} passed in every run."
    return [summary, "", *head, *rows] if rows else [summary]


def _linked(requirement: str) -> str:
    name = as_text(requirement)
    return f"[{name}](../requirements/{requirement}.md)" if re.fullmatch("[A-Z][A-Z0-9]*-[0-9]+", requirement) else name
