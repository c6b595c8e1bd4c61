"""The rows of a complete DDP: each is held by requirements that exist, and its cells say what a run has shown."""

import dataclasses
from pathlib import Path

import pytest

from conformance.errors import SpecificationError
from conformance.mutants.catalogue import load_mutants
from conformance.run.report import JudgedSubject
from conformance.spec.catalogue import load_catalogue
from conformance.suite import load_scenarios
from conformance.tests.reports_by_hand import FAIL, HANG, PASS, outcome, stored
from workshop.behaviour_rows import Behaviour, load_behaviours
from workshop.behaviours import behaviours_page


@pytest.mark.parametrize("row", load_behaviours(), ids=lambda row: row.name)
def test_every_row_has_requirements_with_scenarios(row: Behaviour) -> None:
    catalogue = load_catalogue()
    assert row.requirements, f"no requirement holds a DDP to {row.name!r}"
    for requirement in row.requirements:
        assert requirement in catalogue
    covered = {one for scenario in load_scenarios() for one in scenario.requirements}
    assert set(row.requirements) <= covered


@pytest.mark.parametrize(
    "row", [row for row in load_behaviours() if row.section == "systems"], ids=lambda row: row.name
)
def test_value_and_purpose_of_every_system_can_fail(row: Behaviour) -> None:
    noticed = {kill.requirement for mutant in load_mutants() for kill in mutant.kills}
    covered = {one for scenario in load_scenarios() for one in scenario.requirements}
    assert row.purpose
    assert row.purpose_requirements, f"nothing shows what {row.name!r} is for"
    assert noticed & set(row.requirements), f"no mutant shows that a requirement on {row.name!r} can fail"
    assert set(row.purpose_requirements) <= covered & noticed, f"{row.name!r}: a requirement without scenario or mutant"


def test_names_of_rows_are_used_once() -> None:
    names = [row.name for row in load_behaviours()]
    assert len(names) == len(set(names))


def test_a_row_with_a_misspelt_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.toml"
    file.write_text('[[behaviour]]\nsection = "systems"\nname = "x"\npromise = ""\nsources = []\nrequirement = []\n')
    with pytest.raises(SpecificationError, match=r"rows.toml, row 1: 'requirements'"):
        load_behaviours(file)
    file.write_text('[[behaviour]]\nsection = "other"\nname = "x"\npromise = ""\nsources = []\nrequirements = []\n')
    with pytest.raises(SpecificationError, match="row 1: section is 'other', expected systems or reports"):
        load_behaviours(file)


def test_a_cell_counts_what_came_to_the_worst_verdict(tmp_path: Path) -> None:
    row = Behaviour("systems", "averages", "The mean.", ("pytorch/pytorch#1",), ("GRAD-01", "GRAD-02"))
    report = stored(
        tmp_path,
        outcome("gradients/GRAD-01/a", PASS, native=PASS),
        outcome("gradients/GRAD-02/b", FAIL, native=PASS),
        outcome("buckets/BUCKET-01/c", HANG, native=HANG),
    )
    (line,) = [line for line in behaviours_page([row], [report]).splitlines() if line.startswith("| averages")]
    assert line.endswith("| GRAD-01, GRAD-02 | FAIL 1 of 2 | PASS |")
    more = stored(
        tmp_path, outcome("gradients/GRAD-01/a", PASS, native=PASS), outcome("gradients/GRAD-01/d", FAIL, FAIL)
    )
    page = behaviours_page([row], [report, more, dataclasses.replace(more, subject=JudgedSubject("other", "a:B"))])
    (line,) = [line for line in page.splitlines() if line.startswith("| averages")]
    assert line.endswith("| FAIL 2 of 3 | FAIL 1 of 3 | FAIL 1 of 2 |")
    assert "[#1](https://github.com/pytorch/pytorch/issues/1)" in line


def test_a_page_without_a_run_has_its_rows() -> None:
    row = Behaviour("systems", "averages", "The mean.", (), ("GRAD-01",))
    assert "| averages | The mean. | torch DDP docs | GRAD-01 |\n" in behaviours_page([row], [])
