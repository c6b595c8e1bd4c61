"""The page of behaviours: what a complete DDP does, the requirements that ask for it, and what a run has shown."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from conformance.report.markdown import as_code, as_text
from conformance.report.results import Stored
from conformance.run.outcome import combine
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.verdict import ScenarioResult, Verdict
from workshop.behaviour_rows import SECTIONS, Behaviour, load_behaviours

_HEAD = """# Behaviours

What a complete DistributedDataParallel does, the requirements that hold one to it, and what stored runs have shown.
A cell says `PASS`, or how many of the row's scenarios came to the worst verdict. It is `-` where no stored run has any
of them. The rows are in `workshop/behaviours.toml`.
"""


#: The DDP that the page is about; torch's stands beside it in its reports.
SHOWN = "ddp_impl"


def page_of(stored: Sequence[Stored], scenarios: Sequence[Scenario]) -> str:
    """Return the page in Markdown, with how many of this release's `scenarios` about it are `stored`, by date."""
    reports, rows = [report for report in newest(stored) if report.subject.name == SHOWN], load_behaviours()
    named = {name for row in rows for name in row.requirements}
    there = {one.id for report in reports for one in report.scenarios}
    wanted = [one.id for one in scenarios if named & set(one.requirements)]
    return (
        f"{behaviours_page(rows, reports)}\nThe stored runs hold {sum(one in there for one in wanted):,} of the"
        f" {len(wanted):,} scenarios that this page is about. `KEY=key.pem bash ci/store.sh` runs all and stores"
        " the reports.\n"
    )


def newest(stored: Sequence[Stored]) -> tuple[Report, ...]:
    """Return the last report of each DDP on each backend at each profile, of those on the newest run's torch.

    The newest comes first.
    """
    if not stored:
        return ()
    torch = stored[-1].report.package_version("torch")
    same = [one for one in stored if one.report.package_version("torch") == torch]
    last = {(one.name, one.report.selection.profile): one for one in same}
    return tuple(one.report for one in reversed(same) if last[one.name, one.report.selection.profile] is one)


def behaviours_page(behaviours: Sequence[Behaviour], reports: Sequence[Report]) -> str:
    """Return the page in Markdown, with the verdicts of the reports' subjects and of torch's DDP beside them.

    A scenario that several reports hold has the verdict of the first of them.
    """
    columns = _columns(reports)
    lines = [_HEAD, *(f"{_run(report)}: {len(report.scenarios):,} scenarios.\n" for report in reports)]
    for section, title in SECTIONS.items():
        lines += [f"## {title}", "", f"| {' | '.join(['behaviour', 'promise', 'sources', 'requirements', *columns])} |"]
        lines.append("|---|---|---|---|" + "---|" * len(columns))
        lines += [_row(row, columns) for row in behaviours if row.section == section]
        lines.append("")
    return "\n".join(lines)


def _run(report: Report) -> str:
    names = (report.subject.name, report.backend, report.package_version("torch"))
    profile = f"profile {report.selection.profile}" if report.selection.profile else "a selection"
    date = as_text(str(report.environment.get("date", "an unknown day")))
    return "{} on {} with torch {}, {}, {}".format(*map(as_code, names), date, as_text(profile))


_Column = Mapping[str, Counter[Verdict]]  # requirement -> how often its scenarios came to what


def _columns(reports: Sequence[Report]) -> dict[str, _Column]:
    """Return a column for each subject and one for torch's DDP; a scenario counts once, as its first report has it."""
    found: dict[str, dict[str, tuple[tuple[str, ...], ScenarioResult]]] = {}
    for report in reports:
        for scenario in report.scenarios:
            for name, result in ((report.subject.name, scenario.subject), ("torch's DDP", scenario.native)):
                if result is not None:
                    found.setdefault(name, {}).setdefault(scenario.id, (scenario.requirements, result))
    return {name: _column(results.values()) for name, results in found.items()}


def _column(results: Iterable[tuple[tuple[str, ...], ScenarioResult]]) -> _Column:
    column: dict[str, Counter[Verdict]] = {}
    for requirements, result in results:
        for requirement in dict.fromkeys((*requirements, *result.broken)):
            if (verdict := result.verdict_on(requirement, requirements)) is not None:
                column.setdefault(requirement, Counter())[verdict] += 1
    return column


def _row(row: Behaviour, columns: Mapping[str, _Column]) -> str:
    sources = ", ".join(_link(source) for source in row.sources) or "torch DDP docs"
    cells = [_cell([column[one] for one in row.requirements if one in column]) for column in columns.values()]
    return f"| {' | '.join([row.name, row.promise, sources, ', '.join(row.requirements), *cells])} |"


def _cell(counts: Sequence[Counter[Verdict]]) -> str:
    total: Counter[Verdict] = sum(counts, Counter())
    if not total:
        return "-"
    verdict = combine(total)
    share = "" if verdict is Verdict.PASS else f" {total[verdict]} of {total.total()}"
    return f"{verdict.value}{share}"


def _link(source: str) -> str:
    repository, _, number = source.partition("#")
    return f"[#{number}](https://github.com/{repository}/issues/{number})" if number.isdigit() else source
