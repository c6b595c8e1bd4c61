"""Reports: what is counted as what, what the files hold, and what the terminal shows."""

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import expecttest
import pytest
from click.testing import CliRunner
from rich.console import Console

from conformance.cli import main
from conformance.cli.run import failed_in
from conformance.errors import ReportError
from conformance.report.causes import cause_of, causes_of
from conformance.report.failure import advice_on, failure_text, replay_command, result_text, run_command
from conformance.report.folder import (
    add_failures_folder,
    begin_report,
    check_writable,
    keep_failure,
    sole_writer,
    write_failure,
    write_report,
)
from conformance.report.lines import print_evidence
from conformance.report.progress import ProgressBar, _Forecast
from conformance.report.terminal import print_failures, print_report, print_totals
from conformance.run.known_failures import MET, UNEXPECTED_PASS
from conformance.run.outcome import Note, Outcome, Progress, combine, combined_text, evidence_of
from conformance.run.report import Report, summarise
from conformance.scenario import Scenario, Step
from conformance.spec.catalogue import load_catalogue
from conformance.spec.cheapest import work
from conformance.suite import Selection
from conformance.tests import reports_by_hand as by_hand
from conformance.tests.reports_by_hand import (
    CAP,
    CATALOGUE,
    CRASH,
    FAIL,
    HANG,
    HARNESS_ERROR,
    MEAN,
    PASS,
    UNKNOWN,
    UNSUPPORTED,
)
from conformance.verdict import Finding, RankFate, ScenarioResult, Verdict


def outcome(
    scenario_id: str,
    verdict: Verdict,
    native: Verdict | None = None,
    *also: str,
    warm_ms: float = 0.0,
    notes: tuple[Note, ...] = (),
) -> Outcome:
    of = by_hand.scenario(scenario_id)
    of = of.replace(requirements=(*of.requirements, *also))
    return by_hand.outcome(of, verdict, native, ms=warm_ms, notes=notes, warm=warm_ms > 0)


def run_report(*outcomes: Outcome, missing: int = 0, interrupted: bool = False) -> Report:
    return by_hand.run_report(*outcomes, num_selected=len(outcomes) + missing, interrupted=interrupted, duration_s=12.5)


MIXED = run_report(
    outcome("gradients/GRAD-01/mlp", PASS, FAIL, warm_ms=8.0, notes=(Note("accuracy", 0.96875, "at least 0.95"),)),
    outcome("gradients/GRAD-01/cnn", PASS, PASS, warm_ms=20.0),
    outcome("gradients/GRAD-02/mlp", FAIL, PASS, "GRAD-01", warm_ms=12.0),
    outcome("gradients/GRAD-02/cnn", CRASH, UNSUPPORTED),
    outcome("buckets/BUCKET-01/mlp", PASS, PASS),
    outcome("buckets/BUCKET-01/cnn", UNSUPPORTED, UNSUPPORTED),
)


@pytest.mark.parametrize("scenario_id", ["../../x", "..", "/etc/x", "a/../../../b", "a\0b", "../failures", "\n"])
def test_a_failure_is_written_below_its_folder_whatever_its_id(tmp_path: Path, scenario_id: str) -> None:
    folder = tmp_path / "above" / "report"
    failed = dataclasses.replace(outcome("gradients/GRAD-02/mlp", FAIL), id=scenario_id)
    write_report(run_report(failed), CATALOGUE, folder)
    assert len(list((folder / "failures").iterdir())) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["failures", "report.json"]
    assert [path.name for path in tmp_path.rglob("*") if folder not in path.parents] == ["above", "report"]


@pytest.mark.parametrize(
    ("verdicts", "combined"),
    [
        ({PASS: 3}, PASS),
        ({PASS: 1, UNSUPPORTED: 8}, PASS),
        ({UNSUPPORTED: 2}, UNSUPPORTED),
        ({PASS: 5, UNKNOWN: 1}, UNKNOWN),
        ({PASS: 9, FAIL: 1, UNKNOWN: 3}, FAIL),
        ({FAIL: 9, HANG: 1}, HANG),
        ({CRASH: 1, HARNESS_ERROR: 1, PASS: 4}, HARNESS_ERROR),
    ],
)
def test_one_failure_outweighs_every_pass(verdicts: dict[Verdict, int], combined: Verdict) -> None:
    assert combine(verdicts) is combined


@pytest.mark.parametrize(
    ("report", "green"),
    [
        (run_report(outcome("gradients/GRAD-01/a", PASS, PASS)), True),
        (run_report(outcome("gradients/GRAD-01/a", PASS, FAIL)), True),  # torch's deviation, not the subject's
        (run_report(outcome("gradients/GRAD-01/a", PASS, HARNESS_ERROR)), False),
        (run_report(outcome("gradients/GRAD-01/a", PASS), outcome("gradients/GRAD-01/b", UNKNOWN)), True),
        (run_report(outcome("gradients/GRAD-01/a", UNSUPPORTED)), False),
        (run_report(outcome("gradients/GRAD-01/a", PASS), missing=1), False),
        (run_report(*(outcome(f"gradients/GRAD-01/{verdict}", verdict) for verdict in (PASS, HANG))), False),
        (run_report(), False),
    ],
)
def test_green_is_complete_and_something_passed_and_nothing_failed(report: Report, green: bool) -> None:
    assert report.is_green is green


def test_a_scenario_counts_for_every_requirement_that_it_names() -> None:
    mean, cap, order = MIXED.requirements
    assert (mean.id, mean.statement, mean.scenarios, mean.subject, mean.native) == (
        MEAN.id, MEAN.statement, 3, FAIL, FAIL,
    )  # fmt: skip
    assert (cap.scenarios, cap.subject, cap.native) == (2, CRASH, PASS)
    assert (order.scenarios, order.subject) == (2, PASS)
    assert run_report(outcome("gradients/GRAD-01/a", PASS)).requirements[0].native is None


def test_only_warm_scenarios_are_timed() -> None:
    assert MIXED.median_warm_scenario_ms == {"2": 12.0}


def test_the_json_report_holds_every_count(tmp_path: Path) -> None:
    data = json.loads(write_report(MIXED, CATALOGUE, tmp_path).read_text())
    assert data["schema_version"] == 1
    assert data["totals"]["subject"] == {
        "PASS": 3, "UNSUPPORTED": 1, "UNKNOWN": 0, "FAIL": 1, "HANG": 0, "CRASH": 1, "HARNESS_ERROR": 0,
    }  # fmt: skip
    assert (data["totals"]["selected"], data["totals"]["scenarios"], data["complete"], data["green"]) == (
        6,
        6,
        True,
        False,
    )
    assert [entry["subject"] for entry in data["requirements"]] == ["FAIL", "CRASH", "PASS"]
    assert data["scenarios"][0]["notes"] == [{"name": "accuracy", "value": 0.96875, "demand": "at least 0.95"}]
    assert data["scenarios"][0]["native"]["findings"][0]["summary"] == "it was FAIL"
    assert data["median_warm_scenario_ms"] == {"2": 12.0}


def test_a_number_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    notes = (Note("loss", float("nan"), "at most 1"),)
    path = write_report(run_report(outcome("gradients/GRAD-01/a", PASS, notes=notes)), CATALOGUE, tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert data["scenarios"][0]["notes"][0]["value"] == "nan"


def test_a_failure_is_a_scenario_file_with_its_explanation(tmp_path: Path) -> None:
    write_report(MIXED, CATALOGUE, tmp_path)
    names = sorted(path.name for path in (tmp_path / "failures").iterdir())
    assert names == [f"gradients.GRAD-02.{slug}.{kind}" for slug in ("cnn", "mlp") for kind in ("json", "txt")]
    file = tmp_path / "failures" / "gradients.GRAD-02.mlp.json"
    assert Scenario.loads(file.read_text()) == by_hand.scenario(
        "gradients/GRAD-02/mlp", requirements=("GRAD-02", "GRAD-01")
    )
    assert f"Replay  ddp-conformance replay {file}" in file.with_suffix(".txt").read_text()


def test_preparing_removes_what_an_earlier_run_left(tmp_path: Path) -> None:
    write_report(MIXED, CATALOGUE, tmp_path)
    (tmp_path / "mine.txt").write_text("not the report's")
    check_writable(tmp_path)
    assert (tmp_path / "report.json").exists()  # what was typed wrongly costs nothing
    begin_report(tmp_path, MIXED, ())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["failures", "mine.txt", "report.journal"]
    begin_report(tmp_path, MIXED, ())  # as after a run that was killed


def test_failures_that_another_command_wrote_are_not_removed(tmp_path: Path) -> None:
    add_failures_folder(tmp_path)
    write_failure(MIXED.scenarios[2], "ddp_impl", "gloo", CATALOGUE, tmp_path)
    with pytest.raises(ReportError, match=r"holds 2 file\(s\), such as failures/.*, and no report of a run"):
        begin_report(tmp_path, MIXED, ())
    assert len(list((tmp_path / "failures").iterdir())) == 2


def test_a_folder_that_is_removed_during_a_run_costs_no_verdict(tmp_path: Path) -> None:
    folder = tmp_path / "removed"
    text = keep_failure(MIXED.scenarios[2], "ddp_impl", "gloo", CATALOGUE, folder)
    assert len(list((folder / "failures").iterdir())) == 2
    (tmp_path / "file").touch()
    told = keep_failure(MIXED.scenarios[2], "ddp_impl", "gloo", CATALOGUE, tmp_path / "file")
    assert "could not be written" in told
    assert told.splitlines()[0] == text.splitlines()[0]


def test_what_failed_last_time_can_be_run_again(tmp_path: Path) -> None:
    write_report(MIXED, CATALOGUE, tmp_path)
    assert failed_in(tmp_path, Selection()).names == ("gradients/GRAD-02/mlp", "gradients/GRAD-02/cnn")
    with pytest.raises(ReportError, match="leave out the names"):
        failed_in(tmp_path, Selection(names=("gradients",)))
    write_report(run_report(outcome("gradients/GRAD-01/a", PASS)), CATALOGUE, tmp_path)
    with pytest.raises(ReportError, match="nothing failed in the report"):
        failed_in(tmp_path, Selection())


@pytest.mark.parametrize("name", ["report.json", "report.html", "SHA256SUMS"])
def test_files_that_no_run_wrote_are_not_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("my own notes")
    with pytest.raises(ReportError, match=f"such as {name}, and no report of a run"):
        begin_report(tmp_path, MIXED, ())
    assert (tmp_path / name).read_text() == "my own notes"


def test_evidence_comes_first_and_only_once() -> None:
    findings = (
        Finding("exercised", FAIL, "too quiet"),
        Finding("facts", FAIL, "a gradient is wrong", "Then  A is not 2."),
        Finding("agrees_with_native", FAIL, "unlike torch: a gradient is wrong", "Then  A is not 2."),
        Finding("no_hang", UNKNOWN, "no statement"),
        Finding("exercised", PASS, "3 collectives"),
    )
    failed = ScenarioResult("mine", FAIL, 1.0, 3, findings, ())
    assert result_text(MIXED.scenarios[0], failed, "gloo", CATALOGUE).splitlines()[3:] == [
        "      a gradient is wrong", "Then  A is not 2.", "Also  FAIL: too quiet",
    ]  # fmt: skip


def test_the_replay_command_names_what_is_not_the_default(tmp_path: Path) -> None:
    scenario_id = "gradients/GRAD-01/mlp"
    assert run_command(scenario_id, "ddp_impl", "gloo") == "ddp-conformance run gradients/GRAD-01/mlp"
    file = tmp_path / "failures" / "gradients.GRAD-01.mlp.json"
    expected = f"ddp-conformance replay {file} --ddp pkg:MyDDP --backend nccl"
    assert replay_command(scenario_id, "pkg:MyDDP", "nccl", tmp_path) == expected


def test_the_gravest_cause_comes_first_and_what_looks_alike_is_one() -> None:
    report = run_report(
        *(outcome(f"gradients/GRAD-01/{verdict.value}", verdict) for verdict in (FAIL, PASS)),
        *(outcome(f"buckets/BUCKET-01/{verdict.value}", verdict) for verdict in (FAIL, UNSUPPORTED)),
        *(outcome(f"gradients/GRAD-02/{verdict.value}", verdict) for verdict in (PASS, HANG, FAIL)),
    )  # fmt: skip
    assert [(one.verdict, one.extent) for one in causes_of(report)] == [
        (HANG, "1 scenario of GRAD-02"), (FAIL, "3 scenarios of BUCKET-01, GRAD-01, GRAD-02"),
    ]  # fmt: skip


def test_one_mistake_is_one_cause_and_what_is_lacking_stands_apart() -> None:
    left_out = Finding("facts", FAIL, "a gradient is wrong", mistake="no-sync-left-out")
    unrefused = Finding("facts", FAIL, "nothing was raised", mistake="lacks-check")
    missing = Finding("no_exception", FAIL, "every rank raised AttributeError: 'X' object has no attribute 'join'")
    report = run_report(
        _failed("gradients/GRAD-02/a", unrefused), _failed("gradients/GRAD-02/b", missing),
        _failed("gradients/GRAD-01/a", left_out), _failed("buckets/BUCKET-01/a", left_out),
    )  # fmt: skip
    assert [(one.kind.name, one.title, one.requirements) for one in causes_of(report)] == [
        ("BUG", "Gradients that backwards under `no_sync` accumulated are never averaged.", ("BUCKET-01", "GRAD-01")),
        ("LACKS_CHECK", "A call that must be refused is accepted.", ("GRAD-02",)),
        ("UNDECLARED", "It counts as having join and has no method join.", ("GRAD-02",)),
    ]  # fmt: skip
    assert causes_of(report)[2].remedy == 'Subject(..., capabilities=CAPABILITIES - {"join"})'


def test_ranks_that_hang_unrecorded_in_several_phases_are_one_cause() -> None:
    said = "rank 0 did not end: rank 0 is in phase {}"
    outcomes = [
        _failed(f"gradients/GRAD-02/{name}", Finding("no_hang", HANG, said.format(name)))
        for name in ("gather", "scatter")
    ]
    assert len(causes_of(run_report(*outcomes))) == 2
    for one in outcomes:
        assert one.replay is not None
    bare = [dataclasses.replace(one, replay={**(one.replay or {}), "recorded": False}) for one in outcomes]
    assert [one.extent for one in causes_of(run_report(*bare))] == ["2 scenarios of GRAD-02"]


def test_one_error_in_several_phases_is_one_cause() -> None:
    said = "rank 1 raised RuntimeError in phase {}: no route"
    report = run_report(
        *(_failed(f"gradients/GRAD-02/{name}", Finding("no_exception", FAIL, said.format(name)))
          for name in ("gather, at root 1", "scatter")),
    )  # fmt: skip
    assert [(one.title, one.extent) for one in causes_of(report)] == [
        (said.format("gather, at root 1"), "2 scenarios of GRAD-02")
    ]


@pytest.mark.parametrize(
    ("finding", "title"),
    [
        (Finding("facts", FAIL, "step1/seen/table on rank 1: ...", mistake="not-broadcast"),
         "A buffer is not broadcast from rank 0."),
        (Finding("facts", FAIL, "3.backward on rank 1: at 'parameter 0.weight' ...", mistake="not-broadcast"),
         "A parameter is not broadcast from rank 0."),
        (Finding("facts", FAIL, "step0/grad/w on rank 0: ...", mistake="never-reduced"),
         "A gradient is not averaged: every rank keeps its own."),
        (Finding("facts", FAIL, "step1/output on rank 0", mistake="wrong-dtype"), "An output has the wrong dtype."),
        (Finding("facts", FAIL, "answers on rank 0: ...", mistake="wrong-dtype"), "A value has the wrong dtype."),
        (Finding("facts", FAIL, "same_device on rank 0 is False"), "A gradient MUST be right, in place."),
        (Finding("no_exception", FAIL, "rank 0 raised KeyError: 'a'"), "rank 0 raised KeyError: 'a'"),
    ],
)  # fmt: skip
def test_a_title_says_what_is_wrong_and_no_raw_fact(finding: Finding, title: str) -> None:
    """What nobody recognised has the requirement's sentence, up to its colon and without what is in brackets."""
    statement = "A gradient (also of a tied weight) MUST be right, in place: bitwise; and soon."
    cause = cause_of(_failed("gradients/GRAD-02/a", finding), {"GRAD-02": statement})
    assert cause.title == title


def test_failures_with_the_same_sentence_are_one_cause() -> None:
    report = run_report(
        *(_failed(f"gradients/GRAD-02/{name}", Finding("facts", FAIL, f"{name}/values on rank 1 differs"))
          for name in ("all_reduce", "reduce", "gather")),
        _failed("gradients/GRAD-01/a", Finding("facts", FAIL, "scatter/values on rank 1 differs")),
    )  # fmt: skip
    assert [(one.title, one.extent) for one in causes_of(report)] == [
        ("A gradient MUST NOT depend on the bucket cap.", "3 scenarios of GRAD-02"),
        ("Every rank MUST hold the mean of the gradients.", "1 scenario of GRAD-01"),
    ]  # fmt: skip


def test_the_evidence_of_a_cause_is_from_the_scenario_with_the_fewest_options() -> None:
    default, view = "gradients/GRAD-02/nested-world2", "gradients/GRAD-02/nested-view-world2"
    viewing = by_hand.scenario(view, options={"gradient_as_bucket_view": True})
    (cause,) = causes_of(run_report(by_hand.outcome(viewing, FAIL), by_hand.outcome(default, FAIL)))
    assert [one.id for one in cause.outcomes] == [default, view]


def test_a_sentence_that_stands_above_the_evidence_is_not_said_again() -> None:
    fact = _failed("gradients/GRAD-02/a", Finding("facts", FAIL, "step0/grad/w on rank 1 differs", "Let   A = 1"))
    error = _failed("gradients/GRAD-02/b", Finding("no_exception", FAIL, "rank 0 raised KeyError: 'a'", "Let   A = 1"))
    for one in (fact, error):
        text = shown(run_report(one))
        title = cause_of(one, {"GRAD-02": CAP.statement}).title
        assert text.count(title) == 1, text
    assert "step0/grad/w on rank 1 differs" in shown(run_report(fact))
    assert CAP.statement in shown(run_report(error))


def _failed(scenario_id: str, *findings: Finding, requirements: tuple[str, ...] = ()) -> Outcome:
    one = outcome(scenario_id, FAIL)
    subject = dataclasses.replace(one.subject, findings=findings)
    return dataclasses.replace(one, requirements=requirements or one.requirements, subject=subject)


def _verdicts(report: Report) -> dict[str, tuple[Verdict, int]]:
    evidence = evidence_of(report.scenarios)
    summaries = (summarise(each, evidence.get(each.id, [])) for each in load_catalogue())
    return {each.id: (each.subject, each.scenarios) for each in summaries if each.scenarios}


def test_a_thread_left_behind_is_put_down_to_the_requirement_about_it() -> None:
    trace = Finding("leaves_no_trace", FAIL, "a thread", requirements=("COMPAT-12",))
    wrong, right = Finding("facts", FAIL, "wrong"), Finding("facts", PASS)
    report = run_report(
        _failed("gradients/GRAD-01/a", trace, right), _failed("gradients/GRAD-02/a", wrong, trace),
        _failed("buckets/BUCKET-01/a", trace), _failed("gradients/GRAD-03/a", trace, Finding("facts", UNKNOWN)),
    )  # fmt: skip
    assert [(one.title, one.requirements, len(one.outcomes)) for one in causes_of(report)] == [
        ("A rank's process is not left as it was: a thread", ("COMPAT-12",), 3),
        ("A gradient MUST NOT depend on the bucket cap.", ("GRAD-02",), 1),
    ]  # fmt: skip
    assert _verdicts(report) == {
        "GRAD-01": (PASS, 1), "GRAD-02": (FAIL, 1), "GRAD-03": (UNKNOWN, 1), "BUCKET-01": (PASS, 1),
        "COMPAT-12": (FAIL, 3),
    }  # fmt: skip
    assert not report.is_green


def test_a_fact_that_speaks_for_one_requirement_fails_no_other() -> None:
    tested = ("GRAD-06", "GRAD-07", "GRAD-09")
    warns = Finding("facts", FAIL, "warnings", requirements=("GRAD-07",))
    both = Finding("facts", FAIL, "strides", requirements=("GRAD-07", "GRAD-06"))
    elsewhere = Finding("facts", FAIL, "grad", requirements=("GRAD-01",))
    scenario = "gradients/GRAD-06/a"
    for finding, first, failed in (
        (warns, "GRAD-07", {"GRAD-07"}), (both, "GRAD-06", {"GRAD-06", "GRAD-07"}), (elsewhere, "GRAD-01", {"GRAD-01"}),
        (Finding("facts", FAIL, "anything"), "GRAD-06", set(tested)),
    ):  # fmt: skip
        report = run_report(_failed(scenario, finding, requirements=tested))
        assert [one.requirements for one in causes_of(report)] == [(first,)]
        assert {name for name, (verdict, _) in _verdicts(report).items() if verdict is FAIL} == failed
        assert set(_verdicts(report)) == {*tested, *failed}
    # What came of other scenarios' remains is evidence against none of them.
    after = dataclasses.replace(_failed(scenario, warns, requirements=tested), contaminated_by="gradients/GRAD-01/b")
    assert {verdict for verdict, _ in _verdicts(run_report(after)).values()} == {FAIL}


def test_two_crashes_do_not_hide_eleven_failures() -> None:
    assert combined_text({PASS: 101, FAIL: 11, CRASH: 2}) == "CRASH 2, FAIL 11 of 114"
    assert combined_text({PASS: 1, FAIL: 2}) == "FAIL 2 of 3"
    assert combined_text({PASS: 8, FAIL: 4, UNSUPPORTED: 40}) == "FAIL 4 of 52, 40 unsupported"
    assert combined_text({PASS: 239, UNSUPPORTED: 6}) == "PASS, 6 unsupported"
    assert combined_text({PASS: 3, UNKNOWN: 2}) == "UNKNOWN 2 of 5"
    assert combined_text({PASS: 0, UNSUPPORTED: 6}) == "UNSUPPORTED"


def test_mismatched_collectives_are_reported_before_their_consequences() -> None:
    findings = (
        Finding("no_crash", CRASH, "rank 1 died", "Then  B died."),
        Finding("same_collectives", FAIL, "ranks 0 and 1 differ", "Then  A and B meet."),
    )
    assert ScenarioResult("mine", CRASH, 1.0, 3, findings, ()).summary == "ranks 0 and 1 differ"


def test_work_grows_with_ranks_and_passes() -> None:
    short = Scenario("a/b/c", ("b",), "train", world_size=1, schedule=(Step(),))
    assert work(short.replace(world_size=4)) == 4 * work(short)
    assert work(short.replace(schedule=(Step(local_backwards=9, synchronised=False),))) > work(short)


def shown(report: Report, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(console, report, CATALOGUE, Path("report"))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_a_run_in_which_nothing_passed_says_why_and_what_to_do() -> None:
    known = by_hand.outcome("gradients/GRAD-01/a", FAIL, excuse=by_hand.excuse(MET))
    report = run_report(known)
    assert not report.is_green
    last = " ".join(shown(report).split())
    assert "this run shows nothing: the one that failed was known to." in last
    assert "leave out --baseline and --expectations" in last
    last = " ".join(shown(run_report(outcome("gradients/GRAD-01/a", UNSUPPORTED))).split())
    assert "this run shows nothing. Select scenarios that need no more than what is declared." in last


class WhatPeopleRead(expecttest.TestCase):
    """Texts that people read, pinned; `EXPECTTEST_ACCEPT=1 pytest ...` rewrites them."""

    maxDiff = None

    def test_a_failing_run(self) -> None:
        self.assertExpectedInline(
            shown(MIXED),
            """\
2 failures, 1 cause:
  1.  A gradient MUST NOT depend on the bucket cap.
      Seen in 2 scenarios of GRAD-02, of level full: not every DDP owes it
      Read: docs
CRASH  GRAD-02  it was CRASH
      gradients/GRAD-02/cnn
      subject=ddp_impl backend=gloo world=2 seed=7
Let   A = it was CRASH
Then  A is not 2.
Replay  ddp-conformance replay report/failures/gradients.GRAD-02.cnn.json

After a mend: ddp-conformance run --last-failed --report report

chapter    requirements kept  scenarios  ddp_impl                             torch's DDP
gradients  0 of 2                     4  CRASH 1, FAIL 1 of 4                 FAIL 1 of 4, 1 unsupported
buckets    1 of 1                     2  PASS, 1 unsupported                  PASS, 1 unsupported
all        1 of 3                     6  CRASH 1, FAIL 1 of 6, 1 unsupported  FAIL 1 of 6, 2 unsupported

median warm scenario at world size 2: 12.0 ms, others beside it
6 scenarios in 12.5 s, evidence for 3 requirements (one scenario may serve several)
ddp_impl: 3 PASS, 1 UNSUPPORTED, 1 FAIL, 1 CRASH
torch's DDP: 3 PASS, 2 UNSUPPORTED, 1 FAIL
UNSUPPORTED, and so not judged:
     1  it was UNSUPPORTED
2 scenarios failed. ddp_impl keeps 1 of 3 requirements.""",
        )

    def test_a_green_run_without_the_second_column(self) -> None:
        report = run_report(outcome("gradients/GRAD-01/a", PASS), outcome("buckets/BUCKET-01/b", PASS))
        self.assertExpectedInline(
            shown(report),
            """\
chapter    requirements kept  scenarios  ddp_impl
gradients  1 of 1                     1  PASS
buckets    1 of 1                     1  PASS
all        2 of 2                     2  PASS

2 scenarios in 12.5 s, evidence for 2 requirements
ddp_impl: 2 PASS
ddp_impl keeps 2 of 2 requirements.""",
        )

    def test_what_was_not_judged_is_counted_apart_and_explained(self) -> None:
        skipped = [
            (by_hand.scenario(f"buckets/BUCKET-01/{number}"), f"mine declares no {needed}")
            for number, needed in enumerate(
                ["join", "join", "join", "no_sync", "no_sync", "pickling", "comm_hook", "static_graph", "logging_data"]
            )
        ]
        outcomes = [by_hand.outcome(of, UNSUPPORTED, PASS, summary=why) for of, why in skipped]
        passed = [outcome(f"{name}/a", PASS, PASS) for name in ("gradients/GRAD-01", "buckets/BUCKET-01")]
        self.assertExpectedInline(
            shown(run_report(*passed, *outcomes)),
            """\
chapter    requirements kept  scenarios  ddp_impl             torch's DDP
gradients  1 of 1                     1  PASS                 PASS
buckets    1 of 1                    10  PASS, 9 unsupported  PASS
all        2 of 2                    11  PASS, 9 unsupported  PASS

median warm scenario at world size 2: 12.5 ms, others beside it
11 scenarios in 12.5 s, evidence for 2 requirements
ddp_impl: 2 PASS, 9 UNSUPPORTED
torch's DDP: 11 PASS
UNSUPPORTED, and so not judged:
     3  mine declares no join
     2  mine declares no no_sync
     1  mine declares no pickling
     1  mine declares no comm_hook
     1  mine declares no static_graph
     1  for 1 other reason; the page has them
To have it judged where it exists, declare it: `capabilities` of the Subject or of the Backend.
ddp_impl keeps 2 of 2 requirements. It keeps all that it declares to have.""",
        )

    def test_passes_that_were_not_expected(self) -> None:
        known = [
            by_hand.outcome(f"gradients/{name}/a", PASS, excuse=by_hand.excuse(UNEXPECTED_PASS))
            for name in ("GRAD-01", "GRAD-02")
        ]
        console = Console(file=io.StringIO(), width=110)
        report = run_report(outcome("buckets/BUCKET-01/a", FAIL), *known)
        print_failures(console, report, CATALOGUE, Path("report"), whole=2)
        print_totals(console, report)
        assert isinstance(console.file, io.StringIO)
        self.assertExpectedInline(
            console.file.getvalue(),
            """\
3 failures, 2 causes:
  1.  Ranks MUST reduce the same buckets.
      Seen in 1 scenario of BUCKET-01
      Read: docs
FAIL  BUCKET-01  it was FAIL
      buckets/BUCKET-01/a
      subject=ddp_impl backend=gloo world=2 seed=7
Let   A = it was FAIL
Then  A is not 2.
Replay  ddp-conformance replay report/failures/buckets.BUCKET-01.a.json

  2.  It passed, where a failure was known: An entry of the known failures is stale.
      Seen in 2 scenarios of GRAD-01, GRAD-02
      Do: Remove it from them, or narrow it down.
PASS  GRAD-01  Every rank MUST hold the mean of the gradients.
      gradients/GRAD-01/a
      subject=ddp_impl backend=gloo world=2 seed=7
      it passed, but FAIL was expected (a known defect; https://example.org/1): remove its entry
      from the known failures, or narrow it down
Replay  ddp-conformance replay report/failures/gradients.GRAD-01.a.json

After a mend: ddp-conformance run --last-failed --report report

median warm scenario at world size 2: 12.5 ms, others beside it
3 scenarios in 12.5 s, evidence for 3 requirements
ddp_impl: 2 PASS, 1 FAIL
1 scenario failed, 2 scenarios passed that were known to fail. ddp_impl keeps 2 of 3 requirements.
""",
        )

    def test_a_method_that_is_declared_and_missing(self) -> None:
        raised = "every rank raised AttributeError: 'NaiveDDP' object has no attribute '_set_static_graph'"
        failed = by_hand.outcome("gradients/GRAD-02/a", FAIL, summary=raised)
        self.assertExpectedInline(
            failure_text(failed, "gloo", CATALOGUE, "the command"),
            """\
FAIL  GRAD-02  A gradient MUST NOT depend on the bucket cap.
      gradients/GRAD-02/a
      subject=ddp_impl backend=gloo world=2 seed=7
      every rank raised AttributeError: 'NaiveDDP' object has no attribute '_set_static_graph'
Let   A = every rank raised AttributeError: 'NaiveDDP' object has no attribute '_set_static_graph'
Then  A is not 2.
ddp_impl counts as having static_graph and has no method _set_static_graph: leave it out of its capabilities,
      Subject(..., capabilities=CAPABILITIES - {"static_graph"})
Replay  the command""",
        )

    def test_an_interrupted_run(self) -> None:
        report = run_report(outcome("gradients/GRAD-01/a", PASS), missing=3, interrupted=True)
        self.assertExpectedInline(
            shown(report).partition("\n\n")[2],
            """\
1 scenario in 12.5 s, evidence for 1 requirement
ddp_impl: 1 PASS
Incomplete: 3 of 4 scenarios did not run.""",
        )

    def test_a_failure(self) -> None:
        self.assertExpectedInline(
            failure_text(MIXED.scenarios[2], "gloo", CATALOGUE, "the command"),
            """\
FAIL  GRAD-02  A gradient MUST NOT depend on the bucket cap.
      gradients/GRAD-02/mlp
      subject=ddp_impl backend=gloo world=2 seed=7
      it was FAIL
Let   A = it was FAIL
Then  A is not 2.
Replay  the command""",
        )


@pytest.mark.parametrize(
    ("fate", "phase", "options", "left_out"),
    [
        ("NotImplementedError: no static graphs here", "construct", {"static_graph": True}, '"static_graph"'),
        ("ValueError: static_graph is not supported", "construct", {"static_graph": True}, '"static_graph"'),
        ("NotImplementedError: no", "construct", {"static_graph": True, "join": 1}, '"join", "static_graph"'),
        ("NotImplementedError: no kernel", "backward", {"static_graph": True}, ""),
        ("RuntimeError: reshape is not implemented for sparse tensors", "backward", {}, '"sparse_gradients"'),
        ("ValueError: static_graph is not supported", "construct", {}, ""),
        ("ValueError: no static graphs here", "construct", {"static_graph": True}, ""),
        ("RuntimeError: static_graph was changed", "backward", {"static_graph": True}, ""),
    ],
)
def test_an_option_that_is_refused_is_to_be_declared(
    fate: str, phase: str, options: Mapping[str, Any], left_out: str
) -> None:
    refused = by_hand.result(FAIL, ranks=[RankFate(0, fate, phase)])
    model = "sparse_embedding" if "sparse" in fate else "mlp"
    advice = advice_on(refused, {"options": options, "needs": [], "model": model, "arguments": {}})
    assert advice.endswith(f"CAPABILITIES - {{{left_out}}})" if left_out else "")
    assert bool(advice) == bool(left_out)


@pytest.mark.parametrize(
    "summary",
    [
        "every rank raised AttributeError: 'NaiveDDP' object has no attribute 'weight'",
        "every rank raised AttributeError: 'NoneType' object has no attribute 'join'",
        "every rank raised RuntimeError: no_sync",
    ],
)
def test_other_errors_are_not_put_down_to_a_capability(summary: str) -> None:
    assert advice_on(by_hand.result(FAIL, summary=summary)) == ""


def test_off_a_terminal_sentences_are_broken_and_what_is_to_be_copied_is_not() -> None:
    console = Console(file=io.StringIO(), width=140)
    path = "/a/long/path" * 12
    lines = [
        "FAIL  " + "some words " * 20,
        f"Replay  ddp-conformance replay {path} --ddp mine",
        f'  File "{path}", line 3',
    ]
    print_evidence(console, "\n".join(lines))
    assert isinstance(console.file, io.StringIO)
    first, *others, replay, place = console.file.getvalue().splitlines()
    assert [replay, place] == lines[1:]
    assert len(others) == 2
    assert all(len(line) <= 100 and line.startswith(" " * 6) for line in others)
    assert " ".join([first, *others]).split() == lines[0].split()


def test_off_a_terminal_a_line_now_and_then_says_how_far_a_run_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenarios = tuple(by_hand.scenario(f"gradients/GRAD-01/{number}") for number in range(4))
    clock = iter([100.0 + 6 * tick for tick in range(100)])  # six seconds from each look at it to the next
    monkeypatch.setattr("conformance.report.progress.time.monotonic", lambda: next(clock))
    with ProgressBar(Console(file=io.StringIO()), scenarios, {}) as progress:
        for done, scenario in enumerate(scenarios, start=1):
            progress(Progress(scenario, done, len(scenarios), by_hand.outcome(scenario, Verdict.PASS)))
    printed = capsys.readouterr()
    assert printed.out == ""
    first, *_ = lines = printed.err.splitlines()
    assert 1 < len(lines) < len(scenarios)
    assert first.startswith("2 of 4 scenarios, 0 failed, ")
    assert first.endswith(" left")


def test_the_time_left_is_what_the_scenarios_of_each_requirement_took() -> None:
    """A run begins with one of each; the dear ones are most of what is left, whatever the cheap ones took."""
    names = ("GRAD-01", "GRAD-02")
    cheap, *others = (by_hand.scenario(f"gradients/{names[number > 0]}/{number}") for number in range(5))
    forecast = _Forecast([cheap, *others])
    assert forecast.left_s(1.0) == 0.0
    for scenario, took_ms in ((cheap, 100.0), (others[0], 900.0)):
        result = dataclasses.replace(by_hand.outcome(scenario, Verdict.PASS).subject, duration_ms=took_ms)
        forecast.note(scenario, dataclasses.replace(by_hand.outcome(scenario, Verdict.PASS), subject=result))
    assert forecast.left_s(1.0) == pytest.approx(3 * 0.9)
    assert forecast.left_s(0.5) == pytest.approx(3 * 0.9 / 2)  # two lanes


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """Each would remove what the other has written, and the last one would answer for both."""
    with sole_writer(tmp_path / "report"):
        with pytest.raises(ReportError, match=r"another run writes its report to .*; nothing was run"):
            sole_writer(tmp_path / "report").__enter__()
        result = CliRunner().invoke(main, ["run", "GRAD-01", "--report", str(tmp_path / "report")])
        assert (result.exit_code, "another run writes" in " ".join(result.stderr.split())) == (2, True)
    with sole_writer(tmp_path / "report"):
        pass


def test_progress_names_the_scenario_that_runs_and_is_silent_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenarios = tuple(by_hand.scenario(f"gradients/GRAD-01/{name}") for name in ("a", "b"))
    events = [
        Progress(scenarios[0], 0, 2), Progress(scenarios[0], 1, 2, by_hand.outcome(scenarios[0], FAIL)),
        Progress(scenarios[1], 1, 2),
    ]  # fmt: skip
    for quiet in (False, True):
        clock = iter([100.0 + 20 * tick for tick in range(100)])
        monkeypatch.setattr("conformance.report.progress.time.monotonic", clock.__next__)
        with ProgressBar(Console(file=io.StringIO()), scenarios, {}, quiet=quiet) as progress:
            for event in events:
                progress(event)
        said = capsys.readouterr().err
        assert said.splitlines()[-1:] == [] if quiet else said.endswith("; now gradients/GRAD-01/b\n"), said


def test_the_first_failure_of_each_cause_gets_a_line_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A DDP that lacks something fails in many requirements: that is told once."""
    names = ("GRAD-01", "GRAD-02", "GRAD-03")
    scenarios = tuple(by_hand.scenario(f"gradients/{name}/a") for name in names)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with ProgressBar(console, scenarios, dict.fromkeys(names, "It MUST hold.")) as progress:
        for done, scenario in enumerate(scenarios, start=1):
            progress(Progress(scenario, done, len(scenarios), by_hand.outcome(scenario, FAIL)))
        assert isinstance(console.file, io.StringIO)
        shown = [line for line in console.file.getvalue().splitlines() if "FAIL " in line]
        assert progress._failures() == "3 failed, 1 cause"
    assert len(shown) == 1
    assert "cause" in console.file.getvalue()
    assert capsys.readouterr().err == ""
