"""The table of pairs: which features of a DDP work together, which are refused together, and which fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from conformance.report.markdown import as_code
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.verdict import Verdict

CHAPTER = "pairs"

_HEAD = """# Pairs of features

Every feature with every other one, trained for some steps over two ranks and compared with the truth.
`works`: the training is right. `refused`: the pair is refused before it trains, by an error that speaks of both.
Anything else is the verdict of a pair that went wrong. Made by `python -m workshop renew --report FOLDER`.
"""


def features_in(scenarios: Iterable[Scenario]) -> list[str]:
    """Return the features that chapter pairs tries alone, as scenarios call them, in the order of its requirements."""
    slugs = (scenario.id.split("/")[2] for scenario in scenarios if scenario.chapter == CHAPTER)
    return [feature for feature, alone, _ in (slug.partition("-alone-") for slug in slugs) if alone]


def pairs_page(reports: Sequence[Report], features: Sequence[str]) -> str:
    """Return the page in Markdown: for each report a triangle of `features`, as scenarios call them."""
    return "\n".join([_HEAD, *(_table(report, features) for report in reports)])


def _table(report: Report, features: Sequence[str]) -> str:
    found = {scenario.id.split("/")[2]: scenario for scenario in report.scenarios if scenario.chapter == CHAPTER}
    count = sum(_pair(slug) for slug in found)
    lines = [
        f"## {report.subject.name}",
        "",
        f"{count} pairs on {as_code(report.backend)} with torch {as_code(report.package_version('torch'))}.",
        "",
        f"| | {' | '.join(str(number) for number in range(1, len(features)))} |",
        "|---|" + "---|" * (len(features) - 1),
    ]
    for number, row in enumerate(features, start=1):
        cells = [_cell(found, other, row) for other in features[: number - 1]]
        cells += [""] * (len(features) - 1 - len(cells))
        lines.append(f"| {number} {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _pair(slug: str) -> bool:
    return "+" in slug


def _cell(found: Mapping[str, Outcome], one: str, other: str) -> str:
    scenario = next((each for slug, each in found.items() if slug.startswith(f"{one}+{other}-world")), None)
    if scenario is None:
        return "-"
    if scenario.subject.verdict is not Verdict.PASS:
        return str(scenario.subject.verdict.value)
    return "refused" if any(note.name == "refused" for note in scenario.notes) else "works"
