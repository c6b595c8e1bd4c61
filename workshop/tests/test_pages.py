"""Every generated file of the repository is that of today, and `python -m workshop renew` makes it so."""

from __future__ import annotations

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

SCHEMA, DETECTED = "conformance/report/report.schema.json", "conformance/mutants/detected.toml"


def test_every_generated_page_is_that_of_today() -> None:
    stale = [one.explanation for one in compare(ROOT, generated_pages(ROOT)) if one.state is not State.FRESH]
    assert not stale, "\n".join(stale)


# ------------------------------------------------------------------------------------------ a repository made for it


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the generated files that the command takes for the checkout."""
    root = tmp_path / "checkout"
    for file in (COUNTS, SCHEMA, DETECTED):
        (root / file).parent.mkdir(parents=True)
        shutil.copy(ROOT / file, root / file)
    monkeypatch.setattr(workshop, "ROOT", root)
    return root


def renew(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def test_what_was_edited_or_removed_is_renewed(repository: Path) -> None:
    before = {file: file.read_text() for file in repository.rglob("*.*") if file.is_file()}
    counts, schema, detected = (repository / name for name in (COUNTS, SCHEMA, DETECTED))
    counts.write_text(counts.read_text().replace("mutants = ", "mutants = 1"))
    schema.unlink()
    detected.write_text(detected.read_text().replace('["killed"]\n', '["killed"]\nNobodyNow = ["GRAD-01"]\n'))

    code, said = renew("--check")
    assert code == 1
    for path in (COUNTS, SCHEMA, DETECTED):
        assert f"{path} is stale: run `python -m workshop renew`" in said
    assert not schema.exists(), "--check changes nothing"

    code, said = renew()
    assert code == 0
    assert all(f"rewrote {path}" in said for path in (COUNTS, SCHEMA, DETECTED))
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
            f"{DETECTED} does not say who notices RightOften: "
            f"run `ddp-conformance mutants RightOften --into {DETECTED} --kills conformance/spec/kills.toml`"
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
