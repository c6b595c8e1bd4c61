"""Known failures: what counts as met, what the file may say, and how a report updates it."""

import contextlib
import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from conformance.cli import main
from conformance.errors import KnownFailureError
from conformance.report.read import read_report
from conformance.run.baseline import is_baseline, read_baseline
from conformance.run.known_failures import (
    EXPECTABLE,
    EXPIRED,
    MET,
    UNEXPECTED_PASS,
    UNEXPECTED_VERDICT,
    Circumstances,
    KnownFailure,
    check_names,
    excuse_for,
    known_failures_to_toml,
    read_known_failures,
    updated,
)
from conformance.tests.reports_by_hand import outcome, stored
from conformance.verdict import Verdict

PASS, FAIL, HANG, CRASH = Verdict.PASS, Verdict.FAIL, Verdict.HANG, Verdict.CRASH
TODAY = datetime.date(2027, 1, 15)
HERE = Circumstances("torch", "gloo", "cpu", "2.13.0+cpu")
KNOWN = KnownFailure("gradients/GRAD-02/*", FAIL, "known", "https://example.org/1", TODAY)
ENTRY = """
[[expectation]]
scenarios = "gradients/GRAD-02/*"
verdict = "FAIL"
reason = "known"
issue = "https://example.org/1"
expires = 2027-01-15
"""


def status(entry: KnownFailure, verdict: Verdict, today: datetime.date = TODAY, world_size: int = 2) -> str | None:
    found = excuse_for([entry], HERE, today, "gradients/GRAD-02/mlp", world_size, verdict)
    return found.status if found is not None else None


def test_only_the_expected_verdict_meets_an_expectation() -> None:
    for verdict in Verdict:
        wanted = MET if verdict is FAIL else UNEXPECTED_PASS if verdict is PASS else UNEXPECTED_VERDICT
        assert status(KNOWN, verdict) == wanted


def test_the_last_day_counts_and_the_day_after_is_a_failure() -> None:
    assert status(KNOWN, FAIL, TODAY) == MET
    assert status(KNOWN, FAIL, TODAY + datetime.timedelta(days=1)) == EXPIRED
    assert status(KNOWN, PASS, TODAY + datetime.timedelta(days=1)) == EXPIRED


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"subject": "torch"}, True),
        ({"subject": "ddp_impl"}, False),
        ({"backend": "nccl"}, False),
        ({"device": "cuda"}, False),
        ({"torch": ">=2.11,<2.14"}, True),
        ({"torch": ">=2.14"}, False),
        ({"torch": "==2.13.0"}, True),
        ({"world_size": (2, 4)}, True),
        ({"world_size": (3,)}, False),
        ({"subject": "torch", "backend": "nccl"}, False),
    ],
)
def test_an_expectation_applies_when_all_its_conditions_hold(condition: dict[str, Any], holds: bool) -> None:
    assert status(dataclasses.replace(KNOWN, **condition), FAIL) == (MET if holds else None)


def test_two_expectations_for_one_scenario_are_refused() -> None:
    with pytest.raises(KnownFailureError, match="is named by 2 expectations that hold here"):
        excuse_for([KNOWN, KNOWN], HERE, TODAY, "gradients/GRAD-02/mlp", 2, FAIL)


def test_an_expectation_turns_failures_around() -> None:
    for verdict, failure in ((FAIL, False), (PASS, True), (HANG, True)):
        known = excuse_for([KNOWN], HERE, TODAY, "gradients/GRAD-02/mlp", 2, verdict)
        one = outcome("gradients/GRAD-02/mlp", verdict, excuse=known)
        assert (one.is_failure, one.replay is not None) == (failure, failure)
    met = excuse_for([KNOWN], HERE, TODAY, "gradients/GRAD-02/mlp", 2, FAIL)
    assert outcome("gradients/GRAD-02/mlp", FAIL, Verdict.HARNESS_ERROR, excuse=met).is_failure


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY.replace('"FAIL"', '"PASS"'), "verdict must be one of FAIL, HANG, CRASH, got 'PASS'"),
        (ENTRY.replace('"FAIL"', '"HARNESS_ERROR"'), "verdict must be one of FAIL, HANG, CRASH"),
        (ENTRY.replace("2027-01-15", '"2027-01-15"'), "expires must be a date such as 2027-06-30, got '2027-01-15'"),
        (ENTRY.replace("2027-01-15", "2027-01-15T00:00:00"), "expires must be a date"),
        (ENTRY.replace('"known"', '" "'), "reason must be a non-empty string"),
        (ENTRY.replace("issue", "isue"), "unknown key 'isue'; did you mean issue?"),
        (ENTRY.replace('issue = "https://example.org/1"', ""), "missing key(s): issue"),
        (ENTRY + 'torch = "2.13"', "torch must be a range such as '>=2.11,<2.14'"),
        (ENTRY + "world_size = 0", "world_size must be an integer >= 1 or a list of them, got 0"),
        (ENTRY + "world_size = []", "world_size must be an integer"),
        (ENTRY + "world_size = [true]", "world_size must be an integer"),
        (ENTRY[:60], "not valid TOML"),
        ("deep = " + "[" * 20_000 + "]" * 20_000, "not valid TOML"),
        ("[expectation]\nscenarios = 'x'", "with two brackets"),
        ("[[expectations]]\nscenarios = 'x'", "unknown table or key 'expectations'"),
        ("expectation = [1]", "expectation 1: expected a table, got int"),
    ],
)
def test_a_malformed_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(KnownFailureError) as caught:
        read_known_failures(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["[" * 20_000, "9" * 5_000])
def test_what_no_parser_takes_is_no_toml(value: str) -> None:
    text = f"backend = {value}"
    assert not is_baseline(text)
    for read in (read_baseline, read_known_failures):
        with pytest.raises(KnownFailureError, match="not valid TOML"):
            read(text)


def test_an_entry_that_names_nothing_is_an_error() -> None:
    sizes = {"gradients/GRAD-02/mlp": 2}
    check_names([KNOWN], sizes)
    with pytest.raises(KnownFailureError, match=r"'gradients/GRAD-03/\*' matches no scenario"):
        check_names([dataclasses.replace(KNOWN, scenarios="gradients/GRAD-03/*")], sizes)
    with pytest.raises(KnownFailureError, match="matches no scenario at world size 4; did you mean"):
        check_names([dataclasses.replace(KNOWN, world_size=(4,))], sizes)


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(
    st.builds(
        KnownFailure,
        scenarios=text.filter(lambda value: "\n" not in value and "\r" not in value),
        verdict=st.sampled_from(EXPECTABLE),
        reason=text,
        issue=text,
        expires=st.dates(),
        subject=st.just("") | text,
        torch=st.sampled_from(["", ">=2.11,<2.14"]),
        world_size=st.lists(st.integers(1, 8), max_size=3).map(tuple),
    )
)
def test_what_is_written_is_read_back(entry: KnownFailure) -> None:
    assert read_known_failures(known_failures_to_toml([entry, KNOWN])) == (entry, KNOWN)


SIZES = {f"gradients/GRAD-02/{name}": 2 for name in "abc"} | {"buckets/BUCKET-01/a": 2}


def new(scenario_id: str, verdict: Verdict) -> KnownFailure:
    return dataclasses.replace(KNOWN, scenarios=scenario_id, verdict=verdict, reason="new")


def test_an_update_narrows_what_is_contradicted_and_keeps_the_rest() -> None:
    verdicts = {"gradients/GRAD-02/a": FAIL, "gradients/GRAD-02/b": PASS, "buckets/BUCKET-01/a": HANG}
    elsewhere = dataclasses.replace(KNOWN, backend="nccl")
    after = updated([KNOWN, elsewhere], HERE, verdicts, SIZES, new)
    assert after == (
        dataclasses.replace(KNOWN, scenarios="gradients/GRAD-02/a"),
        dataclasses.replace(KNOWN, scenarios="gradients/GRAD-02/c"),  # was not run, so nothing speaks against it
        elsewhere,
        new("buckets/BUCKET-01/a", HANG),
    )
    for id_, verdict in verdicts.items():
        found = excuse_for(after, HERE, TODAY, id_, 2, verdict)
        assert (found.status if found is not None else "none") == ("none" if verdict is PASS else MET)
    assert updated(after, HERE, verdicts, SIZES, new) == after


def test_a_changed_verdict_keeps_reason_and_expiry() -> None:
    entry = dataclasses.replace(KNOWN, scenarios="gradients/GRAD-02/a")
    after = updated([entry], HERE, {"gradients/GRAD-02/a": CRASH}, SIZES, new)
    assert after == (dataclasses.replace(entry, verdict=CRASH),)


ALONE, SCENARIO = "gradients/GRAD-01/mlp-world1", "gradients/GRAD-01/mlp-world2"  # who is alone has nobody to miss
SUBJECT = "conformance.tests.subjects:Unsynchronised"


def run(folder: Path, expectations: str, *arguments: str) -> Result:
    (folder / "expectations.toml").write_text(expectations)
    file = str(folder / "expectations.toml")
    return CliRunner().invoke(
        main, ["run", ALONE, SCENARIO, "--report", str(folder), "--expectations", file, *arguments]
    )


def entry_for(scenarios: str, expires: str = "2999-01-01") -> str:
    return ENTRY.replace("gradients/GRAD-02/*", scenarios).replace("2027-01-15", expires)


@pytest.mark.parametrize(
    ("expires", "subject", "exit_code", "said"),
    [
        ("2999-01-01", SUBJECT, 0, "Nothing failed that was not expected to."),
        ("2001-01-01", SUBJECT, 1, "until 2001-01-01, which is past"),
        ("2999-01-01", "torch", 1, "it passed, but FAIL was expected"),
    ],
)
@pytest.mark.usefixtures("lent_zygote")
def test_a_run_with_expectations(tmp_path: Path, expires: str, subject: str, exit_code: int, said: str) -> None:
    result = run(tmp_path, entry_for(SCENARIO, expires), "--ddp", subject, "--no-native")
    assert result.exit_code == exit_code, result.output
    assert said in " ".join(result.stdout.split())
    report = read_report(tmp_path)
    assert report.green == report.is_green == (exit_code == 0)


def test_stale_expectations_stop_a_run_before_it_starts(tmp_path: Path) -> None:
    result = run(tmp_path, entry_for("gradients/GRAD-01/nowhere"))
    assert result.exit_code == 2
    assert "'gradients/GRAD-01/nowhere' matches no scenario" in result.stderr
    assert not (tmp_path / "report.json").exists()
    assert "is named by 2 expectations" in run(tmp_path, entry_for(SCENARIO) + entry_for("gradients/GRAD-01/*")).stderr


def test_expectations_are_updated_from_a_report(tmp_path: Path) -> None:
    stored(tmp_path, outcome("gradients/GRAD-02/mlp", FAIL), outcome("gradients/GRAD-01/mlp", PASS))
    file = tmp_path / "expectations.toml"
    command = ["report", "expectations", str(tmp_path), "--update-expectations", str(file)]
    refused = CliRunner().invoke(main, command)
    assert (refused.exit_code, file.exists()) == (2, False)
    assert "gradients/GRAD-02/mlp came to FAIL and no entry" in refused.stderr
    given_ = ["--reason", "known", "--issue", "#1", "--expires", "2999-01-01"]
    assert "1 entries, 1 of them new" in CliRunner().invoke(main, [*command, *given_]).stdout
    (entry,) = read_known_failures(file.read_text())
    assert (entry.scenarios, entry.verdict, entry.subject) == ("gradients/GRAD-02/mlp", FAIL, "ddp_impl")
    assert "1 entries, 0 of them new" in CliRunner().invoke(main, command).stdout


@given(st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    text = bytearray((ENTRY * 2).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        text[start : start + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=4))
    with contextlib.suppress(KnownFailureError):
        read_known_failures(text.decode(errors="replace"))
