"""The page of behaviours: what a complete DDP does, the requirements that ask for it, and what a run has shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from conformance.run.outcome import combine
from conformance.run.report import Report
from conformance.verdict import ScenarioResult, Verdict
from workshop.behaviour_rows import SECTIONS, Behaviour
from workshop.run_text import run_text

_HEAD = """# Behaviours

What a complete DistributedDataParallel does, the requirements that hold one to it, and what stored runs have shown.
A cell says `PASS`, or how many of the row's scenarios came to the worst verdict. It is `-` where no stored run has any
of them. The rows are in `workshop/behaviours.toml`.
"""


def behaviours_page(behaviours: Sequence[Behaviour], reports: Sequence[Report]) -> str:
    """Return the page in Markdown, with the verdicts of the reports' subjects and of torch's DDP beside them.

    A scenario that several reports hold has the verdict of the first of them.
    """
    columns = _columns(reports)
    lines = [_HEAD, *(f"{run_text(report)}: {len(report.scenarios):,} scenarios.\n" for report in reports)]
    for section, title in SECTIONS.items():
        lines += [f"## {title}", "", f"| {' | '.join(['behaviour', 'promise', 'sources', 'requirements', *columns])} |"]
        lines.append("|---|---|---|---|" + "---|" * len(columns))
        lines += [_row(row, columns) for row in behaviours if row.section == section]
        lines.append("")
    return "\n".join(lines)


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
