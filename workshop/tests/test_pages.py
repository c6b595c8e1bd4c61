"""Every generated page of the repository is that of today, and `python -m workshop renew` makes it so."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import workshop
from conformance.errors import ReportError
from conformance.mutants.catalogue import Kill, Mutant, load_mutants
from conformance.run.report import Report
from conformance.scenario import Scenario
from conformance.suite import load_scenarios
from conformance.tests.reports_by_hand import PASS, outcome, run_report
from workshop import ROOT, page
from workshop import generated_pages as pages
from workshop.behaviour_rows import load_behaviours
from workshop.counts import count
from workshop.generated_pages import COUNTS, generated_pages
from workshop.page import Made, Page, State, compare
from workshop.renew import command


def test_every_generated_page_is_that_of_today() -> None:
    stale = [one.explanation for one in compare(ROOT, generated_pages(ROOT)) if one.state is not State.FRESH]
    assert not stale, "\n".join(stale)


def test_every_file_that_says_who_made_it_is_renewed() -> None:
    """A page that `renew` forgets would be right until the next change, and nobody would know."""
    said = {
        str(file.relative_to(ROOT))
        for file in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.toml"), *ROOT.glob("docs/specification/*.md"))
        if re.search("Made by `(python -m workshop|ddp-conformance)", file.read_text())
        or "Generated from" in file.read_text()
    }
    assert said <= {one.path for one in generated_pages(ROOT)}
    assert {COUNTS, "docs/behaviours.md", "docs/pairs.md", "docs/detection.md", "docs/reducer.md"} <= said


# ------------------------------------------------------------------------------------------ a repository made for it


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the repository's pages that the command takes for the checkout."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "docs", root / "docs")
    (root / "conformance" / "report").mkdir(parents=True)
    shutil.copy(ROOT / "conformance" / "report" / "report.schema.json", root / "conformance" / "report")
    monkeypatch.setattr(workshop, "ROOT", root)
    return root


def renew(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def test_what_was_edited_removed_or_left_over_is_renewed(repository: Path) -> None:
    before = {file: file.read_text() for file in repository.rglob("*.*") if file.is_file()}
    counts, gone = repository / COUNTS, repository / "docs" / "specification" / "join.md"
    counts.write_text(counts.read_text().replace("mutants = ", "mutants = 1"))
    gone.unlink()
    left_over = repository / "docs" / "specification" / "of_yesterday.md"
    left_over.write_text("# A chapter that is no more\n")
    reducer = repository / "docs" / "reducer.md"
    reducer.write_text(reducer.read_text().replace("stateDiagram-v2", "stateDiagram-v1"))
    pages = ("docs/counts.toml", "docs/specification/join.md", "docs/specification/of_yesterday.md", "docs/reducer.md")

    code, said = renew("--check")
    assert code == 1
    for path in pages:
        assert f"{path} is stale: run `python -m workshop renew`" in said
    assert left_over.exists(), "--check changes nothing"

    code, said = renew()
    assert (code, "removed docs/specification/of_yesterday.md" in said) == (0, True)
    assert [f"rewrote {path}" in said for path in pages] == [True, True, False, True]
    assert {file: file.read_text() for file in repository.rglob("*.*") if file.is_file()} == before
    code, said = renew("--check")
    assert (code, "rewrote" in said) == (0, False)


def test_a_new_mutant_is_a_gap_that_only_ranks_can_close(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Mutant("RightOften", "conformance.chapters.gradients.mutants:NoDivision", "torch", (Kill("GRAD-01"),))
    monkeypatch.setattr(pages, "load_mutants", lambda: (*load_mutants(), new))
    for arguments in ((), ("--check",)):
        code, said = renew(*arguments)
        assert code == 1
        assert (
            "docs/detection.md does not say who notices RightOften: "
            "run `ddp-conformance mutants RightOften --into docs/detection.md --kills conformance/spec/kills.toml`"
        ) in said


def test_a_changed_behaviour_waits_for_a_report(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = load_behaviours()
    changed = (dataclasses.replace(first, promise="Something else."), *others)
    monkeypatch.setattr(pages, "load_behaviours", lambda: changed)
    code, said = renew("--check")
    assert code == 1
    assert f"docs/behaviours.md differs from behaviours.toml in the row {first.name!r}" in said
    assert "run `python -m workshop renew --report FOLDER`" in said


def report_of(subject: str, *scenarios: Scenario) -> Report:
    """Return a report of `subject` in which `scenarios` passed."""
    return run_report(*(outcome(one, PASS, PASS) for one in scenarios), subject=subject)


def page_at(path: str) -> Page:
    (found,) = (one for one in generated_pages(ROOT) if one.path == path)
    return found


def test_reports_renew_the_verdicts() -> None:
    scenarios = load_scenarios()
    own = [report_of("ddp_impl", *scenarios[:1000]), report_of("ddp_impl", *scenarios[1000:])]
    made = page_at("docs/behaviours.md").make("old", own).text
    assert made is not None
    assert made.startswith("# Behaviours")
    run = "Run of <code>ddp_impl</code> on <code>gloo</code> with torch <code>2.13.0+cpu</code>"
    assert f"{run}: {len(scenarios)} scenarios." in made
    assert "| - |" not in made

    pairs = page_at("docs/pairs.md")
    of_pairs = [scenario for scenario in scenarios if scenario.chapter == "pairs"]
    assert pairs.make("old", [report_of("ddp_impl", *of_pairs)]).text == "old", "torch's part is missing"
    made = pairs.make("old", [report_of(subject, *of_pairs) for subject in ("torch", "ddp_impl")]).text
    assert made is not None
    assert made.index("## ddp_impl") < made.index("## torch")


def test_a_report_that_would_empty_cells_is_refused() -> None:
    *others, last = load_scenarios()
    with pytest.raises(ReportError, match=f"the reports of ddp_impl lack 1 of them, such as {last.id}: run these too"):
        page_at("docs/behaviours.md").make("old", [report_of("ddp_impl", *others)])


def test_a_page_that_does_not_exist_and_cannot_be_made_is_not_made_empty(tmp_path: Path) -> None:
    lacking = Page("x.md", lambda now, reports: Made(now or None, "is not there: run it"))
    (compared,) = compare(tmp_path, [lacking])
    assert compared.state is State.LACKING
    assert page.write(tmp_path, compared) is False
    assert list(tmp_path.iterdir()) == []


def test_programs_of_tests_do_not_count() -> None:
    before = count()
    import conformance.tests.worker_programs  # noqa: F401

    assert count() == before
