"""Every generated file of the repository is that of today, and `python -m workshop renew` makes it so."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import workshop
from conformance.mutants import catalogue
from conformance.mutants.catalogue import Kill, Mutant, load_mutants
from workshop import ROOT
from workshop.counts import count
from workshop.renew import COUNTS, DETECTED, command
from workshop.torch_versions import JUDGED, PAGE


def renew(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def test_every_generated_file_is_that_of_today() -> None:
    assert renew("--check") == (0, "")


#: What is generated.
FILES = (COUNTS, DETECTED, PAGE, JUDGED)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    monkeypatch.setattr(workshop, "ROOT", tmp_path)
    return tmp_path


def test_what_was_edited_or_removed_is_renewed(repository: Path) -> None:
    (repository / COUNTS).unlink()
    (repository / PAGE).write_text("2.15.0: no run")
    (repository / JUDGED).write_text('"2.15.0" = "no run"')
    detected = repository / DETECTED
    detected.write_text(detected.read_text().replace('["killed"]\n', '["killed"]\nNobodyNow = ["GRAD-01"]\n'))
    code, said = renew("--check")
    assert (code, said.count("is stale: run `python -m workshop renew`")) == (1, 4)
    assert not (repository / COUNTS).exists(), "--check changes nothing"
    assert renew() == (0, f"rewrote {COUNTS}\nrewrote {DETECTED}\nrewrote {PAGE}\nrewrote {JUDGED}\n")
    assert all((repository / file).read_text() == (ROOT / file).read_text() for file in FILES)
    assert renew("--check") == (0, "")


def test_a_new_mutant_is_a_gap_that_only_ranks_can_close(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Mutant("RightOften", "conformance.chapters.gradients.mutants:NoDivision", "torch", (Kill("GRAD-01"),))
    mutants = (*load_mutants(), new)
    monkeypatch.setattr(catalogue, "load_mutants", lambda: mutants)
    code, said = renew()
    assert code == 1
    assert f"{DETECTED} does not say who notices RightOften: run `ddp-conformance mutants RightOften --into" in said


def test_programs_of_tests_do_not_count() -> None:
    before = count()
    import conformance.tests.worker_programs  # noqa: F401

    assert count() == before
