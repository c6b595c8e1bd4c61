"""The site's own checks and pictures."""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.errors import ReportError, SpecificationError
from conformance.mutants.detector import Found
from conformance.report.results import Stored, stored_reports
from conformance.run.report import Assignment
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.suite import load_scenarios
from conformance.tests.reports_by_hand import FAIL, PASS, outcome, run_report
from conformance.verdict import Verdict
from workshop.behaviours import page_of
from workshop.site.build import DEFINITION, PASSAGES
from workshop.site.passages import definition_page, read_passages
from workshop.site.requirement_pages import Evidence, requirement_pages


def test_no_stored_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no report\.json"):
        stored_reports([tmp_path])


def test_every_passage_of_the_definition_is_there_and_linked() -> None:
    catalogue = load_catalogue()
    passages = read_passages(DEFINITION, PASSAGES, catalogue)
    assert all(passage.code and passage.defines for passage in passages)
    page = definition_page(DEFINITION, passages)
    for line in DEFINITION.read_text().splitlines():
        assert line in page or line.lstrip().startswith("# --"), "the page leaves nothing out"
    pages = requirement_pages(catalogue, load_scenarios(), Evidence(Found(()), passages=passages))
    assert "[join](../definition.md#join)" in pages["requirements/JOIN-01.md"]
    assert "[buffers](../definition.md#buffers)" in pages["requirements/JOIN-04.md"]
    assert "leaves it open" in pages["requirements/BUCKET-01.md"]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('"join" =', '"jion" =', "differ in: jion, join"),
        ('"copies" = ["copies"]', "", "differ in: copies"),
        ('["join"]', '["joins"]', "no chapter and no requirement: joins"),
        ("TRAIN-12", "TRAIN-99", "no chapter and no requirement: TRAIN-99"),
    ],
)
def test_a_passage_that_there_is_not_is_named(tmp_path: Path, before: str, after: str, says: str) -> None:
    table = tmp_path / "passages.toml"
    text = PASSAGES.read_text()
    assert before in text
    table.write_text(text.replace(before, after))
    with pytest.raises(SpecificationError, match=says):
        read_passages(DEFINITION, table, load_catalogue())


def test_the_page_of_runs_is_made_of_the_newest_stored_reports() -> None:
    everything = [*{name: one for one in load_scenarios() for name in one.requirements}.values()]
    pairs = [one for one in everything if one.chapter == "pairs"]

    def page(*stored: Stored) -> str:
        return page_of(stored, everything)

    def on(day: int, scenarios: Sequence[Scenario], verdict: Verdict = PASS, **changes: Any) -> Stored:
        report = run_report(*(outcome(one, verdict, PASS) for one in scenarios), **changes)
        return Stored(datetime.date(2026, 1, day), report)

    whole = page(on(1, everything, FAIL), on(2, everything), on(3, pairs, FAIL, subject="other"))
    assert "FAIL" not in whole, "neither an older run nor another DDP's"
    assert "| - |" not in whole
    (covered,) = re.findall(r"The stored runs hold ([\d,]+) of the ([\d,]+) scenarios", whole)
    assert covered[0] == covered[1] != "0"
    quick = Assignment("quick", "", ())
    later = page(on(1, everything), on(2, everything[:1], FAIL, selection=quick))
    assert "FAIL" in later, "a scenario has its newest verdict"
    assert "The stored runs hold 0 of" in page()
