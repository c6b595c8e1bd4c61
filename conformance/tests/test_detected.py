"""The file of what was detected: it is read back, and some of its rows are renewed without running all mutants."""

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.cli import main
from conformance.mutants import detector
from conformance.mutants.catalogue import Kill, Mutant, chosen, load_deviations, load_mutants
from conformance.mutants.detected import found_in, made_by_all, made_by_some, made_in, merged, not_tried, written
from conformance.mutants.detector import Detection, Fate, Found
from conformance.spec.catalogue import load_catalogue

CATALOGUE = load_catalogue()
MADE = made_by_all({"torch": "2.13.0"}, datetime.date(2030, 1, 2))


def mutant(name: str, *kills: Kill) -> Mutant:
    (known,) = (one for one in load_mutants() if one.name == name)
    return Mutant(name, known.target, known.of, kills)


FIRST = mutant("NoDivision", Kill("GRAD-01", "grad"), Kill("gradients/GRAD-02/a"), Kill("JOIN-10"))
SECOND = mutant("StaleBuffers", Kill("BUFFER-01"))
TORCH = Mutant("torch", "torch", "ddp_impl", (Kill("JOIN-12"), Kill("STATIC-01")))
FOUND = Found(
    (
        Detection(FIRST, FIRST.kills[0], Fate.KILLED),
        Detection(FIRST, FIRST.kills[1], Fate.SURVIVED),
        Detection(FIRST, FIRST.kills[2], Fate.INACTIVE),
        Detection(SECOND, SECOND.kills[0], Fate.KILLED),
    ),
    (Detection(TORCH, TORCH.kills[0], Fate.KILLED),),
    {"StaleBuffers": ("TRAIN-06",)},
)
TEXT = written(FOUND, MADE)


def test_what_was_written_is_read_back() -> None:
    assert found_in(TEXT, (FIRST, SECOND), TORCH) == FOUND
    assert made_in(TEXT) == MADE
    assert not_tried(FOUND, (FIRST, SECOND)) == ()


def test_a_mutant_and_a_kill_that_are_new_were_not_tried_and_those_that_are_gone_are_forgotten() -> None:
    more = mutant("NoDivision", Kill("GRAD-01", "grad"), Kill("GRAD-05"))
    other = mutant("DifferentBits", Kill("GRAD-02"))
    found = found_in(TEXT, (more, other), TORCH)
    assert [one.kill for one in found.detections] == [more.kills[0]]
    assert not_tried(found, (more, other)) == (more, other)


def test_what_ran_again_takes_the_place_of_what_was_there() -> None:
    again = Found(
        tuple(Detection(FIRST, kill, Fate.KILLED) for kill in FIRST.kills),
        (Detection(TORCH, TORCH.kills[0], Fate.SURVIVED), Detection(TORCH, TORCH.kills[1], Fate.KILLED)),
        {"NoDivision": ("TRAIN-01",)},
    )
    whole = merged(FOUND, again, (FIRST, SECOND))
    assert whole.detections == (*again.detections, FOUND.detections[3])
    assert whole.deviations == again.deviations
    assert whole.killers == {"StaleBuffers": ("TRAIN-06",), "NoDivision": ("TRAIN-01",)}


def test_the_file_says_that_some_of_its_rows_are_younger() -> None:
    once = made_by_some(MADE, {"torch": "2.14.0"}, datetime.date(2030, 2, 3))
    assert once == f"{MADE} Some rows were renewed later, the last on 2030-02-03, with torch 2.14.0."
    twice = made_by_some(once, {"torch": "2.15.0"}, datetime.date(2030, 3, 4))
    assert twice == f"{MADE} Some rows were renewed later, the last on 2030-03-04, with torch 2.14.0 and 2.15.0."
    assert made_by_some(twice, {"torch": "2.15.0"}, datetime.date(2030, 3, 4)) == twice


@pytest.fixture
def file(tmp_path: Path) -> Path:
    seen = tuple(Detection(one, kill, Fate.KILLED) for one in load_mutants() for kill in one.kills)
    torch = load_deviations()
    found = Found(seen, tuple(Detection(torch, kill, Fate.KILLED) for kill in torch.kills))
    file = tmp_path / "detected.toml"
    file.write_text(written(found, MADE))
    return file


@pytest.mark.parametrize(
    ("arguments", "renewed"),
    [
        (["NoDivision", "StaleBuffers"], ("NoDivision", "StaleBuffers")),
        (["--chapter", "buffers"], tuple(one.name for one in chosen((), "", CATALOGUE, "buffers"))),
    ],
)
def test_the_command_renews_the_rows_of_what_it_ran(
    file: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], renewed: tuple[str, ...]
) -> None:
    def survived(mutants: tuple[Mutant, ...], *_: Any, **__: Any) -> Found:
        """Pretend that nobody noticed any of them; no rank is started."""
        return Found(tuple(Detection(one, kill, Fate.SURVIVED) for one in mutants for kill in one.kills))

    old = tomllib.loads(file.read_text())
    monkeypatch.setattr(detector, "detect_all", survived)
    done = CliRunner().invoke(main, ["mutants", *arguments, "--into", str(file)])
    assert done.exit_code == 1, done.output  # what should have been killed was not

    new = tomllib.loads(file.read_text())
    assert old["killed"].keys() - new["killed"].keys() == {*renewed}
    assert new["killed"].items() <= old["killed"].items()
    assert {name: new["survived"][name] for name in renewed} == {name: old["killed"][name] for name in renewed}
    assert " Some rows were renewed later, the last on " in new["made"]
