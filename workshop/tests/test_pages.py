"""Every generated page of the repository is that of today, and `python -m workshop renew` makes it so."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import workshop
from conformance.mutants.catalogue import Kill, Mutant, load_mutants
from workshop import ROOT, page
from workshop import generated_pages as pages
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
    assert {COUNTS, "docs/systems.md", "docs/detection.md", "docs/reducer.md"} <= said


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


def test_a_page_that_does_not_exist_and_cannot_be_made_is_not_made_empty(tmp_path: Path) -> None:
    lacking = Page("x.md", lambda now: Made(now or None, "is not there: run it"))
    (compared,) = compare(tmp_path, [lacking])
    assert compared.state is State.LACKING
    assert page.write(tmp_path, compared) is False
    assert list(tmp_path.iterdir()) == []


def test_programs_of_tests_do_not_count() -> None:
    before = count()
    import conformance.tests.worker_programs  # noqa: F401

    assert count() == before
