"""Reading reports back: what was written comes back, and what is broken is named."""

import copy
import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import conformance.report
from conformance.codec import encode
from conformance.errors import ReportError
from conformance.report.folder import report_text
from conformance.report.html import html_page
from conformance.report.read import parse_report, read_report
from conformance.report.schema import report_schema
from conformance.tests.reports_by_hand import (
    FAIL,
    HOSTILE,
    INTERRUPTED,
    MIXED,
    RANKS,
    RATIOS,
    outcome,
    run_report,
    stored,
)

DATA: dict[str, Any] = encode(run_report(*MIXED, performance=RATIOS))
GOLDEN = Path(conformance.report.__file__).parents[2] / "fixtures" / "reports" / "interrupted.json"
VALIDATOR = jsonschema.Draft202012Validator(report_schema())


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in the report but what is free: the environment and the scenario kept for replay."""
    if path and path[-1] in ("environment", "replay"):
        return
    yield path
    keys = {0, min(len(data) - 1, 3)} if isinstance(data, list) and data else data if isinstance(data, dict) else ()
    for key in keys:
        yield from paths(data[key], (*path, key))


def changed(path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    data = copy.deepcopy(DATA)
    holder(data, path)[path[-1]] = value
    return data


def without(path: tuple[Any, ...]) -> Any:
    data = copy.deepcopy(DATA)
    del holder(data, path)[path[-1]]
    return data


def holder(data: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.getitem, path[:-1], data)


def refusal(data: Any) -> str:
    with pytest.raises(ReportError) as caught:
        parse_report(data if isinstance(data, str) else json.dumps(data))
    return str(caught.value)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    report = stored(tmp_path, *MIXED, performance=RATIOS)
    assert report == run_report(*MIXED, performance=RATIOS)
    assert (report.scenarios[3].subject.ranks, report.performance) == (RANKS, RATIOS)
    assert report == read_report(tmp_path / "report.json")
    assert (report.is_green, len(report.failures)) == (False, 4)


def test_a_report_of_an_earlier_release_comes_back_as_it_was() -> None:
    """Read the file of a release whose encoders were written by hand, and compare with a run that found the same."""
    data = json.loads(GOLDEN.read_text())
    for report in (read_report(GOLDEN), INTERRUPTED):
        written = encode(report)
        for scenario in written["scenarios"]:
            assert scenario.pop("contaminated_by") == ""  # later releases say this, too,
            assert scenario.pop("tried") == {}  # what was tried of a backend's operations,
            assert scenario.pop("native_notes") == []  # what torch's column noted,
            if scenario["expectation"] is not None:
                assert scenario["expectation"].pop("new") == []  # what was wrong beside a known failure,
            for result in filter(None, (scenario["subject"], scenario["native"])):
                for finding in result["findings"]:
                    finding.pop("requirements")  # which requirements it speaks for,
                    finding.pop("mistake")  # what its evidence was recognised as,
                    finding.pop("likeness")  # in which way it is wrong,
                    finding.pop("wrong")  # each thing that is,
        assert written["subject"].pop("source") == ""  # what was typed,
        written["environment"].pop("sources", None)  # which sources were run,
        assert written.pop("specification") == ""  # and which version of the specification was asked
        assert written == data
    assert data["scenarios"][-2]["notes"][0]["value"] == "nan"
    VALIDATOR.validate(data)


def test_a_scenario_that_is_there_twice_is_refused() -> None:
    data = copy.deepcopy(DATA)
    data["scenarios"].append(data["scenarios"][0])
    assert refusal(data) == f"scenarios: {data['scenarios'][0]['id']} is there 2 times, a run reports each once"


@pytest.mark.parametrize(
    "path",
    [
        ("duration_s",), ("totals", "selected"), ("totals", "subject", "PASS"), ("requirements", 0, "scenarios"),
        ("scenarios", 1, "subject", "duration_ms"), ("scenarios", 0, "subject", "num_collectives"),
    ],
)  # fmt: skip
def test_a_negative_duration_or_count_is_refused(path: tuple[Any, ...]) -> None:
    data = copy.deepcopy(DATA)
    holder(data, path)[path[-1]] = -1
    assert f"{path[-1]}: must be >= 0, got -1" in refusal(data)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (("median_warm_scenario_ms",), {"2\nChecked: ": 1.0}),
        (("scenarios", 0, "tried"), {"all_reduce": {"\x1b": [1, 0]}}),
    ],
)
def test_a_name_that_is_no_line_of_text_is_refused(path: tuple[Any, ...], names: dict[str, Any]) -> None:
    assert "must be a line of at most" in refusal(changed(path, names))


def test_a_page_of_the_run_is_the_page_of_its_file() -> None:
    assert html_page([INTERRUPTED]) == html_page([parse_report(report_text(INTERRUPTED))])


def test_a_report_satisfies_the_schema() -> None:
    VALIDATOR.check_schema(report_schema())
    VALIDATOR.validate(DATA)


@pytest.mark.parametrize("wrong", [{"a": 1}, ["x"], 1.5, "x", True, None])
def test_schema_and_reader_refuse_the_same(wrong: Any) -> None:
    """Put a wrong value into every place in turn; nobody is to accept what the other refuses."""
    seen = 0
    for path in paths(DATA):
        data = changed(path, wrong)
        try:
            parse_report(json.dumps(data))
            accepted = True
        except ReportError:
            accepted = False
        assert accepted == VALIDATOR.is_valid(data), f"{path} = {wrong!r}"
        seen += not accepted
    assert seen > 100


def test_schema_and_reader_miss_the_same() -> None:
    """Leave every field out in turn; only one that has a default, and may be younger than the report, is not missed."""
    missed, known = set(), set()
    for path in paths(DATA):
        if path and isinstance(path[-1], str):
            data = without(path)
            known.add(path[-1])
            try:
                parse_report(json.dumps(data))
                assert VALIDATOR.is_valid(data), path
            except ReportError:
                assert not VALIDATOR.is_valid(data), path
                missed.add(path[-1])
    assert {"scenarios", "verdict", "subject", "findings", "ranks", "op"} <= missed
    assert {"duration_ns", "explanation", "order", "performance"} <= known - missed


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("scenarios", 3, "subject", "verdict"), "FINE", "scenarios[3].subject.verdict: Invalid enum value 'FINE'"),
        (("scenarios", 0, "world_size"), "2", "scenarios[0].world_size: Expected `int`, got `str`"),
        (("scenarios", 0, "world_size"), True, "scenarios[0].world_size: Expected `int`, got `bool`"),
        (("scenarios", 3, "subject", "ranks", 1, "collectives", 0, "shapes"), [[8, "4"]],
         "scenarios[3].subject.ranks[1].collectives[0].shapes[0][1]: Expected `int`, got `str`"),
        (("scenarios", 3, "subject", "colour"), "red", "scenarios[3].subject.colour: this field is not known"),
        (("totals", "subject", "PASS"), None, "totals.subject[...]: Expected `int`, got `null`"),
        (("performance", 0, "median"), "1.0", "performance[0].median: Expected `float`, got `str`"),
        (("usual",), {}, "it is packed: `ddp-conformance report plain` of release 0.2.0"),
        (("colour",), "red", "colour: this field is not known"),
        (("schema_version",), 2, "schema_version 2 is not supported; this release of ddp-conformance reads 1"),
        (("schema_version",), True, "schema_version True is not supported"),
        ((), [], "Expected `object`, got `array`"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    assert message in refusal(changed(path, value))


def test_a_missing_field_is_named() -> None:
    assert refusal(without(("scenarios", 2, "native", "findings"))) == (
        "scenarios[2].native: Object missing required field `findings`"
    )


def test_a_truncated_report_is_refused_wherever_it_ends() -> None:
    text = json.dumps(DATA)
    for end in range(0, len(text), 997):
        assert refusal(text[:end]) == "not valid JSON: Input data was truncated"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    text = json.dumps(changed(("duration_s",), 0.25)).replace('"duration_s": 0.25', f'"duration_s": {number}')
    assert number in text
    refusal(text)


def test_what_cannot_be_a_report_is_refused(tmp_path: Path) -> None:
    assert "not valid JSON" in refusal("[" * 100_000)
    (tmp_path / "report.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ReportError, match="not valid JSON"):
        read_report(tmp_path)
    with pytest.raises(ReportError, match="cannot read"):
        read_report(tmp_path / "nowhere.json")


def test_hostile_strings_come_back_as_they_are(tmp_path: Path) -> None:
    report = stored(tmp_path, outcome("gradients/GRAD-01/x", FAIL, summary=HOSTILE))
    assert report.scenarios[0].subject.summary == HOSTILE
