"""Merging shards and comparing reports."""

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from conformance.cli import main
from conformance.errors import ReportError
from conformance.report.diff import compare
from conformance.report.merge import merge
from conformance.report.read import read_report
from conformance.run.report import Assignment
from conformance.tests.reports_by_hand import (
    CRASH,
    FAIL,
    HANG,
    MIXED,
    PASS,
    RATIOS,
    UNKNOWN,
    UNPRINTABLE,
    UNSUPPORTED,
    outcome,
    result,
    stored,
)
from conformance.verdict import Verdict

IDS = tuple(one.id for one in MIXED)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_shards_together_are_the_whole_run(tmp_path: Path) -> None:
    whole = stored(tmp_path / "whole", *MIXED)
    shards = [stored(tmp_path / str(n), *MIXED[n::3], selected=IDS) for n in range(3)]
    merged = merge(shards)
    assert merged.missing == ()
    assert dataclasses.replace(merged.report, duration_s=0, median_warm_scenario_ms={}) == dataclasses.replace(
        whole, duration_s=0, median_warm_scenario_ms={}
    )


def test_shards_keep_their_order_when_they_share_it(tmp_path: Path) -> None:
    def merged_order(*orders: tuple[str, int]) -> str:
        shards = []
        for n, order in enumerate(orders):
            assignment = Assignment("", f"{n + 1}/{len(orders)}", IDS, *order)
            shards.append(stored(tmp_path / str(n), *MIXED[n :: len(orders)], selection=assignment))
        return merge(shards).report.selection.arranged

    assert merged_order(("shuffled", 3), ("shuffled", 3)) == "shuffled with seed 3"
    assert merged_order(("shuffled", 3), ("shuffled", 4)) == ""
    assert merged_order(("listed", 0), ("listed", 0)) == "listed"


def test_step_times_come_from_one_shard(tmp_path: Path) -> None:
    parts = [MIXED[:2], MIXED[2:4], MIXED[4:]]
    shards = [stored(tmp_path / str(n), *part, selected=IDS) for n, part in enumerate(parts)]
    measured = [dataclasses.replace(shard, performance=RATIOS) for shard in shards]
    assert merge([shards[0], measured[1], shards[2]]).report.performance == RATIOS
    with pytest.raises(ReportError, match="reports 1 and 3 both compare step times, and one answer is wanted"):
        merge([measured[0], shards[1], measured[2]])


def test_only_what_noise_does_not_explain_has_changed_in_speed(tmp_path: Path) -> None:
    before = stored(tmp_path, *MIXED, performance=RATIOS)
    noise = dataclasses.replace(RATIOS[0], median=1.45, lower=1.3, upper=1.6)
    faster = dataclasses.replace(RATIOS[0], median=0.9, lower=0.8, upper=1.0)
    other = dataclasses.replace(faster, world_size=3)
    assert compare(before, dataclasses.replace(before, performance=(noise, other))).circumstances == ()
    assert compare(before, dataclasses.replace(before, performance=())).circumstances == ()
    assert compare(before, dataclasses.replace(before, performance=(faster,))).circumstances == (
        "time of a model, default over torch's default, 2 ranks: 1.500 (1.375 - 1.625) -> 0.900 (0.800 - 1.000)",
    )


def test_a_missing_shard_is_said_and_nothing_is_green(tmp_path: Path) -> None:
    passed = [outcome(f"gradients/GRAD-01/{n}", PASS) for n in range(4)]
    ids = [one.id for one in passed]
    for n in range(3):
        stored(tmp_path / str(n), passed[n], selected=ids)
    out = tmp_path / "merged.json"
    result = call("merge", *(tmp_path / str(n) for n in range(3)), "-o", out)
    assert result.exit_code == 1
    assert "missing  gradients/GRAD-01/3\n1 of 4 scenarios are in none of the reports." in result.stderr
    merged = read_report(out)
    assert (merged.green, merged.complete, merged.totals.selected, merged.totals.scenarios) == (False, False, 4, 3)
    stored(tmp_path / "3", passed[3], selected=ids)
    assert call("merge", *(tmp_path / str(n) for n in range(4)), "-o", out).exit_code == 0
    assert read_report(out).green


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    left, right = stored(tmp_path, *MIXED[:4], selected=IDS), stored(tmp_path, *MIXED[3:], selected=IDS)
    with pytest.raises(ReportError, match=r"1 scenario\(s\) are in more than one report: gradients/GRAD-02/cnn"):
        merge([left, right])
    rest = stored(tmp_path, *MIXED[4:], selected=IDS)
    for change, message in (
        ({"backend": "nccl"}, "differ in backend: gloo and nccl"),
        ({"specification": "1.0"}, "differ in specification: none and 1.0"),
        ({"environment": {"packages": {"torch": "2.11.0"}}}, "differ in torch: 2.13.0"),
        ({"selection": dataclasses.replace(rest.selection, ids=IDS[1:])}, "not of one run: their selections differ"),
        ({"subject": dataclasses.replace(rest.subject, target="a:B")}, "differ in subject"),
    ):
        with pytest.raises(ReportError, match=message):
            merge([left, dataclasses.replace(rest, **change)])
    stranger = stored(tmp_path, outcome("gradients/GRAD-01/stranger", PASS), selected=IDS)
    with pytest.raises(ReportError, match="were never selected: gradients/GRAD-01/stranger"):
        merge([left, stranger])
    with pytest.raises(ReportError, match="at least two"):
        merge([left])


@pytest.mark.parametrize(
    ("before", "after", "group"),
    [
        (PASS, FAIL, "regressed"),
        (PASS, UNKNOWN, "regressed"),
        (UNKNOWN, HANG, "regressed"),
        (UNSUPPORTED, FAIL, "regressed"),
        (FAIL, PASS, "fixed"),
        (UNKNOWN, PASS, "fixed"),
        (FAIL, CRASH, "changed"),
        (PASS, UNSUPPORTED, "capability"),
        (UNSUPPORTED, PASS, "capability"),
        (FAIL, UNSUPPORTED, "capability"),
        (None, FAIL, "new"),
        (PASS, None, "vanished"),
        (HANG, HANG, ""),
    ],
)
def test_every_change_has_one_kind(tmp_path: Path, before: Verdict | None, after: Verdict | None, group: str) -> None:
    common = outcome("gradients/GRAD-01/common", PASS)
    sides = [
        stored(tmp_path / name, common, *([outcome("gradients/GRAD-01/x", verdict)] if verdict else []))
        for name, verdict in (("before", before), ("after", after))
    ]
    difference = compare(*sides)
    sides_of = {"new": difference.new, "vanished": difference.vanished}
    found = {name for name, changes in (*difference.groups, *sides_of.items()) if changes}
    assert found == ({group.replace("capability", "capability changed")} if group else set())
    assert call("diff", tmp_path / "before", tmp_path / "after").exit_code == int(group == "regressed")


def test_a_diff_is_about_what_both_have_and_about_both_columns(tmp_path: Path) -> None:
    both = outcome("gradients/GRAD-01/both", PASS, PASS)
    more = [outcome(f"gradients/GRAD-02/{number}", PASS, PASS) for number in range(30)]
    stored(tmp_path / "a", both, *more)
    stored(tmp_path / "b", dataclasses.replace(both, native=result(FAIL, "torch")))
    said = call("diff", tmp_path / "a", tmp_path / "b")
    assert said.stdout == (
        "\ntorch's DDP: 1\n  PASS -> FAIL  gradients/GRAD-01/both  it was FAIL\n\nonly in the report before: 30\n"
    )
    assert (said.exit_code, compare(stored(tmp_path / "c", both), stored(tmp_path / "d", both)).num_both) == (0, 1)
    assert "GRAD-02/29" in call("diff", tmp_path / "a", tmp_path / "b", "--verbose").stdout


def test_a_diff_that_compares_nothing_is_no_success(tmp_path: Path) -> None:
    for name, outcomes in {"none": (), "one": ("GRAD-01/a",), "other": ("GRAD-01/b",)}.items():
        stored(tmp_path / name, *(outcome(f"gradients/{one}", PASS) for one in outcomes))
    for pair, why in ((("one", "none"), "none holds no outcome"), (("one", "other"), "have no scenario in common")):
        said = call("diff", *(tmp_path / name for name in pair))
        assert (said.exit_code, why in said.stderr) == (2, True)


def test_a_diff_says_why_and_under_which_circumstances(tmp_path: Path) -> None:
    stored(tmp_path / "a", outcome("gradients/GRAD-01/x", PASS))
    worse = outcome("gradients/GRAD-01/x", FAIL, summary=f"a gradient{UNPRINTABLE} is wrong")
    changed = dataclasses.replace(worse, sha256="0" * 64)
    stored(tmp_path / "b", changed, backend="nccl")
    result = call("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert result.stdout == (
        "backend: gloo -> nccl\n\nregressed: 1\n"
        "  PASS -> FAIL  gradients/GRAD-01/x  a gradient\\x00\\x08\\x1b[31mred\\x1b[0m\\ufffe is wrong\n"
        "\nnot the same scenario under the same id: 1\n  gradients/GRAD-01/x\n"
    )
    assert (
        call("diff", tmp_path / "a", tmp_path / "a").stdout == "No verdict changed in the 1 scenario of both reports.\n"
    )


@pytest.mark.parametrize("kind", ["html", "junit", "markdown", "badge", "trace"])
def test_every_page_can_be_made_at_the_command_line(tmp_path: Path, kind: str) -> None:
    report = stored(tmp_path, *MIXED)
    assert not report.green
    printed = call(kind, tmp_path)
    assert printed.exit_code == 0, printed.output
    assert call(kind, tmp_path / "report.json", "-o", tmp_path / "out").output == ""
    assert (tmp_path / "out").read_text() == printed.stdout
    assert len(printed.stdout) > 100
    missing = call(kind, tmp_path / "nowhere.json")
    assert (missing.exit_code, "cannot read" in missing.stderr) == (2, True)
    assert "cannot write" in call(kind, tmp_path, "-o", tmp_path / "no" / "folder").stderr


def test_a_merged_report_holds_the_failures_that_its_summary_names(tmp_path: Path) -> None:
    for n in range(2):
        stored(tmp_path / str(n), *MIXED[n::2], selected=IDS)
    merged = tmp_path / "new" / "merged"
    assert call("merge", tmp_path / "0", tmp_path / "1", "--out", merged / "report.json").exit_code == 0
    failed = {path.name for n in range(2) for path in (tmp_path / str(n) / "failures").iterdir()}
    assert {path.name for path in (merged / "failures").iterdir()} == failed != set()
    printed = call("summary", merged).stdout
    assert f"replay {merged}/failures/" in printed.replace("\n", "")
