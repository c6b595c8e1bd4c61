"""Profile quick: which scenarios it holds, that they kill what they are said to kill, and what is said of them."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.cli import main
from conformance.mutants import detector
from conformance.mutants.catalogue import Mutant, chosen
from conformance.mutants.detector import Detection, Fate, Found
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.profile import in_profile
from conformance.spec.quick import PROFILES, cover, load_kills, num_killed, quick, sentence, written
from conformance.suite import load_scenarios

CATALOGUE = load_catalogue()
FULL = in_profile("full", load_scenarios(), CATALOGUE)
QUICK = in_profile("quick", load_scenarios(), CATALOGUE)


@pytest.mark.parametrize(
    ("kills", "chosen"),
    [
        ({}, set()),
        ({"A": {}}, set()),
        ({"A": {"x": 1.0, "y": 0.5}}, {"y"}),
        ({"A": {"x": 1.0, "both": 1.2}, "B": {"y": 1.0, "both": 1.2}}, {"both"}),
        ({"A": {"x": 0.1, "both": 9.0}, "B": {"y": 0.1, "both": 9.0}}, {"x", "y"}),
        # `most` is the best to begin with, and of no use once `left` and `right` are there for others.
        (
            {
                "A": {"left": 1.0}, "B": {"left": 1.0, "most": 0.1}, "C": {"left": 1.0, "most": 0.1},
                "D": {"right": 1.0, "most": 0.1}, "E": {"right": 1.0},
            },
            {"left", "right"},
        ),
    ],
)  # fmt: skip
def test_the_cheapest_scenarios_that_kill_everything_are_chosen(
    kills: dict[str, dict[str, float]], chosen: set[str]
) -> None:
    assert cover(kills) == chosen


def touched_in_core(scenarios: Iterable[Scenario]) -> set[str]:
    return {name for one in scenarios for name in one.requirements if CATALOGUE.requirement(name).level == "core"}


def test_quick_is_a_part_of_full_that_kills_as_much_and_touches_each_requirement_of_core() -> None:
    kills = load_kills()
    assert tuple(one for one in FULL if one in QUICK) == QUICK
    forked = tuple(one for one in FULL if not one.apart)
    assert num_killed(QUICK, kills) == num_killed(forked, kills)
    assert touched_in_core(QUICK) == touched_in_core(forked)


def test_quick_is_useful_where_no_kill_is_known() -> None:
    cheap = quick(FULL, CATALOGUE, {})
    assert touched_in_core(cheap) == touched_in_core(FULL)
    assert len(cheap) <= len(touched_in_core(FULL))


@pytest.mark.parametrize("profile", PROFILES)
def test_the_stored_kills_are_of_the_mutants_and_scenarios_that_there_are(profile: str) -> None:
    kills = load_kills(profile)
    assert list(kills) == [mutant.name for mutant in chosen((), profile, CATALOGUE)]
    scenarios = in_profile(profile, load_scenarios(), CATALOGUE)
    assert {id_ for of_one in kills.values() for id_ in of_one} <= {scenario.id for scenario in scenarios}
    assert all(cpu_s > 0 for of_one in kills.values() for cpu_s in of_one.values())
    assert tomllib.loads(written({profile: kills})) == {profile: kills}


def test_most_mutants_are_known_to_be_killed() -> None:
    kills = load_kills()
    assert num_killed(QUICK, kills) >= 0.7 * len(kills)
    assert len(QUICK) <= 440  # at a quarter of a second of a processor each, and two of them: a minute


def test_quick_says_what_it_is_worth() -> None:
    result = CliRunner().invoke(main, ["list", "--profile", "quick"])
    assert result.exit_code == 0
    assert result.stdout.split() == [scenario.id for scenario in QUICK]
    assert result.stderr.strip() == sentence(QUICK, load_kills())
    assert f"to kill {num_killed(QUICK, load_kills())} of the {len(load_kills())} mutants" in result.stderr


def test_no_ddp_is_certified_at_quick() -> None:
    result = CliRunner().invoke(main, ["run", "--certified", "--profile", "quick"])
    assert result.exit_code == 2
    assert "certify core or full" in result.stderr


def test_what_killed_is_renewed_for_the_mutants_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (mutant.name for mutant in chosen((), "full", CATALOGUE)[:2])
    file = tmp_path / "kills.toml"
    before = {first: {FULL[0].id: 9.0}, second: {FULL[1].id: 0.5}, "LongGone": {FULL[0].id: 0.5}}
    file.write_text(written({"full": before}))

    def detect_all(mutants: tuple[Mutant, ...], *_: object, **__: object) -> Found:
        found = [Detection(one, one.kills[0], Fate.KILLED, FULL[2].id, 0.25) for one in mutants]
        return Found((*found, Detection(mutants[0], mutants[0].kills[0], Fate.KILLED, "backends/VALUE-01/x", 0.25)))

    monkeypatch.setattr(detector, "detect_all", detect_all)
    result = CliRunner().invoke(main, ["mutants", first, "--kills", str(file)])
    assert result.exit_code == 0, result.output
    kills = tomllib.loads(file.read_text())["full"]
    assert list(kills) == [mutant.name for mutant in chosen((), "full", CATALOGUE)]
    assert {name: of_one for name, of_one in kills.items() if of_one} == {
        first: {FULL[2].id: 0.25}, second: {FULL[1].id: 0.5},
    }  # fmt: skip
