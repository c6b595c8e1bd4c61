"""The site's own checks and pictures."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from conformance.errors import ReportError, SpecificationError
from conformance.mutants.detector import Found
from conformance.report.results import Stored, stored_reports
from conformance.run.report import Assignment
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.suite import load_scenarios
from conformance.tests.reports_by_hand import FAIL, PASS, outcome, run_report
from conformance.verdict import Verdict
from workshop import ROOT
from workshop.site import browser
from workshop.site.build import DEFINITION, PASSAGES
from workshop.site.links import dead_links, main
from workshop.site.passages import definition_page, read_passages
from workshop.site.requirement_pages import Evidence, requirement_pages
from workshop.site.run_pages import run_pages
from workshop.site.terminal import draw_terminals, terminal_picture


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">b</a><a href="b.html#no">b</a><a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1><a href="https://example.org">out</a>')
    checked, dead = dead_links(tmp_path)
    assert checked == 3
    assert dead == (
        "a.html links to b.html#no, whose page has no such anchor",
        "a.html links to c.html, which is not there",
    )


def test_a_site_without_pages_is_an_error(tmp_path: Path) -> None:
    assert main(tmp_path) == 1


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


@pytest.mark.nightly
def test_pages_of_runs_are_made_of_the_newest_stored_reports() -> None:
    everything = load_scenarios()
    pairs = [one for one in everything if one.chapter == "pairs"]

    def on(day: int, scenarios: Sequence[Scenario], verdict: Verdict = PASS, **changes: Any) -> Stored:
        report = run_report(*(outcome(one, verdict, PASS) for one in scenarios), **changes)
        return Stored(datetime.date(2026, 1, day), report)

    whole = run_pages([on(1, everything, FAIL), on(2, everything), on(3, pairs, FAIL, subject="other")], everything)
    assert "| works |" in whole["pairs.md"]
    assert all("FAIL" not in text for text in whole.values()), "neither an older run nor another DDP's"
    assert "| - |" not in whole["behaviours.md"]
    for text in whole.values():
        (covered,) = re.findall(r"The stored runs hold ([\d,]+) of the ([\d,]+) scenarios", text)
        assert covered[0] == covered[1] != "0"

    lacking = run_pages([on(1, pairs[1:])], everything)
    assert f"hold {len(pairs) - 1} of the {len(pairs)} scenarios" in lacking["pairs.md"]
    assert "No stored run" in lacking["devices.md"]

    quick = Assignment("quick", "", ())
    later = run_pages([on(1, everything), on(2, [everything[0], pairs[0]], FAIL, selection=quick)], everything)
    assert "FAIL" not in later["pairs.md"], "a small run hides no whole one"
    assert "FAIL" in later["behaviours.md"], "a scenario has its newest verdict"
    assert set(run_pages((), everything)) == set(whole)


def test_no_page_made_of_runs_is_tracked() -> None:
    """A copy in the repository would be stale after the next run, and nobody would know."""
    assert [name for name in run_pages((), load_scenarios()) if (ROOT / "docs" / name).exists()] == []


def test_without_chromium_the_check_fails_unless_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    refused = CliRunner().invoke(browser.main, [str(tmp_path)])
    assert (refused.exit_code, "no Chromium here" in refused.output) == (2, True)
    left_out = CliRunner().invoke(browser.main, [str(tmp_path), "--without-browser"])
    assert (left_out.exit_code, left_out.output) == (0, "The site was not opened in a browser.\n")


def test_the_same_pages_are_opened_each_time(tmp_path: Path) -> None:
    for name in ("", *browser.ALWAYS, *(f"other/{number}" for number in range(30))):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "index.html").touch()
    pages = browser.chosen_pages(tmp_path)
    assert pages == browser.chosen_pages(tmp_path)
    assert pages[: len(browser.ALWAYS)] == browser.ALWAYS
    assert len(set(pages)) == len(pages) == len(browser.ALWAYS) + 10


def test_a_site_is_served_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text("here")
    with browser.served(tmp_path) as address, urlopen(f"{address}page.txt") as answer:
        assert answer.read() == b"here"


def test_what_a_command_printed_becomes_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "start" / "ddp.txt"
    file.parent.mkdir()
    file.write_text("$ run <it>\nFAIL  GRAD-01\n")
    assert draw_terminals(tmp_path) == (file.with_suffix(".svg"),)
    assert not file.exists()
    drawn = file.with_suffix(".svg").read_text()
    shown = "".join(ElementTree.fromstring(drawn).itertext()).replace("\xa0", " ")
    assert "$ run <it>" in shown
    assert "FAIL  GRAD-01" in shown
    assert "@font-face" not in drawn
    assert drawn == terminal_picture("$ run <it>\nFAIL  GRAD-01\n", "ddp")
