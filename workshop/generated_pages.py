"""The generated files of this repository. The site makes its own pages: `workshop/site/build.py`."""

from __future__ import annotations

import json
from pathlib import Path

from conformance.mutants.catalogue import load_deviations, load_mutants
from conformance.mutants.detected import DETECTED, found_in, made_in, not_tried, written
from conformance.report.schema import report_schema
from workshop.counts import count
from workshop.page import Made, Make, Page

COUNTS = "docs/counts.toml"

#: What is generated and not renewed here, with the reason and the command.
ELSEWHERE = {
    "docs/scoreboard.md": "needs other projects' DDPs: bash ci/scoreboard.sh",
    "the texts that tests pin": "EXPECTTEST_ACCEPT=1 pytest ...",
}


def generated_pages(root: Path) -> tuple[Page, ...]:
    """Return every generated file of the repository at `root`."""
    return (
        Page(COUNTS, _holding(count().to_toml())),
        Page(f"conformance/mutants/{DETECTED.name}", _detected),
        Page("conformance/report/report.schema.json", _holding(schema_text())),
    )


def schema_text() -> str:
    """Return the schema of reports as it is published."""
    return json.dumps(report_schema(), indent=1) + "\n"


def _holding(text: str | None) -> Make:
    return lambda now: Made(text)


def _detected(now: str) -> Made:
    """Leave out mutants that are gone; only ranks can tell what becomes of a mutant that the file does not have."""
    mutants = load_mutants()
    found = found_in(now, mutants, load_deviations())
    text = written(found, made_in(now))
    if new := [mutant.name for mutant in not_tried(found, mutants)]:
        names = " ".join(new)
        return Made(
            text,
            f"does not say who notices {names}: run `ddp-conformance mutants {names} --into "
            f"conformance/mutants/{DETECTED.name} --kills conformance/spec/kills.toml`",
        )
    return Made(text)
