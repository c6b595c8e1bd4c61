"""The generated pages of this repository. What is not here is written by hand, or by `ELSEWHERE`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from conformance.backends.gloo import GLOO
from conformance.errors import ReportError
from conformance.mutants.catalogue import load_deviations, load_mutants
from conformance.mutants.page import detection_page
from conformance.mutants.printed import found_on, made_on, not_tried
from conformance.report.schema import report_schema
from conformance.run.report import Report
from conformance.spec.catalogue import load_catalogue
from conformance.spec.version import known_versions, load_version
from conformance.subjects.reducer_diagram import reducer_diagram
from conformance.suite import load_scenarios
from workshop.behaviour_rows import load_behaviours
from workshop.behaviours import behaviours_page
from workshop.capabilities import capabilities_page
from workshop.counts import count
from workshop.devices import CHAPTER as DEVICES
from workshop.devices import ROWS, devices_page
from workshop.page import Made, Make, Page
from workshop.pairs import CHAPTER as PAIRS
from workshop.pairs import features_in, pairs_page
from workshop.specification import specification_pages
from workshop.systems import systems_page

COUNTS = "docs/counts.toml"
SPECIFICATION = "docs/specification"
#: What shows verdicts: the site makes these of stored reports.
RUN_PAGES = ("docs/behaviours.md", "docs/pairs.md", "docs/devices.md")
_DIAGRAM = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)

#: What is generated and not renewed here, with the reason and the command.
ELSEWHERE = {
    "docs/scoreboard.md": "needs other projects' DDPs: bash ci/scoreboard.sh",
    "docs/clients.md": "needs the libraries of training scripts: bash ci/clients.sh",
    "docs/smoke.md": "EXPECTTEST_ACCEPT=1 pytest --nightly conformance/tests/test_smoke_sentences.py",
    "the texts that tests pin": "EXPECTTEST_ACCEPT=1 pytest ...",
}


def generated_pages(root: Path) -> tuple[Page, ...]:
    """Return every generated page of the repository at `root`, those that are no longer made included."""
    return (
        Page(COUNTS, _holding(count().to_toml())),
        *_specification(root),
        Page("docs/behaviours.md", _behaviours),
        Page("docs/systems.md", _holding(_systems())),
        Page("docs/capabilities.md", _holding(_capabilities())),
        Page("docs/pairs.md", _pairs),
        Page("docs/devices.md", _devices),
        Page("docs/detection.md", _detection),
        Page("docs/reducer.md", _reducer),
        Page("conformance/report/report.schema.json", _holding(schema_text())),
    )


def schema_text() -> str:
    """Return the schema of reports as it is published."""
    return json.dumps(report_schema(), indent=1) + "\n"


def _specification(root: Path) -> list[Page]:
    wanted = specification_pages(load_catalogue(), load_scenarios(), [load_version(name) for name in known_versions()])
    names = sorted({*wanted, *(file.name for file in (root / SPECIFICATION).glob("*.md"))})
    return [Page(f"{SPECIFICATION}/{name}", _holding(wanted.get(name))) for name in names]


def _systems() -> str:
    kills = (kill.requirement for mutant in load_mutants() for kill in mutant.kills)
    return systems_page(load_behaviours(), Counter(kills))


def _capabilities() -> str:
    return capabilities_page(GLOO, load_scenarios(), {one.id: one.level for one in load_catalogue()})


def _holding(text: str | None) -> Make:
    return lambda now, reports: Made(text)


def _behaviours(now: str, reports: Sequence[Report]) -> Made:
    rows = load_behaviours()
    own = [report for report in reports if report.subject.name == "ddp_impl"]
    if own:
        _check_whole("docs/behaviours.md", own, {scenario.id for scenario in load_scenarios()})
        return Made(behaviours_page(rows, own))
    cells = {cells[0]: cells[1:] for line in now.splitlines() if len(cells := _cells(line)) > 1}
    wrong = [
        row.name
        for row in rows
        if [cells.get(row.name, [""] * 3)[place] for place in (0, 2)] != [row.promise, ", ".join(row.requirements)]
    ]
    return _left(now, "ddp_impl", [f"differs from behaviours.toml in the row {name!r}" for name in wrong])


def _pairs(now: str, reports: Sequence[Report]) -> Made:
    features = features_in(load_scenarios())
    own = {report.subject.name: report for report in reports if any(one.chapter == PAIRS for one in report.scenarios)}
    if own.keys() >= {"ddp_impl", "torch"}:
        wanted = {scenario.id for scenario in load_scenarios() if scenario.chapter == PAIRS}
        shown = [own["ddp_impl"], own["torch"]]
        for report in shown:
            _check_whole("docs/pairs.md", [report], wanted)
        return Made(pairs_page(shown, features))
    missing = [name for name in features if not re.search(rf"^\| \d+ {re.escape(name)} \|", now, re.MULTILINE)]
    return _left(now, "ddp_impl and one of torch", [f"has no row for the feature {name}" for name in missing])


def _devices(now: str, reports: Sequence[Report]) -> Made:
    own = {report.subject.name: report for report in reports if any(one.chapter == DEVICES for one in report.scenarios)}
    if own.keys() >= {"ddp_impl", "torch"}:
        shown = [own["ddp_impl"], own["torch"]]
        for report in shown:
            _check_whole("docs/devices.md", [report], {f"{DEVICES}/{scenario}" for scenario in ROWS.values()})
        return Made(devices_page(shown))
    missing = [row for row in ROWS if f"| {row} |" not in now]
    return _left(now, "ddp_impl and one of torch", [f"has no row for {row}" for row in missing])


def _detection(now: str, reports: Sequence[Report]) -> Made:
    """Renew what the page says of the catalogue; only ranks can tell what becomes of a mutant that is not on it."""
    mutants = load_mutants()
    found = found_on(now, mutants, load_deviations())
    text = detection_page(load_catalogue(), found, made_on(now))
    if new := [mutant.name for mutant in not_tried(found, mutants)]:
        names = " ".join(new)
        return Made(
            text,
            f"does not say who notices {names}: run `ddp-conformance mutants {names} --into docs/detection.md --kills "
            "conformance/spec/kills.toml`",
        )
    return Made(text)


def _reducer(now: str, reports: Sequence[Report]) -> Made:
    if not _DIAGRAM.search(now):
        raise ReportError("docs/reducer.md has no ```mermaid block to put the diagram of the reducer in")
    return Made(_DIAGRAM.sub(lambda _: reducer_diagram(), now, count=1))


def _left(now: str, needed: str, mistakes: Sequence[str]) -> Made:
    """Return the page as it is, with what is wrong with it that only reports can mend."""
    need = f"a report of {needed}"
    if mistakes:
        return Made(now or None, f"{mistakes[0]}; it needs {need}: run `python -m workshop renew --report FOLDER`")
    return Made(now, note=f"shows verdicts and was left alone; --report FOLDER with {need} renews it")


def _cells(line: str) -> list[str]:
    return line.removeprefix("| ").removesuffix(" |").split(" | ") if line.startswith("| ") else []


def _check_whole(page: str, reports: Sequence[Report], wanted: set[str]) -> None:
    """Refuse reports that would empty cells of a page; raises `ReportError`."""
    there = {scenario.id for report in reports for scenario in report.scenarios}
    if missing := sorted(wanted - there):
        raise ReportError(
            f"{page} is about {len(wanted):,} scenarios, and the reports of {reports[0].subject.name} lack"
            f" {len(missing):,} of them, such as {missing[0]}: run these too and give all reports"
        )
