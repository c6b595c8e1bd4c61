"""The table of pairs: which features of a DDP work together, which are refused together, and which fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from conformance.run.outcome import Note
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.verdict import ScenarioResult, Verdict
from workshop.run_text import run_text

CHAPTER = "pairs"

_HEAD = """# Pairs of features

Every feature with every other one, trained for some steps over two ranks and compared with the truth.
`works`: the training is right. `refused`: the pair is refused before it trains, by an error that speaks of both.
Anything else is the verdict of a pair that went wrong.
"""


def features_in(scenarios: Iterable[Scenario]) -> list[str]:
    """Return the features that chapter pairs tries alone, as scenarios call them, in the order of its requirements."""
    slugs = (scenario.id.split("/")[2] for scenario in scenarios if scenario.chapter == CHAPTER)
    return [feature for feature, alone, _ in (slug.partition("-alone-") for slug in slugs) if alone]


def pairs_page(report: Report | None, features: Sequence[str]) -> str:
    """Return the page in Markdown: for the report's subject and for torch's DDP a triangle of `features`.

    `features` are called as scenarios call them. Without a report, the page says that nothing is stored.
    """
    if report is None:
        return f"{_HEAD}\nNo stored run holds chapter {CHAPTER}.\n"
    found = {one.id.split("/")[2]: one for one in report.scenarios if one.chapter == CHAPTER}
    count = sum("+" in slug for slug in found)
    own = {slug: (one.subject, one.notes) for slug, one in found.items()}
    of_torch = {slug: (one.native, one.native_notes) for slug, one in found.items() if one.native is not None}
    columns = {report.subject.name: own, **({"torch's DDP": of_torch} if of_torch else {})}
    tables = (_table(name, column, features) for name, column in columns.items())
    return "\n".join([_HEAD, f"{run_text(report)}: {count} pairs.\n", *tables])


_Cell = tuple[ScenarioResult, Sequence[Note]]


def _table(name: str, found: Mapping[str, _Cell], features: Sequence[str]) -> str:
    lines = [
        f"## {name}",
        "",
        f"| | {' | '.join(str(number) for number in range(1, len(features)))} |",
        "|---|" + "---|" * (len(features) - 1),
    ]
    for number, row in enumerate(features, start=1):
        cells = [_cell(found, other, row) for other in features[: number - 1]]
        cells += [""] * (len(features) - 1 - len(cells))
        lines.append(f"| {number} {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Mapping[str, _Cell], one: str, other: str) -> str:
    cell = next((each for slug, each in found.items() if slug.startswith(f"{one}+{other}-world")), None)
    if cell is None:
        return "-"
    result, notes = cell
    if result.verdict is not Verdict.PASS:
        return str(result.verdict.value)
    return "refused" if any(note.name == "refused" for note in notes) else "works"
