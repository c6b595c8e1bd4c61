"""The page of behaviours: what a complete DDP does, the requirements that ask for it, and what a run has shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from conformance.behaviours import SECTIONS, Behaviour
from conformance.report.run_report import combine
from conformance.report.stored_report import StoredReport, StoredResult
from conformance.verdict import Verdict

_HEAD = """# Behaviours

What a complete DistributedDataParallel does, the requirements that hold one to it, and what a run has shown.
A cell says `PASS`, or how many of the row's scenarios came to the worst verdict; `-` where the run has none of them.
Made by `ddp-conformance report behaviours`; the rows are in `conformance/behaviours.toml`.
"""


def behaviours_page(behaviours: Sequence[Behaviour], reports: Sequence[StoredReport]) -> str:
    """Return the page in Markdown, with the verdicts of the reports' subjects and of torch's DDP beside the first."""
    columns = _columns(reports)
    lines = [_HEAD]
    for report in reports:
        torch_version = report.package_version("torch")
        lines.append(
            f"Run of {report.subject.name} on {report.backend} with torch {torch_version}: "
            f"{len(report.scenarios)} scenarios.\n"
        )
    for section, title in SECTIONS.items():
        lines += [f"## {title}", "", f"| behaviour | promise | sources | requirements | {' | '.join(columns)} |"]
        lines.append("|---|---|---|---|" + "---|" * len(columns))
        lines += [_row(row, columns) for row in behaviours if row.section == section]
        lines.append("")
    return "\n".join(lines)


_Column = Mapping[str, Counter[Verdict]]  # requirement -> how often its scenarios came to what


def _columns(reports: Sequence[StoredReport]) -> dict[str, _Column]:
    columns: dict[str, _Column] = {}
    for report in reports:
        columns[report.subject.name] = _column(
            (scenario.requirements, scenario.subject) for scenario in report.scenarios
        )
        native = [(one.requirements, one.native) for one in report.scenarios if one.native is not None]
        if native:
            columns.setdefault("torch's DDP", _column(native))
    return columns


def _column(results: object) -> _Column:
    column: dict[str, Counter[Verdict]] = {}
    for requirements, result in results:  # type: ignore[attr-defined]
        assert isinstance(result, StoredResult)
        for requirement in requirements:
            column.setdefault(requirement, Counter())[result.verdict] += 1
    return column


def _row(row: Behaviour, columns: Mapping[str, _Column]) -> str:
    sources = ", ".join(_link(source) for source in row.sources) or "torch DDP docs"
    cells = [_cell([column[one] for one in row.requirements if one in column]) for column in columns.values()]
    return f"| {row.name} | {row.promise} | {sources} | {', '.join(row.requirements)} | {' | '.join(cells)} |"


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
