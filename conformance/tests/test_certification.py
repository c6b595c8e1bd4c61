"""Certificates: a whole profile is accepted, and whatever was taken away, added or changed is noticed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.cli import main
from conformance.errors import ReportError, SpecificationError
from conformance.report import certificate as certification
from conformance.report.certificate import changed_files, objections, verify, write_checksums
from conformance.report.folder import CHECKSUMS
from conformance.run.known_failures import Excuse
from conformance.run.report import Assignment, Report
from conformance.spec.catalogue import load_catalogue
from conformance.spec.profile import in_profile
from conformance.spec.version import Version
from conformance.suite import load_scenarios
from conformance.tests.reports_by_hand import (
    CATALOGUE,
    FAIL,
    PASS,
    RATIOS,
    UNKNOWN,
    UNSUPPORTED,
    outcome,
    scenario,
    stored,
)
from conformance.verdict import Verdict

IDS = ("gradients/GRAD-01/a", "gradients/GRAD-01/b", "buckets/BUCKET-01/a")
CORE = tuple(outcome(id_, PASS, PASS) for id_ in IDS)
PROFILES = dict.fromkeys(("core", "full"), tuple(map(scenario, IDS)))


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certification, "package_version", lambda name: "0.1.0")
    monkeypatch.setattr(certification, "hash_of_suite", lambda: "a")


def certificate(folder: Path, *verdicts: Verdict) -> Report:
    outcomes = [outcome(id_, verdict) for id_, verdict in zip(IDS, verdicts, strict=True)] if verdicts else CORE
    report = stored(folder, *outcomes, selection=Assignment("core", "", IDS), certified=True)
    write_checksums(folder)
    return report


def test_a_certificate_is_accepted(tmp_path: Path) -> None:
    report = certificate(tmp_path)
    assert verify(tmp_path, lambda: PROFILES) == verify(tmp_path / "report.json", lambda: PROFILES) == report
    assert report.is_green


def test_a_certificate_of_a_version_holds_its_scenarios_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = dataclasses.replace(certificate(tmp_path), specification="1.0")
    assert objections(report, PROFILES) == ()
    monkeypatch.setattr(certification, "load_version", lambda name: Version(name, "", {"GRAD-01": ""}))
    assert "1 scenario(s) are not in profile core: buckets/BUCKET-01/a" in "; ".join(objections(report, PROFILES))


def test_a_failing_certificate_is_valid_and_not_green(tmp_path: Path) -> None:
    certificate(tmp_path, PASS, FAIL, PASS)
    assert not verify(tmp_path, lambda: PROFILES).is_green


def test_one_changed_byte_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    certificate(tmp_path, PASS, FAIL, PASS)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".txt", ""}
    for path in files:
        original = path.read_bytes()
        for position in range(0, len(original), max(1, len(original) // 40)):
            path.write_bytes(original[:position] + bytes([original[position] ^ 1]) + original[position + 1 :])
            with pytest.raises(ReportError):
                verify(tmp_path, lambda: PROFILES)
        path.write_bytes(original)
    verify(tmp_path, lambda: PROFILES)


def _changed(folder: Path) -> tuple[str, ...]:
    return changed_files(folder, (folder / "report.json").read_bytes())


def test_added_and_removed_files_are_noticed(tmp_path: Path) -> None:
    certificate(tmp_path, PASS, FAIL, PASS)
    (tmp_path / "failures" / "note.txt").write_text("all is well")
    assert _changed(tmp_path) == ("failures/note.txt is in the folder, but not in the checksums",)
    (tmp_path / "failures" / "note.txt").unlink()
    next((tmp_path / "failures").glob("*.txt")).unlink()
    assert "is in the checksums, but not in the folder" in _changed(tmp_path)[0]
    (tmp_path / CHECKSUMS).unlink()
    with pytest.raises(ReportError, match="was the run certified"):
        verify(tmp_path, lambda: pytest.fail("read all scenarios first"))


@pytest.mark.parametrize("change", [{"lower": 1.6}, {"upper": 1.4}, {"lower": 0.0}, {"rounds": 0}, {"median": -1.5}])
def test_ratios_that_cannot_be_are_no_certificate(tmp_path: Path, change: dict[str, Any]) -> None:
    report = dataclasses.replace(certificate(tmp_path), performance=RATIOS)
    assert objections(report, PROFILES) == ()
    wrong = dataclasses.replace(report, performance=(dataclasses.replace(RATIOS[0], **change), RATIOS[1]))
    said = "1 ratio(s) of step times cannot be: a model default torch's default 2"
    assert objections(wrong, PROFILES) == (said,)


def test_a_certificate_is_of_the_listed_order(tmp_path: Path) -> None:
    report = certificate(tmp_path)
    shuffled = dataclasses.replace(report, selection=dataclasses.replace(report.selection, order="shuffled"))
    assert objections(shuffled, PROFILES) == ("its scenarios ran shuffled, not in their order",)


Change = Callable[[Report], Report]


def without_a_scenario(report: Report) -> Report:
    return dataclasses.replace(report, scenarios=report.scenarios[1:])


def with_another_seed(report: Report) -> Report:
    first = dataclasses.replace(report.scenarios[0], sha256="0" * 64)
    return dataclasses.replace(report, scenarios=(first, *report.scenarios[1:]))


def with_a_nicer_verdict(report: Report) -> Report:
    first = report.scenarios[0]
    findings = tuple(dataclasses.replace(one, verdict=FAIL) for one in first.subject.findings)
    first = dataclasses.replace(first, subject=dataclasses.replace(first.subject, findings=findings))
    return dataclasses.replace(report, scenarios=(first, *report.scenarios[1:]))


def with_an_excuse(report: Report) -> Report:
    first = dataclasses.replace(report.scenarios[0], expectation=Excuse("met", FAIL, "r", "i", "2999-01-01"))
    return dataclasses.replace(report, scenarios=(first, *report.scenarios[1:]))


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        (without_a_scenario, "1 scenario(s) of profile core are missing: gradients/GRAD-01/a"),
        (without_a_scenario, "its totals do not count its scenarios"),
        (lambda report: dataclasses.replace(report, scenarios=report.scenarios * 2), "3 scenario(s) are listed twice"),
        (with_another_seed, "1 scenario(s) are not those of this release: gradients/GRAD-01/a"),
        (with_a_nicer_verdict, "the findings on gradients/GRAD-01/a do not give its verdict"),
        (with_an_excuse, "known failures excuse some of its scenarios"),
        (lambda report: dataclasses.replace(report, certified=False), "the run was not certified"),
        (lambda report: dataclasses.replace(report, interrupted=True), "the run was not completed"),
        (lambda report: dataclasses.replace(report, green=False), "it says green = false"),
        (lambda report: dataclasses.replace(report, environment={}), "the environment was not captured: python, "),
        (
            lambda report: dataclasses.replace(report, environment={**report.environment, "packages": {"torch": "2"}}),
            "it was made by ddp-conformance unknown; verify it with that release, not 0.1.0",
        ),
        (
            lambda report: dataclasses.replace(
                report, environment={**report.environment, "sources": {"suite": "other", "subject": "b"}}
            ),
            "it was made by a suite with other files than the one installed here",
        ),
        (
            lambda report: dataclasses.replace(report, selection=dataclasses.replace(report.selection, profile="gold")),
            "profile 'gold' does not exist",
        ),
        (
            lambda report: dataclasses.replace(report, specification="7.1"),
            "version '7.1' of the specification does not exist",
        ),
        (
            lambda report: dataclasses.replace(report, selection=dataclasses.replace(report.selection, shard="1/2")),
            "it holds one shard (1/2) of a run",
        ),
        (
            lambda report: dataclasses.replace(
                report, requirements=tuple(dataclasses.replace(one, subject=FAIL) for one in report.requirements)
            ),
            "what it says of GRAD-01 is not what its scenarios say",
        ),
    ],
)
def test_what_is_no_certificate_is_refused(tmp_path: Path, change: Change, objection: str) -> None:
    report = certificate(tmp_path)
    assert objections(report, PROFILES) == ()
    assert objection in "; ".join(objections(change(report), PROFILES))


@pytest.mark.parametrize("verdict", [UNSUPPORTED, UNKNOWN, Verdict.HARNESS_ERROR])
def test_a_scenario_without_a_verdict_on_the_subject_is_a_gap(tmp_path: Path, verdict: Verdict) -> None:
    certificate(tmp_path, PASS, verdict, PASS)
    with pytest.raises(ReportError, match=rf"1 scenario\(s\) say nothing of the subject: {IDS[1]} \({verdict.value}\)"):
        verify(tmp_path, lambda: PROFILES)


def test_profiles_beyond_full_stand_for_themselves() -> None:
    scenarios, catalogue = load_scenarios(), load_catalogue()
    for level, chapters in {
        "compiled": {"graph_split", "traced_reducer", "fusion"}, "parallel": {"tensor_parallel"},
    }.items():  # fmt: skip
        assert {one.chapter for one in in_profile(level, scenarios, catalogue)} == chapters


def test_profile_full_includes_core() -> None:
    scenarios = [scenario(f"{chapter.name}/{one.id}/x") for chapter in CATALOGUE.chapters
                 for one in chapter.requirements]  # fmt: skip
    ids = [one.id for one in scenarios]
    assert [one.id for one in in_profile("full", scenarios, CATALOGUE)] == ids
    assert [one.id for one in in_profile("core", scenarios, CATALOGUE)] == [ids[0], ids[2]]
    with pytest.raises(SpecificationError, match="unknown profile 'coer'; did you mean core"):
        in_profile("coer", scenarios, CATALOGUE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--certified needs a --profile"),
        (["--profile", "core", "GRAD-01"], "leave out 'GRAD-01'"),
        (["--profile", "core", "-k", "mlp"], "leave out -k mlp"),
        (["--profile", "core", "--no-native", "--shard", "1/2"], "leave out --shard, --no-native"),
        (["--profile", "core", "--expectations", "x.toml"], "leave out --expectations"),
        (["--profile", "core", "--fail-fast"], "leave out --fail-fast"),
        (["--profile", "coer"], "unknown profile 'coer'; did you mean core?"),
    ],
)
def test_a_certified_run_can_not_be_narrowed(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["run", "--certified", "--report", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_verify_at_the_command_line(tmp_path: Path) -> None:
    certificate(tmp_path)
    result = CliRunner().invoke(main, ["report", "verify", str(tmp_path)])
    assert result.exit_code == 2  # these scenarios are not those of the suite
    assert "scenario(s) of profile core are missing" in result.stderr
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "nowhere")]).exit_code == 2


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_shard_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str) -> None:
    monkeypatch.delattr("conformance.cli.run.load_scenarios")  # before the suite is read, which takes seconds
    result = CliRunner().invoke(main, ["run", "GRAD-01", "--shard", shard, "--report", str(tmp_path)])
    assert (result.exit_code, "--shard must be K/N" in result.stderr) == (2, True)
