"""Packed reports: what repeats is written once, all of it comes back, and a forged number is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from conformance.cli.report import command
from conformance.codec import MismatchError, encode
from conformance.errors import ReportError
from conformance.report import packed as packed_form
from conformance.report.folder import plain_text, report_text
from conformance.report.packed import packed, unpacked
from conformance.report.read import parse_report
from conformance.tests.reports_by_hand import INTERRUPTED, MIXED, RATIOS, run_report

REPORTS = [run_report(*MIXED, performance=RATIOS), INTERRUPTED]
DATA: dict[str, Any] = encode(REPORTS[0])


def forged(shared: Any, finding: Any = 0, **others: Any) -> dict[str, Any]:
    data = packed(DATA)
    data["scenarios"][0]["subject"] = {"findings": [finding]}
    return {**data, "shared": shared, **others}


@pytest.mark.parametrize("report", REPORTS, ids=["mixed", "interrupted"])
def test_packed_and_plain_reports_are_read_as_the_same(report: Any) -> None:
    read = parse_report(report_text(report))
    assert read == parse_report(plain_text(report))
    assert plain_text(read) == plain_text(report)
    assert unpacked(packed(encode(report))) == encode(report)


def test_nothing_is_written_twice() -> None:
    shared = [json.dumps(entry) for entry in packed(DATA)["shared"]]
    assert len(shared) == len(set(shared))
    assert len(report_text(REPORTS[0])) < len(plain_text(REPORTS[0]))
    data = packed(DATA)
    ranks = [rank for one in data["scenarios"] for rank in one.get("subject", {}).get("ranks", [])]
    collectives = [row for rank in [data["usual"]["rank"], *ranks] for row in rank.get("collectives", [])]
    assert collectives
    assert all(len(row) == 3 and all(type(number) is int for number in row) for row in collectives)


def test_what_is_usual_is_left_out() -> None:
    data = packed(DATA)
    usual = data["usual"]["scenario"]
    assert usual["world_size"] == 2
    assert all(
        one.get("world_size", 2) == whole["world_size"]
        for one, whole in zip(data["scenarios"], DATA["scenarios"], strict=True)
    )
    assert all(
        one.get(name, None) != value for one in data["scenarios"] for name, value in usual.items() if value is not None
    )


@pytest.mark.parametrize("field", ["usual", "lines", "shared"])
def test_a_packed_report_without_a_part_of_it_is_refused(field: str) -> None:
    data = packed(DATA)
    del data[field]
    with pytest.raises(ReportError, match=f"{field}: must be"):
        parse_report(json.dumps(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (forged("x"), "shared: must be a list"),
        (forged({"0": 1}), "shared: must be a list"),
        (forged([], 0), "shared: refers to entry 0 of 0"),
        (forged([{}], -1), "shared: refers to entry -1 of 1"),
        (forged([{}], 10**30), "shared: refers to entry"),
        (forged([{"explanation": [3]}], lines=["one"]), "lines: refers to entry 3 of 1"),
        (forged([], lines="one"), "lines: must be a list"),
        (forged([{"explanation": [0]}], lines=[1]), "lines: must hold texts"),
        (forged([], usual=["one"]), "usual: must be an object of objects"),
        (forged([], usual={"rank": 1}), "usual: must be an object of objects"),
    ],
)
def test_a_forged_number_is_named(data: Any, message: str) -> None:
    with pytest.raises(MismatchError) as caught:
        unpacked(data)
    assert str(caught.value).startswith(message)


def test_a_small_report_does_not_become_a_huge_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_form, "_MOST_CHARACTERS", 10_000)
    data = forged(["x" * 1000], 0)
    data["scenarios"][0]["subject"]["findings"] = [0] * 11
    with pytest.raises(MismatchError, match=r"shared: the report would have more than 10,000 characters unpacked"):
        unpacked(data)
    data = {**packed(DATA), "usual": {"scenario": {"notes": ["x" * 10_000]}}}
    with pytest.raises(MismatchError, match=r"more than 10,000 characters"):
        unpacked(data)


def test_a_report_that_is_nested_too_deeply_is_refused() -> None:
    deep: Any = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(MismatchError, match="nested too deeply"):
        unpacked({**packed(DATA), "shared": [deep]})


def test_report_plain_writes_what_other_programs_read(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(report_text(REPORTS[0]))
    printed = CliRunner().invoke(command, ["plain", str(tmp_path)])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == DATA
