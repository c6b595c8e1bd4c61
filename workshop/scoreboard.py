"""Several DDPs, or backends, side by side: how many requirements of each chapter each keeps, as a Markdown table."""

import datetime
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from conformance.errors import ReportError
from conformance.report.markdown import as_code, as_text
from conformance.run.report import Report
from conformance.verdict import Verdict

#: Round the table of DDPs, and that of backends by themselves.
MARKS = "<!-- {0} -->", "<!-- end of {0} -->"


def scoreboard(reports: Sequence[Report], distributions: Mapping[str, str], date: datetime.date) -> str:
    """Return a table of chapters and subjects whose cells count requirements by verdict.

    `distributions` say which package a subject of some name comes from (torch, where they say nothing), `date` when the
    reports were made. A requirement in which ranks hung or crashed counts as failed.

    Raises:
        ReportError: no report, two of one subject, or reports that did not run the same.

    """
    if not reports:
        raise ReportError("a scoreboard takes at least one report")
    for report in reports[1:]:
        _check_comparable(reports[0], report)
    if repeated := [name for name, count in Counter(one.subject.name for one in reports).items() if count > 1]:
        raise ReportError(f"two reports judge {repeated[0]}; a scoreboard has one column for each subject")
    first = reports[0]
    rows: list[list[str]] = [
        ["requirements of", *(as_code(report.subject.name) for report in reports)],
        ["---"] * (len(reports) + 1),
        *([] if first.is_about_backend else [["version", *(as_code(_version(one, distributions)) for one in reports)]]),
    ]
    rows += [[as_text(chapter), *(_cell(report, chapter) for report in reports)] for chapter in _chapters(reports)]
    rows.append(["**all**", *(_cell(report, "") for report in reports)])
    if first.is_about_backend:
        rows.append(["scenarios", *(_cell_of_scenarios(report) for report in reports)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{_caption(first, date)}\n\n{table}\n"


def inserted(page: str, board: str, *, of_backends: bool = False) -> str:
    """Return `page` with `board` in the place between its marks; raises `ReportError` when it has none."""
    begin, end = (mark.format("board of backends" if of_backends else "scoreboard") for mark in MARKS)
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise ReportError(f"there is no {begin} ... {end} to put the scoreboard in")
    return pattern.sub(lambda _: f"{begin}\n{board}{end}", page, count=1)


def _check_comparable(first: Report, other: Report) -> None:
    for name, left, right in (
        ("kind", str(first.is_about_backend), str(other.is_about_backend)),
        *([] if first.is_about_backend else [("backend", first.backend, other.backend)]),
        ("torch", first.package_version("torch"), other.package_version("torch")),
        ("profile", first.selection.profile, other.selection.profile),
        ("scenarios", f"{len(first.selection.ids)}", f"{len(other.selection.ids)}"),
        ("selection", first.selection.ids, other.selection.ids),
    ):
        if left != right:
            shown = f": {left} and {right}" if isinstance(left, str) else ""
            raise ReportError(f"{first.subject.name} and {other.subject.name} were judged by different {name}{shown}")


def _chapters(reports: Sequence[Report]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chapter for report in reports for chapter in report.chapters))


def _version(report: Report, distributions: Mapping[str, str]) -> str:
    package = distributions.get(report.subject.name, "torch")
    return f"{package} {report.package_version(package)}".strip()


def _cell(report: Report, chapter: str) -> str:
    """Return how many requirements of `chapter`, or of all chapters, have which verdict."""
    found: Counter[Verdict] = Counter()
    for requirement in report.requirements:
        if chapter in ("", requirement.chapter):
            found[_counted(requirement.subject)] += 1
    missing = "" if report.is_complete or chapter else f"<br>{report.num_not_run} scenarios did not run"
    return "<br>".join(f"{verdict.value} {found[verdict]}" for verdict in Verdict if found[verdict]) + missing


def _cell_of_scenarios(report: Report) -> str:
    found = Counter(_counted(scenario.subject.verdict) for scenario in report.scenarios)
    return "<br>".join(f"{verdict.value} {found[verdict]}" for verdict in Verdict if found[verdict])


def _counted(verdict: Verdict) -> Verdict:
    return Verdict.FAIL if verdict in (Verdict.HANG, Verdict.CRASH) else verdict


def _caption(report: Report, date: datetime.date) -> str:
    profile = f"Profile {report.selection.profile}" if report.selection.profile else "A selection"
    backend = "" if report.is_about_backend else f", backend {as_code(report.backend)}"
    world_sizes = sorted({scenario.world_size for scenario in report.scenarios})
    return (
        f"{as_text(profile)}: {len(report.selection.ids)} scenarios at world size"
        f" {', '.join(map(str, world_sizes)) or 'none'}{backend},"
        f" torch {as_code(report.package_version('torch'))}; {date.isoformat()}. Requirements are counted; one that"
        " a single scenario shows to be broken is broken."
    )
