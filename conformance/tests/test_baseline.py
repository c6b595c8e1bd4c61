"""Baselines: what torch's own DDP breaks is excused, whatever becomes of it, and nothing else."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.cli import main
from conformance.cli.known_failures import excuses_from, excuses_of
from conformance.errors import KnownFailureError
from conformance.report.read import read_report
from conformance.run.baseline import (
    ALONE,
    FOLDER,
    Baseline,
    Broken,
    baseline_of,
    baseline_to_toml,
    check_baseline,
    read_baseline,
    shipped_baseline,
    union,
)
from conformance.run.environment import package_version
from conformance.run.known_failures import FAILED_IN_MORE, MET, Circumstances
from conformance.run.outcome import Outcome
from conformance.spec.catalogue import load_catalogue
from conformance.suite import load_scenarios
from conformance.tests.reports_by_hand import CRASH, FAIL, HANG, HARNESS_ERROR, PASS, outcome, run_report, scenario
from conformance.verdict import Verdict

BROKEN = scenario("gradients/GRAD-02/mlp")
OTHER = scenario("gradients/GRAD-02/cnn")
BASELINE = Baseline("2.13.0", "gloo", (Broken("GRAD-02", "it is wrong", ("a source",), (BROKEN.id,)),))
HERE = Circumstances("torch", "acme", "cpu", "2.13.0+cpu")


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_scenario_that_torch_breaks_is_excused_whatever_failure_it_comes_to(verdict: Verdict) -> None:
    result = outcome(BROKEN, verdict).subject
    excuse = BASELINE.excuse(BROKEN, result)
    assert (excuse is not None and excuse.status == MET) is (verdict in (FAIL, HANG, CRASH))
    assert BASELINE.excuse(OTHER, result) is None


def failing(*words: str) -> Outcome:
    """Return the outcome of a scenario in which the things are wrong that `words` stand for."""
    found = outcome(BROKEN, FAIL)
    (finding,) = found.subject.findings
    told = dataclasses.replace(finding, likeness=" ".join(words), wrong=tuple(f"{word} is wrong" for word in words))
    return dataclasses.replace(found, subject=dataclasses.replace(found.subject, findings=(told,)))


def excused(baseline: Baseline, found: Outcome) -> bool:
    """Whether the baseline lets the run be green in spite of it."""
    excuse = baseline.excuse(BROKEN, found.subject)
    return excuse is not None and excuse.holds


def test_of_a_backend_by_itself_the_failures_that_are_known_are_excused_and_no_others() -> None:
    nights = [run_report(failing(each), subject="gloo", target="") for each in ("0a1b2c", "ffffff")]
    made = baseline_of(nights, load_catalogue(), {BROKEN.id: BROKEN.digest})
    assert read_baseline(baseline_to_toml(made)) == made
    assert '"mlp 0a1b2c ffffff"' in baseline_to_toml(made)
    assert excused(made, failing("ffffff"))
    assert excused(made, failing("ffffff", "0a1b2c"))
    assert not excused(made, failing("000000"))
    assert not excused(made, failing("ffffff", "000000"))
    assert not excused(made, outcome(BROKEN, HANG))
    one_night = baseline_of(nights[:1], load_catalogue(), {BROKEN.id: BROKEN.digest})
    assert not excused(one_night, failing("ffffff"))
    assert union(one_night, made, load_catalogue(), [BROKEN.id]).broken[0].ways == made.broken[0].ways


def test_a_new_mistake_beside_a_known_one_is_reported_first() -> None:
    known = baseline_of(
        [run_report(failing("0a1b2c"), subject="gloo", target="")], load_catalogue(), {BROKEN.id: BROKEN.digest}
    )
    result = failing("0a1b2c", "000000", "111111").subject
    excuse = known.excuse(BROKEN, result)
    assert excuse is not None
    assert excuse.status == FAILED_IN_MORE
    told = excuse.new_first(result)
    assert told.summary == "000000 is wrong"
    assert told.findings[0].explanation.splitlines()[:3] == [
        "New beside what was known to fail here:", "- 000000 is wrong", "- 111111 is wrong"
    ]  # fmt: skip
    same = failing("0a1b2c").subject
    excuse = known.excuse(BROKEN, same)
    assert excuse is not None
    assert excuse.new_first(same) is same


@pytest.mark.parametrize(
    "backend",
    [pytest.param("gloo", marks=pytest.mark.nightly), "conformance.chapters.backend.values.mutants:reduces_to_rank_0"],
)
def test_another_failure_in_a_scenario_that_gloo_breaks_is_new(tmp_path: Path, backend: str, lent_zygote: None) -> None:
    name = "values/VAL-05/reduce-world2"  # gloo leaves partial sums on other ranks than the root
    given = ["run", name, "--profile", "backend", "--baseline", "--backend", backend, "--report", str(tmp_path)]
    done = CliRunner().invoke(main, given)
    (found,) = read_report(tmp_path).scenarios
    assert found.subject.verdict is FAIL, done.output
    assert (found.is_excused, found.is_failure) == ((True, False) if backend == "gloo" else (False, True))


def test_a_baseline_holds_what_torch_broke_in_any_report_as_subject_or_beside_it() -> None:
    digests = {one.id: one.digest for one in (BROKEN, OTHER, scenario("gradients/GRAD-01/mlp"))}
    beside = run_report(outcome(BROKEN, PASS, FAIL), outcome(OTHER, FAIL, PASS), outcome("gradients/GRAD-01/mlp", PASS))
    alone = run_report(outcome(OTHER, HANG), outcome(BROKEN, HARNESS_ERROR), subject="torch")
    made = baseline_of([beside, alone], load_catalogue(), digests)
    assert [(one.requirement, one.scenarios) for one in made.broken] == [("GRAD-02", (OTHER.id, BROKEN.id))]
    assert made.broken[0].reason == "1 FAIL, 1 HANG of 2 scenarios, such as: it was FAIL"
    assert read_baseline(baseline_to_toml(made)) == made
    changed = baseline_of([beside], load_catalogue(), {**digests, BROKEN.id: "another scenario"})
    assert changed.broken == ()


def test_a_baseline_of_a_backend_by_itself_goes_onto_the_earlier_one_of_that_and_no_other() -> None:
    digests = {one.id: one.digest for one in (BROKEN, OTHER)}
    alone = baseline_of([run_report(outcome(OTHER, FAIL), subject="gloo", target="")], load_catalogue(), digests)
    assert (alone.backend, "gloo by itself" in baseline_to_toml(alone)) == (ALONE, True)
    earlier = dataclasses.replace(BASELINE, torch=alone.torch, backend=ALONE)
    assert [one.scenarios for one in union(earlier, alone, load_catalogue(), digests).broken] == [(OTHER.id, BROKEN.id)]
    with pytest.raises(KnownFailureError, match=r"over gloo, and torch .* over gloo-alone"):
        union(dataclasses.replace(earlier, backend="gloo"), alone, load_catalogue(), digests)


def test_a_baseline_holds_what_torch_breaks_now_and_then() -> None:
    unstable = dataclasses.replace(outcome(OTHER, PASS, None), contaminated_by=BROKEN.id)
    made = baseline_of([run_report(unstable, subject="torch")], load_catalogue(), {OTHER.id: OTHER.digest})
    assert [one.scenarios for one in made.broken] == [(OTHER.id,)]


def test_a_baseline_made_onto_another_keeps_what_that_has_and_still_exists() -> None:
    third = scenario("gradients/GRAD-01/mlp")
    earlier = Baseline("2.13.0", "gloo", (Broken("GRAD-02", "as before", (), ("gradients/GRAD-02/gone", BROKEN.id)),))
    later = Baseline(
        "2.13.0", "gloo", (Broken("GRAD-02", "anew", (), (OTHER.id,)), Broken("GRAD-01", "new", (), (third.id,)))
    )
    both = union(earlier, later, load_catalogue(), [BROKEN.id, OTHER.id, third.id])
    assert [(one.requirement, one.reason, one.scenarios) for one in both.broken] == [
        ("GRAD-01", "new", (third.id,)), ("GRAD-02", "as before", (OTHER.id, BROKEN.id)),
    ]  # fmt: skip
    whole = Baseline("2.13.0", "gloo", (Broken("GRAD-02", "of both", (), (OTHER.id, BROKEN.id)),))
    known = [BROKEN.id, OTHER.id, third.id]
    assert [one.reason for one in union(both, whole, load_catalogue(), known).broken] == ["new", "of both"]
    with pytest.raises(KnownFailureError, match=r"got torch 2\.13\.0 over gloo, and torch 2\.14\.0 over gloo"):
        union(earlier, Baseline("2.14.0", "gloo", ()), load_catalogue(), [])


def test_the_shipped_baselines_name_scenarios_that_exist() -> None:
    assert list(FOLDER.glob("*.toml"))
    for path in FOLDER.glob("*.toml"):
        baseline = read_baseline(path.read_text())
        assert path.stem == f"torch-{baseline.torch}-{baseline.backend}"
        check_baseline(baseline, [one.id for one in load_scenarios()])
        assert baseline_to_toml(baseline) == path.read_text()


def test_with_another_torch_the_message_says_how_to_make_its_baseline() -> None:
    with pytest.raises(KnownFailureError, match=r"no baseline for torch 1.0 over gloo .*report baseline torch --out"):
        shipped_baseline("1.0")


def test_a_baseline_is_about_torchs_ddp_alone() -> None:
    with pytest.raises(KnownFailureError, match="goes with --ddp torch, got --ddp ddp_impl"):
        excuses_of(BASELINE, Circumstances("ddp_impl", "gloo", "cpu", "2.13.0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[requirement]]", "a baseline says its torch"),
        ('torch = "2"\nbackend = "gloo"\n[[requirement]]\nid = "X"', "requirement X: an entry of a baseline has the"),
        ('torch = "2"\nrequirement = 3\nbackend = "gloo"', "with two brackets"),
        ('torch = "2"\nrequirement = []\nother = 1', "unknown table or key 'other'"),
        (baseline_to_toml(BASELINE).replace("mlp", "no-such"), "there is no scenario 'gradients/GRAD-02/no-such'"),
    ],
)
def test_a_mistake_in_a_baseline_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(KnownFailureError, match=r"mine.toml: ") as raised:
        excuses_from(tmp_path / "mine.toml", [BROKEN], HERE)
    assert message in str(raised.value)


@pytest.mark.nightly
def test_with_the_baseline_torchs_own_failures_are_expected(tmp_path: Path) -> None:
    known = shipped_baseline(package_version("torch")).broken
    names = [each for one in known for each in one.scenarios if each.startswith("unused/UNUSED-15/")][:2]
    ids = [*names, "gradients/GRAD-01/mlp-world2"]
    done = CliRunner().invoke(main, ["run", *ids, "--ddp", "torch", "--baseline", "--report", str(tmp_path)])
    assert (done.exit_code, "Nothing failed that was not expected to." in done.output) == (0, True), done.output


#: Backend -> how many scenarios of each requirement torch's DDP fails on it beyond what it fails on gloo.
FAULTS = {
    "gloo": {},
    "conformance.mutants.backends:FirstPage": {"GRAD-01": 20, "UNUSED-04": 3, "UNUSED-11": 8},
    "conformance.mutants.backends:HalfSums": {"GRAD-01": 20, "UNUSED-04": 3, "UNUSED-11": 10},
    "conformance.mutants.backends:DeafToBroadcast": {"BUFFER-01": 4, "GRAD-01": 2, "UNUSED-11": 1},
    "conformance.mutants.backends:LocalSparse": {"GRAD-01": 1, "UNUSED-11": 1},
}


@pytest.mark.nightly
@pytest.mark.parametrize("backend", FAULTS)
def test_with_a_baseline_torchs_ddp_shows_the_faults_of_the_backend_and_nothing_else(
    tmp_path: Path, backend: str
) -> None:
    names = ("GRAD-01", "BUFFER-01", "UNUSED-04", "UNUSED-11")
    narrow = ("--profile", "core", "--world-size", "2", "--report", str(tmp_path))
    result = CliRunner().invoke(main, ["run", *names, *narrow, "--ddp", "torch", "--baseline", "--backend", backend])
    assert result.exit_code == (1 if FAULTS[backend] else 0), result.output
    own = [one for one in read_report(tmp_path).scenarios if one.leading_requirement in names]
    assert Counter(one.leading_requirement for one in own if one.is_failure) == FAULTS[backend]
    assert sum(one.is_excused for one in own) == 2  # of UNUSED-04, which torch's DDP breaks on every backend
    assert ("Nothing failed that was not expected to." in result.output) is not bool(FAULTS[backend])
