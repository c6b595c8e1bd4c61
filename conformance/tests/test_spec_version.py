"""Versions of the specification: what they hold, what may change after them, and that a run can be limited to one."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.cli import main
from conformance.cli.run import Request, selected_by
from conformance.errors import SpecificationError
from conformance.report.headline import headline
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue, load_catalogue
from conformance.spec.version import (
    Changes,
    Erratum,
    Version,
    changes_since,
    digest_of,
    freeze,
    known_versions,
    load_errata,
    load_version,
    since,
    since_text,
    unexplained,
    version_text,
)
from conformance.suite import Selection, load_scenarios
from conformance.tests.reports_by_hand import outcome, run_report
from conformance.verdict import Verdict


def test_every_version_is_kept() -> None:
    catalogue, errata = load_catalogue(), load_errata()
    versions = [load_version(name) for name in known_versions()]
    assert [version.name for version in versions]
    assert [said for version in versions for said in unexplained(version, catalogue, errata)] == []
    frozen = {(version.name, requirement_id) for version in versions for requirement_id in version.digests}
    assert [one for one in errata if (one.version, one.id) not in frozen] == []


def altered(catalogue: Catalogue) -> Catalogue:
    """Return a catalogue whose first chapter lacks its first requirement, has a new one, and rewords another."""
    chapter = catalogue.chapters[0]
    _, second, *others = chapter.requirements
    new = replace(second, id=f"{chapter.prefix}-99")
    words = replace(second, statement="Every rank MUST agree.")
    return Catalogue((replace(chapter, requirements=(words, new, *others)), *catalogue.chapters[1:]))


def test_changes_after_a_release_need_an_erratum() -> None:
    catalogue = load_catalogue()
    first, second = (one.id for one in catalogue.chapters[0].requirements[:2])
    draft = freeze("7.1", catalogue)
    assert changes_since(draft, catalogue) == Changes((), (), ())
    later = altered(catalogue)
    assert changes_since(draft, later) == Changes((second,), (first,), (f"{catalogue.chapters[0].prefix}-99",))
    gone = f"{first} of specification 7.1 was removed, and errata.toml does not say why"
    words = f"{second} of specification 7.1 was reworded, and errata.toml does not say why"
    assert unexplained(draft, later, ()) == (gone,)
    released = replace(draft, released="2026-12-01")
    assert unexplained(released, later, ()) == (words, gone)
    said = [Erratum("7.1", first, "removed", "why"), Erratum("7.1", second, "reworded", "why")]
    assert unexplained(released, later, said) == ()
    assert unexplained(released, later, [replace(one, version="7.0") for one in said]) == (words, gone)


def test_how_lines_break_does_not_change_a_sentence() -> None:
    assert digest_of("A rank MUST\n    wait.") == digest_of("A rank MUST wait.") != digest_of("A rank MAY wait.")


def test_a_version_is_read_as_it_was_written(tmp_path: Path) -> None:
    version = Version("7.1", "", {"GRAD-01": digest_of("one"), "GRAD-02": digest_of("two")})
    (tmp_path / "7.1.toml").write_text(version_text(version))
    assert load_version("7.1", tmp_path) == version


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("released = ", "not valid TOML"),
        ('[requirements]\nGRAD-01 = "1"', "expected `released`"),
        ('released = ""\n[requirements]', "a digest for each of at least one id"),
        ('released = ""\n[requirements]\nGRAD-01 = 1', "a digest for each of at least one id"),
    ],
)
def test_a_malformed_version_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "7.1.toml").write_text(text)
    with pytest.raises(SpecificationError, match=message):
        load_version("7.1", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[eratum]]", "errata are written"),
        ('[[erratum]]\nid = "GRAD-01"', "erratum 1: expected a text for each of id, kind, version, why"),
        ('[[erratum]]\nid="A-01"\nkind="moved"\nversion="7.1"\nwhy="so"', "must be one of reworded, removed"),
    ],
)
def test_malformed_errata_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "errata.toml").write_text(text)
    with pytest.raises(SpecificationError, match=message):
        load_errata(tmp_path / "errata.toml")


def test_a_run_can_be_limited_to_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = selected_by(Request(Selection()))
    whole = freeze("7.1", load_catalogue())
    monkeypatch.setattr("conformance.cli.run.load_version", {"7.1": without(whole, "GRAD-01"), "7.0": whole}.get)
    assert selected_by(Request(Selection(), spec="7.0")) == everything
    earlier = selected_by(Request(Selection(), spec="7.1"))
    assert earlier == tuple(one for one in everything if "GRAD-01" not in one.requirements) != everything


def without(version: Version, requirement_id: str) -> Version:
    return replace(version, digests={one: text for one, text in version.digests.items() if one != requirement_id})


@pytest.mark.parametrize("name", known_versions())
def test_each_version_still_has_a_scenario_for_each_requirement(name: str) -> None:
    version, catalogue = load_version(name), load_catalogue()
    exercised = {each for one in version.scenarios(load_scenarios()) for each in one.requirements}
    wanted = {one.id for one in catalogue if one.testable and one.id in version.digests}
    assert wanted - exercised == set()


def test_a_requirement_is_as_old_as_the_first_version_that_holds_it() -> None:
    versions = [Version("1.0", "", {"GRAD-01": ""}), Version("1.1", "", {"GRAD-01": "", "GRAD-02": ""})]
    assert [since(one, versions) for one in ("GRAD-01", "GRAD-02", "GRAD-03")] == ["1.0", "1.1", ""]
    assert since_text("GRAD-03", versions) == "in no version of the specification yet"


def test_versions_are_counted_as_numbers(tmp_path: Path) -> None:
    for name in ("1.10", "1.9", "2.0"):
        (tmp_path / f"{name}.toml").touch()
    assert known_versions(tmp_path) == ("1.9", "1.10", "2.0")


def test_a_certified_run_is_by_the_newest_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def judge(request: Request, *_: object) -> int:
        asked.append(request)
        return 0

    monkeypatch.setattr("conformance.cli.run.judge_selection", judge)
    for arguments in (["--certified"], ["--certified", "--spec", "0.9"], []):
        CliRunner().invoke(main, ["run", "--profile", "core", "--report", str(tmp_path), *arguments])
    assert [request.spec for request in asked] == [known_versions()[-1], "0.9", ""]


def test_an_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(SpecificationError, match=r"unknown version '3\.9' of the specification; known: 1\.0"):
        selected_by(Request(Selection(), spec="3.9"))


def test_a_report_names_the_version() -> None:
    report = run_report(outcome("gradients/GRAD-01/mlp", Verdict.PASS))
    assert "specification" not in headline(report)
    for certified in (False, True):
        assert "(specification 1.0)" in headline(replace(report, specification="1.0", certified=certified))


def test_a_scenario_of_a_later_requirement_is_of_no_earlier_version() -> None:
    old = Scenario("gradients/GRAD-01/old", ("GRAD-01",), "train", world_size=2)
    both = Scenario("gradients/GRAD-01/both", ("GRAD-01", "GRAD-02"), "train", world_size=2)
    assert Version("7.1", "", {"GRAD-01": ""}).scenarios([old, both]) == (old,)
