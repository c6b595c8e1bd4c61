"""The matrix of a backend's operations, and the answer by groups: both from what a report holds."""

import dataclasses
import json
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from conformance.codec import encode
from conformance.errors import ReportError, present
from conformance.models.catalogue import get_fixture
from conformance.observation import Ending, Observation
from conformance.programs.operation_cells import UNDECLARED
from conformance.programs.operations.cell import Cell
from conformance.programs.rank_context import RankContext, Unsupported
from conformance.programs.registry import get_program
from conformance.report.folder import report_text
from conformance.report.groups import all_groups, groups_of
from conformance.report.html import html_page
from conformance.report.markdown import markdown
from conformance.report.operations import operation_matrix
from conformance.report.read import parse_report
from conformance.run.known_failures import MET, Excuse
from conformance.run.outcome import Tried
from conformance.run.report import Report
from conformance.run.tried import tried_in
from conformance.scenario import Scenario
from conformance.tests.reports_by_hand import FAIL, PASS, UNSUPPORTED, outcome, run_report, scenario
from conformance.verdict import Verdict

WAITED, POLLED = Cell("all_reduce", lifetime="wait"), Cell("all_reduce", "int64", lifetime="polled")
CELLS = scenario(
    "gradients/GRAD-01/cells", program="operation_cells", arguments={"cells": [WAITED.to_json(), POLLED.to_json()]}
)
FATE = scenario(
    "gradients/GRAD-01/fate", arguments={"operation": "broadcast", "fate": "killed", "calling": "async", "doomed": [1]}
)


def seen(facts: dict[str, Any], phase: str = "", kind: str = "returned") -> Observation:
    return Observation(0, Ending(kind), facts, phase=phase)


def tried(of: Scenario, *ranks: Observation, verdict: Verdict = FAIL) -> Tried:
    return tried_in(of, dict(enumerate(ranks)), verdict)


def test_a_cell_is_wrong_if_one_rank_says_so() -> None:
    right = {WAITED.describe(): "", POLLED.describe(): ""}
    found = tried(CELLS, seen(right), seen({**right, POLLED.describe(): "is_completed() was still False"}))
    assert found == {
        "all_reduce": {
            "": (2, 1), "dtype float32": (1, 0), "dtype int64": (1, 1), "op SUM": (2, 1), "lifetime wait": (1, 0),
            "lifetime polled": (1, 1), "ranks 2": (2, 1),
        }
    }  # fmt: skip
    assert tried(CELLS, seen(right), seen(right), verdict=PASS)["all_reduce"][""] == (2, 0)


def test_a_cell_that_never_ended_is_wrong_and_what_came_after_it_was_not_tried() -> None:
    found = tried(CELLS, seen({}, phase=WAITED.describe(), kind="hung"), seen({WAITED.describe(): ""}))
    assert found["all_reduce"][""] == (1, 1)
    assert "lifetime polled" not in found["all_reduce"]


def test_a_cell_that_needs_what_the_backend_does_not_declare_is_right_in_no_count_and_no_failure() -> None:
    facts = {WAITED.describe(): "", POLLED.describe(): UNDECLARED}
    assert tried(CELLS, seen(facts), seen(facts), verdict=PASS)["all_reduce"][""] == (1, 0)
    apart = dataclasses.replace(CELLS, arguments={**CELLS.arguments, "has_undeclared": True})
    program = get_program("operation_cells")
    demands = present(program.expectation)(apart)[0]
    assert demands[POLLED.describe()].mismatch(UNDECLARED) is None
    assert present(program.expectation)(CELLS)[0][POLLED.describe()].mismatch(UNDECLARED) is not None


def test_where_the_backend_declares_nothing_of_all_cells_the_scenario_is_unsupported_and_does_not_pass() -> None:
    half = Cell("all_reduce", "bfloat16")
    apart = scenario(
        "gradients/GRAD-01/cells", program="operation_cells",
        arguments={"cells": [half.to_json()], "has_undeclared": True},
    )  # fmt: skip
    rank = RankContext(
        apart, rank=0, device=torch.device("cpu"), process_group=cast("dist.ProcessGroup", None),
        fixture=get_fixture("mlp"), wrap=lambda module, **options: module,
    )  # fmt: skip
    with pytest.raises(Unsupported, match="declares nothing"):
        get_program("operation_cells").body(rank)


def test_a_scenario_of_one_operation_is_a_cell_and_one_that_did_not_run_is_none() -> None:
    assert tried(FATE, seen({})) == {
        "broadcast": {"": (1, 1), "fate killed": (1, 1), "calling async": (1, 1), "ranks 2": (1, 1)}
    }
    assert tried(FATE) == tried(FATE, seen({}), verdict=UNSUPPORTED) == {}
    assert tried(scenario("gradients/GRAD-01/mlp"), seen({})) == {}


def report() -> Report:
    """Four cells of all_reduce, of which only those that were polled are wrong, and one of broadcast."""
    half = {"": (2, 1), "dtype int8": (1, 0), "dtype int64": (1, 1), "lifetime wait": (1, 0), "lifetime polled": (1, 1)}
    other = {
        "": (2, 1),
        "dtype int8": (1, 1),
        "dtype int64": (1, 0),
        "lifetime wait": (1, 0),
        "lifetime polled": (1, 1),
    }
    outcomes = [
        dataclasses.replace(outcome("gradients/GRAD-01/a", FAIL), tried={"all_reduce": half}),
        dataclasses.replace(outcome("gradients/GRAD-02/b", FAIL), tried={"all_reduce": other}),
        dataclasses.replace(outcome("buckets/BUCKET-01/c", PASS), tried={"broadcast": {"": (1, 0), "root 2": (1, 0)}}),
    ]
    return run_report(*outcomes)


def test_the_matrix_names_the_axis_that_is_to_blame() -> None:
    matrix = operation_matrix(report().scenarios)
    assert matrix.axes == ("dtype", "root", "lifetime")
    first, second = matrix.rows
    assert (first.operation, str(first.total), second.operation, str(second.total)) == (
        "all_reduce", "2/4", "broadcast", "0/1",
    )  # fmt: skip
    by_axis = dict(zip(matrix.axes, first.axes, strict=True))
    assert [(str(one), one.verdict) for one in by_axis["lifetime"].suspect] == [("polled 2/2", FAIL)]
    assert by_axis["dtype"].suspect == ()  # every dtype is as often wrong as the operation


def test_what_is_excused_is_marked_as_known_and_no_more_than_that() -> None:
    """A baseline excuses a scenario; the same value may be wrong in another one that it does not excuse."""
    polled = {"": (2, 2), "lifetime polled": (2, 2)}
    known = dataclasses.replace(
        outcome("gradients/GRAD-01/a", FAIL, excuse=Excuse(MET, FAIL, "gloo drops it", "", "")),
        tried={"all_reduce": polled},
    )
    ((lifetime,),) = [row.axes for row in operation_matrix([known]).rows]
    assert [(str(one), one.verdict) for one in lifetime.others] == [("polled 2/2 known", UNSUPPORTED)]
    new = dataclasses.replace(outcome("gradients/GRAD-02/b", FAIL), tried={"all_reduce": polled})
    ((lifetime,),) = [row.axes for row in operation_matrix([known, new]).rows]
    assert [(str(one), one.verdict) for one in lifetime.others] == [("polled 4/4 2 known", FAIL)]
    assert "2/2 known" in html_page([run_report(known)])


def test_the_page_shows_the_matrix_and_one_of_ddps_none() -> None:
    page = html_page([report()])
    assert "Operations by axis" in page
    assert '<span class="verdict FAIL">polled 2/2</span>' in page
    assert "Operations by axis" not in html_page([run_report(outcome("gradients/GRAD-01/a", FAIL))])


def test_what_was_tried_comes_back_from_the_file_and_what_no_run_counts_is_refused() -> None:
    made = report()
    assert parse_report(report_text(made)) == made
    for wrong in ([2], [1, 2], [3, -1]):
        data = encode(made)
        data["scenarios"][0]["tried"]["all_reduce"]["dtype int8"] = wrong
        with pytest.raises(ReportError, match=r"scenarios\[0\]\.tried\.all_reduce\.dtype int8"):
            parse_report(json.dumps(data))


def test_groups_count_what_passed_of_what_applies_with_the_undeclared_apart() -> None:
    made = run_report(
        outcome("gradients/GRAD-01/a", PASS), outcome("gradients/GRAD-02/b", UNSUPPORTED),
        outcome("buckets/BUCKET-01/c", FAIL),
    )  # fmt: skip
    assert [f"{one.chapter}: {one}" for one in (*groups_of(made), all_groups(made))] == [
        "gradients: 1 of 2, 1 undeclared", "buckets: 0 of 1", "all: 1 of 3, 1 undeclared",
    ]  # fmt: skip
    nothing = run_report(outcome("gradients/GRAD-01/a", UNSUPPORTED))
    assert str(groups_of(nothing)[0]) == "0 of 1, 1 undeclared"
    assert "| gradients | 1 of 2, 1 undeclared | 2 |" in markdown(made)
    assert '<td class="passed">1 of 2, 1 undeclared</td>' in html_page([made])
