"""The scoreboard: what it counts, what it refuses to put side by side, and where it is put."""

import dataclasses
import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.errors import ReportError
from conformance.run.report import Report
from conformance.tests.reports_by_hand import CRASH, FAIL, HOSTILE, PASS, UNSUPPORTED, outcome, stored
from workshop.__main__ import main
from workshop.scoreboard import inserted, scoreboard

DAY = datetime.date(2027, 1, 2)
ONE = "gradients/GRAD-01/mlp", "gradients/GRAD-02/mlp", "gradients/GRAD-02/cnn", "buckets/BUCKET-01/mlp"


def of(subject: str, folder: Path, *verdicts: object) -> Report:
    outcomes = [outcome(name, verdict) for name, verdict in zip(ONE, verdicts, strict=False)]  # type: ignore[arg-type]
    return stored(folder / subject, *outcomes, selected=ONE, subject=subject)


def cells(board: str, row: str) -> list[str]:
    (line,) = [line for line in board.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_requirements_are_counted_by_chapter_and_subject(tmp_path: Path) -> None:
    first = of("first", tmp_path, PASS, PASS, FAIL, UNSUPPORTED)
    second = of("second", tmp_path, PASS, UNSUPPORTED, PASS, CRASH)
    board = scoreboard([first, second], {"second": "ddp-conformance"}, DAY)
    assert cells(board, "gradients") == ["PASS 1<br>FAIL 1", "PASS 2"]
    assert cells(board, "buckets") == ["UNSUPPORTED 1", "FAIL 1"]
    assert cells(board, "**all**") == [
        "PASS 1<br>UNSUPPORTED 1<br>FAIL 1",
        "PASS 2<br>FAIL 1",
    ]
    assert cells(board, "version") == [
        "<code>torch 2&#46;13&#46;0&#43;cpu</code>", "<code>ddp&#45;conformance 0&#46;1&#46;0</code>",
    ]  # fmt: skip
    assert "4 scenarios at world size 2" in board
    assert "2027-01-02" in board


def test_a_report_that_broke_off_says_so(tmp_path: Path) -> None:
    outcomes = [outcome(name, PASS) for name in ONE[:3]]
    report = stored(tmp_path / "short", *outcomes, selected=ONE, num_selected=4, interrupted=True)
    assert cells(scoreboard([report], {}, DAY), "**all**") == ["PASS 2<br>1 scenarios did not run"]


def test_only_what_ran_the_same_is_put_side_by_side(tmp_path: Path) -> None:
    first, second = of("first", tmp_path, PASS), of("second", tmp_path, PASS)
    with pytest.raises(ReportError, match="first and second were judged by different backend: gloo and nccl"):
        scoreboard([first, dataclasses.replace(second, backend="nccl")], {}, DAY)
    fewer = dataclasses.replace(second.selection, ids=second.selection.ids[1:])
    with pytest.raises(ReportError, match="different scenarios: 4 and 3"):
        scoreboard([first, dataclasses.replace(second, selection=fewer)], {}, DAY)
    with pytest.raises(ReportError, match="two reports judge first"):
        scoreboard([first, first], {}, DAY)


def test_a_name_cannot_break_out_of_its_cell(tmp_path: Path) -> None:
    report = of("first", tmp_path, PASS)
    named = dataclasses.replace(report, subject=dataclasses.replace(report.subject, name=f"a|b\n{HOSTILE}"))
    board = scoreboard([named], {}, DAY)
    assert "<script>" not in board
    assert "<img" not in board
    assert len({line.count("|") for line in board.splitlines() if line.startswith("|")}) == 1


def test_the_command_replaces_what_a_page_has_between_the_markers(tmp_path: Path) -> None:
    of("first", tmp_path, PASS, PASS, PASS, PASS)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- scoreboard -->\nold\n<!-- end of scoreboard -->\nafter\n")
    arguments = ["scoreboard", str(tmp_path / "first"), "--into", str(page), "--date", "2027-01-02"]
    for _ in range(2):  # the second time in the place of the first
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        text = page.read_text()
        assert text.startswith("before\n<!-- scoreboard -->\nA selection: 4 scenarios")
        assert text.endswith("|\n<!-- end of scoreboard -->\nafter\n")
        assert "old" not in text
    done = CliRunner().invoke(main, [*arguments[:-1], "yesterday"])
    assert (done.exit_code, "must be a date such as" in done.output) == (2, True)
    with pytest.raises(ReportError, match="there is no <!-- scoreboard -->"):
        inserted("no markers", "board")


def test_backends_by_themselves_have_a_table_of_their_own(tmp_path: Path) -> None:
    alone = [
        dataclasses.replace(one, backend=one.subject.name, subject=dataclasses.replace(one.subject, target=""))
        for one in (of("gloo", tmp_path, PASS, FAIL, PASS, CRASH), of("acme", tmp_path, PASS, PASS, UNSUPPORTED, PASS))
    ]
    board = scoreboard(alone, {}, DAY)
    assert cells(board, "gradients") == ["PASS 1<br>FAIL 1", "PASS 2"]
    assert cells(board, "scenarios") == ["PASS 2<br>FAIL 2", "PASS 3<br>UNSUPPORTED 1"]
    assert "backend" not in board.splitlines()[0]
    page = (
        "<!-- scoreboard -->kept<!-- end of scoreboard --><!-- board of backends --><!-- end of board of backends -->"
    )
    assert inserted(page, board, of_backends=True).startswith("<!-- scoreboard -->kept<!-- end of scoreboard -->")
    with pytest.raises(ReportError, match="were judged by different kind"):
        scoreboard([alone[0], of("third", tmp_path, PASS, PASS, PASS, PASS)], {}, DAY)
