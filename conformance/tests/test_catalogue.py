"""The catalogue: what it refuses, and the gate between requirements and scenarios."""

import json
from pathlib import Path

import pytest

from conformance.backends.backend import CAPABILITIES as OF_BACKENDS
from conformance.errors import ScenarioError, SpecificationError
from conformance.scenario import Scenario, Step
from conformance.spec.catalogue import Catalogue, load_catalogue, read_catalogue
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.profile import in_profile
from conformance.subjects.subject import CAPABILITIES
from conformance.suite import Selection, check_scenarios, load_scenarios

CHAPTER = """
[chapter]
name = "gradients"
title = "Gradients"
prefix = "GRAD"

[[requirement]]
id = "GRAD-01"
statement = "Every rank MUST hold the mean of the ranks' local gradients."
level = "core"
source = ["torch DDP docs"]

[[requirement]]
id = "GRAD-02"
statement = "A gradient MUST NOT depend on the bucket cap."
level = "full"
source = ["pytorch/pytorch#30509"]
"""


def catalogue_of(directory: Path, text: str, name: str = "gradients") -> Catalogue:
    (directory / name).mkdir(exist_ok=True)
    (directory / name / "requirements.toml").write_text(text)
    return read_catalogue(directory)


def test_a_chapter_is_read_as_values(tmp_path: Path) -> None:
    catalogue = catalogue_of(tmp_path, CHAPTER)
    assert [requirement.id for requirement in catalogue] == ["GRAD-01", "GRAD-02"]
    assert catalogue.requirement("GRAD-02").source == ("pytorch/pytorch#30509",)
    assert catalogue.requirement("GRAD-01").testable
    assert catalogue.chapter("gradients").title == "Gradients"
    assert len(catalogue) == 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('level = "core"\n', "", "requirement 1: missing key(s): level"),
        ('level = "core"', 'level = "core"\nsince = "0.1"', "requirement 1: unknown key(s): since"),
        ("level =", "levle =", "unknown key(s): levle; did you mean level?"),
        ('level = "core"', 'level = "gold"', "level must be one of core, full"),
        ("GRAD-02", "GRAD-01", "GRAD-01 is defined twice"),
        ('id = "GRAD-02"', 'id = "CONS-02"', "ids of this chapter look like GRAD-01"),
        ('id = "GRAD-02"', 'id = "GRAD-2"', "ids of this chapter look like GRAD-01"),
        ("MUST NOT", "does not", "a statement says MUST"),
        ('source = ["torch DDP docs"]', "source = []", "source must be a non-empty list"),
        ('level = "core"', 'level = "core"\ntestable = false', "needs a note"),
        ('level = "core"', "level = 0.1", "level must be a str, got 0.1"),
        ('name = "gradients"', 'name = "buckets"', "chapter is called 'buckets', but its folder 'gradients'"),
        ("[[requirement]]", "[[requirements]]", "unknown table(s): requirements"),
        ("[chapter]", "[chapter", "not valid TOML"),
    ],
)
def test_a_mistake_in_a_chapter_is_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in CHAPTER
    with pytest.raises(SpecificationError) as caught:
        catalogue_of(tmp_path, CHAPTER.replace(before, after))
    assert str(caught.value).startswith("gradients/requirements.toml: ")
    assert message in str(caught.value)


def test_a_chapter_may_stand_in_a_folder_with_others(tmp_path: Path) -> None:
    catalogue_of(tmp_path, CHAPTER)
    deeper = CHAPTER.replace('"gradients"', '"fusion"').replace("GRAD", "FUSE")
    (tmp_path / "compiled").mkdir()
    catalogue_of(tmp_path / "compiled", deeper, "fusion")
    assert [chapter.name for chapter in read_catalogue(tmp_path).chapters] == ["fusion", "gradients"]


def test_two_chapters_may_not_share_a_prefix(tmp_path: Path) -> None:
    catalogue_of(tmp_path, CHAPTER)
    with pytest.raises(SpecificationError, match="share the prefix GRAD"):
        catalogue_of(tmp_path, CHAPTER.replace('"gradients"', '"buckets"'), "buckets")


def test_an_unknown_id_gets_near_misses(tmp_path: Path) -> None:
    catalogue = catalogue_of(tmp_path, CHAPTER)
    with pytest.raises(SpecificationError, match=r"unknown requirement 'grad-1'; did you mean GRAD-0"):
        catalogue.requirement("grad-1")
    with pytest.raises(SpecificationError, match="did you mean gradients"):
        catalogue.chapter("gradient")


def scenario(scenario_id: str, *requirements: str, world_size: int = 2) -> Scenario:
    return Scenario(id=scenario_id, requirements=requirements, program="train", world_size=world_size)


def test_a_requirement_without_a_scenario_is_seen(tmp_path: Path) -> None:
    catalogue = catalogue_of(tmp_path, CHAPTER)
    assert [each.id for each in catalogue.uncovered([scenario("gradients/GRAD-01/a", "GRAD-01")])] == ["GRAD-02"]


def test_what_cannot_be_tested_needs_no_scenario(tmp_path: Path) -> None:
    untestable = CHAPTER.replace('level = "full"', 'level = "full"\ntestable = false\nnote = "needs two machines"')
    catalogue = catalogue_of(tmp_path, untestable)
    assert [requirement.id for requirement in catalogue.uncovered([])] == ["GRAD-01"]


@pytest.mark.parametrize(
    ("scenarios", "message"),
    [
        ([scenario("gradients/GRAD-01", "GRAD-01")], "must read <chapter>/<REQUIREMENT-ID>/<slug>"),
        ([scenario("gradients/GRAD-01/a", "GRAD-01")] * 2, "two scenarios are called gradients/GRAD-01/a"),
        ([scenario("gradients/GRAD-01/a", "GRAD-02")], "not among its requirements"),
        ([scenario("gradients/GRAD-01/a", "GRAD-01", "GRAD-20")], "unknown requirement 'GRAD-20'"),
        ([scenario("gradient/GRAD-01/a", "GRAD-01")], "unknown chapter 'gradient'"),
    ],
)
def test_malformed_scenarios_are_refused(tmp_path: Path, scenarios: list[Scenario], message: str) -> None:
    with pytest.raises(SpecificationError) as caught:
        check_scenarios(scenarios, catalogue_of(tmp_path, CHAPTER))
    assert message in str(caught.value)


SCENARIOS = (
    scenario("gradients/GRAD-01/mlp", "GRAD-01"),
    scenario("gradients/GRAD-01/cnn", "GRAD-01", world_size=3),
    scenario("gradients/GRAD-02/mlp", "GRAD-02", "GRAD-01", world_size=3),
)


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        (Selection(), [0, 1, 2]),
        (Selection(chapters=("gradients",), world_sizes=(3,)), [1, 2]),
        (Selection(requirements=("GRAD-02",)), [2]),
        (Selection(names=("GRAD-01",), keyword="MLP"), [0, 2]),
        (Selection(keyword="MLP", one_per_requirement=True), [0, 2]),
        (Selection(names=("gradients/GRAD-01/*",), one_per_requirement=True), [0]),
        (Selection(names=("gradients/*/mlp",)), [0, 2]),
        (Selection(names=("gradients/GRAD-01/cnn", "GRAD-02")), [1, 2]),
    ],
)
def test_a_selection_is_the_intersection_of_its_parts(tmp_path: Path, selection: Selection, chosen: list[int]) -> None:
    expected = tuple(SCENARIOS[index] for index in chosen)
    assert selection.apply(SCENARIOS, catalogue_of(tmp_path, CHAPTER)) == expected


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(names=("GRAD-03",)), "'GRAD-03' is no chapter, requirement, scenario or glob of scenarios"),
        (Selection(requirements=("GRAD-3",)), "did you mean GRAD-0"),
        (Selection(chapters=("gradient",)), "did you mean gradients?"),
        (Selection(requirements=("GRAD-02",), world_sizes=(2,)), "no scenario matches --requirement GRAD-02 --world-"),
        (Selection(keyword="transformer"), "no scenario matches -k transformer"),
    ],
)
def test_a_selection_of_nothing_is_an_error(tmp_path: Path, selection: Selection, message: str) -> None:
    with pytest.raises((SpecificationError, ScenarioError)) as caught:
        selection.apply(SCENARIOS, catalogue_of(tmp_path, CHAPTER))
    assert message in str(caught.value)


def test_the_cheapest_scenario_stands_for_its_requirement() -> None:
    alone = scenario("gradients/GRAD-01/alone", "GRAD-01", world_size=1)
    long = scenario("gradients/GRAD-01/long", "GRAD-01").replace(schedule=(Step(), Step()))
    short = scenario("gradients/GRAD-01/short", "GRAD-01", "GRAD-03").replace(schedule=(Step(),))
    again = short.replace(id="gradients/GRAD-01/short-again")
    wide = scenario("gradients/GRAD-01/wide", "GRAD-01", world_size=4).replace(schedule=(Step(),))
    of_two = scenario("gradients/GRAD-02/only", "GRAD-02", "GRAD-01", world_size=1)
    assert one_per_requirement([of_two, alone, long, wide, short, again]) == (of_two, short)
    assert one_per_requirement([alone, wide]) == (wide,), "a single rank can tell little"
    assert one_per_requirement([alone]) == (alone,)


def test_no_requirement_is_without_one_that_stands_for_it() -> None:
    chosen = one_per_requirement(load_scenarios())
    assert load_catalogue().uncovered(chosen) == ()
    assert len(chosen) <= len(load_catalogue())


def test_every_testable_requirement_has_a_scenario() -> None:
    assert [requirement.id for requirement in load_catalogue().uncovered(load_scenarios())] == []


def test_no_scenario_is_another_one_by_another_name() -> None:
    ids: dict[str, str] = {}
    for scenario in load_scenarios():
        what = json.dumps(scenario.replace(id="a/b/c", requirements=("A-1",)).to_json(), sort_keys=True)
        assert ids.setdefault(what, scenario.id) == scenario.id


def test_scenarios_need_only_capabilities_that_somebody_can_declare() -> None:
    """A mistyped one would be UNSUPPORTED everywhere, and nobody would ever know."""
    declarable = CAPABILITIES | OF_BACKENDS
    needed = {need for scenario in load_scenarios() for need in scenario.needs}
    assert needed - declarable == set()


def test_what_a_backend_declares_is_judged_without_a_ddp() -> None:
    """Else a backend could declare it, do it wrong, and pass. Streams are judged by chapter devices alone."""
    scenarios = in_profile("backend", load_scenarios(), load_catalogue())
    judged = {need for scenario in scenarios for need in scenario.needs} - {"streams"}
    assert judged == OF_BACKENDS - {"streams"}
