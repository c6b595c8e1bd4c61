"""The generated pages of this repository. What is not here is written by hand, or by `ELSEWHERE`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from conformance.backends.gloo import GLOO
from conformance.errors import ReportError
from conformance.mutants.catalogue import load_deviations, load_mutants
from conformance.mutants.page import detection_page
from conformance.mutants.printed import found_on, made_on, not_tried
from conformance.report.schema import report_schema
from conformance.spec.catalogue import load_catalogue
from conformance.spec.version import known_versions, load_version
from conformance.subjects.reducer_diagram import reducer_diagram
from conformance.suite import load_scenarios
from workshop.behaviour_rows import load_behaviours
from workshop.capabilities import capabilities_page
from workshop.counts import count
from workshop.page import Made, Make, Page
from workshop.specification import specification_pages
from workshop.systems import systems_page

COUNTS = "docs/counts.toml"
SPECIFICATION = "docs/specification"
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
        Page("docs/systems.md", _holding(_systems())),
        Page("docs/capabilities.md", _holding(_capabilities())),
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
    return lambda now: Made(text)


def _detection(now: str) -> Made:
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


def _reducer(now: str) -> Made:
    if not _DIAGRAM.search(now):
        raise ReportError("docs/reducer.md has no ```mermaid block to put the diagram of the reducer in")
    return Made(_DIAGRAM.sub(lambda _: reducer_diagram(), now, count=1))
