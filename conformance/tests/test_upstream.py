"""torch's own tests on another DDP: a DDP that is broken in four ways is found out in each, and nothing is left."""

import io
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from expecttest import assert_expected_inline
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from conformance.cli import main
from conformance.errors import ConformanceError, SpecificationError
from conformance.observation import Ending, Observation, Raised
from conformance.subjects.subject import Subject
from conformance.upstream.comparison import Comparison, Row, compare
from conformance.upstream.cpu_placement import on_cpu
from conformance.upstream.exclusions import check_exclusions, load_exclusions, parse_exclusions
from conformance.upstream.launcher import TestRanks, ends_of, find_tests
from conformance.upstream.outcome import RankEnd, TestName, TestOutcome, TestRun, combine
from conformance.upstream.report import print_comparison
from conformance.waiting import loop

BROKEN = f"{__name__}:Broken"
TRAINS = TestName("distributed_test", "test_DistributedDataParallelCPU_grad_is_view")
REFUSES = TestName("distributed_test", "test_DistributedDataParallel_requires_grad")
CREATES_GRAPHS = TestName("distributed_test", "test_ddp_create_graph")
WANTS_GPUS = TestName("distributed_test", "test_ddp_zero_output_features")
SETS_STATIC_GRAPH = TestName("distributed_test", "test_static_graph_api_cpu")


class Broken(DistributedDataParallel):
    """Never averages; kills rank 1 when it should refuse a module; hangs when the graph is declared static."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        if not list(module.parameters()) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(module, **options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, as if there were no other ranks."""
        return self.module(*inputs, **kwargs)

    def _set_static_graph(self) -> None:
        threading.Event().wait()


def end(rank: int, outcome: TestOutcome, cause: str = "", constructed: int = 1) -> RankEnd:
    return RankEnd(rank, outcome, cause, num_constructed=constructed)


def run(method: str, *ends: RankEnd) -> TestRun:
    return TestRun(TestName("suite", method), len(ends), ends)


# ------------------------------------------------------------------------------------------------------- on real ranks


@pytest.mark.nightly
def test_a_ddp_that_never_averages_and_kills_a_rank_is_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    selection = [option for name in (TRAINS, REFUSES, CREATES_GRAPHS) for option in ("-k", str(name))]
    result = CliRunner().invoke(main, ["upstream", "--ddp", BROKEN, "--report", str(report), *selection])
    assert result.exit_code == 1, result.output
    tests = {test["test"]: test for test in json.loads(report.read_text())["tests"]}
    assert {name: (test["torch"]["outcome"], test["subject"]["outcome"]) for name, test in tests.items()} == {
        str(TRAINS): ("passed", "failed"),
        str(REFUSES): ("passed", "crashed"),  # on rank 1, while rank 0 is content
        str(CREATES_GRAPHS): ("passed", "passed"),
    }
    assert "Tensor-likes are not close" in tests[str(TRAINS)]["subject"]["explanation"]
    assert tests[str(REFUSES)]["subject"]["explanation"] == "rank 1 crashed: killed by SIGKILL"
    assert f"Of 3 tests that torch's DDP passes, {BROKEN} passes 1" in result.output


@pytest.mark.nightly
def test_a_hang_ends_alone_and_says_where(tmp_path: Path) -> None:
    with TestRanks(Subject("broken", BROKEN)) as ranks:
        hung = loop.run(ranks.run, SETS_STATIC_GRAPH, 2, 6.0)
        assert hung.outcome is TestOutcome.HUNG
        assert "in _set_static_graph" in hung.explanation
        assert loop.run(ranks.run, TRAINS, 2, 60.0).outcome is TestOutcome.FAILED  # the others run
        assert loop.run(ranks.run, WANTS_GPUS, 2, 60.0).outcome is TestOutcome.PASSED
        tests = find_tests(ranks)
    methods = {name.method for name in tests}
    assert {"test_ddp_uneven_inputs", "test_ddp_comm_hook_logging", "test_ddp_comparison"} <= methods
    assert not {"test_all_reduce_sum", "test_broadcast", "test_get_future"} & methods
    check_exclusions(load_exclusions(), tests)


@pytest.mark.nightly
def test_a_ddp_that_cannot_be_imported_where_the_tests_are_is_refused() -> None:
    absent = Subject("absent", "no_such_module:DDP")
    with TestRanks(absent) as ranks, pytest.raises(ConformanceError, match="no_such_module"):
        ranks.tests(2)


@pytest.mark.nightly
def test_a_test_that_does_not_exist_is_a_mistake() -> None:
    result = CliRunner().invoke(main, ["upstream", "--ddp", "torch", "-k", "no_such_test"])
    assert result.exit_code == 2
    assert "no test matches no_such_test" in result.stderr


def test_a_report_that_cannot_be_written_is_a_mistake_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["upstream", "--report", str(tmp_path / "file" / "report.json")])
    assert result.exit_code == 2
    assert "nothing was run" in result.stderr


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([end(0, TestOutcome.PASSED), end(1, TestOutcome.PASSED)], TestOutcome.PASSED),
        ([end(0, TestOutcome.PASSED, constructed=0), end(1, TestOutcome.PASSED, constructed=0)], TestOutcome.IDLE),
        ([end(0, TestOutcome.PASSED), end(1, TestOutcome.CRASHED)], TestOutcome.CRASHED),
        ([end(1, TestOutcome.FAILED), end(0, TestOutcome.STOPPED)], TestOutcome.FAILED),
        ([end(1, TestOutcome.HUNG), end(0, TestOutcome.FAILED)], TestOutcome.HUNG),
        ([end(0, TestOutcome.SKIPPED), end(1, TestOutcome.SKIPPED)], TestOutcome.SKIPPED),
        ([end(0, TestOutcome.SKIPPED), end(1, TestOutcome.PASSED)], TestOutcome.FAILED),
    ],
)
def test_one_rank_is_enough_to_fail_a_test(ends: list[RankEnd], expected: TestOutcome) -> None:
    assert combine(tuple(ends)) is expected


def test_a_rank_that_died_has_ended_first_and_the_others_as_long_as_they_took() -> None:
    """A rank may raise because another one has died; when that one died, nobody knows so well."""
    error = Raised("ValueError", ("ValueError",), "no", "the traceback")
    facts = {"constructed": 2, "cause": "tests.py:7 fail()"}
    stack = "Thread 0x1:\n  File idle\n\nCurrent thread 0x2:\n  File a\n  File b\n  File c\n  File d\n"
    seen = [
        Observation(0, Ending("returned"), {"constructed": 1}, duration_ns=3),
        Observation(1, Ending("raised", detail="raised ValueError: no"), facts, error, duration_ns=2),
        Observation(2, Ending("killed", 9, "killed by SIGKILL"), stderr="last words", duration_ns=9),
        Observation(3, Ending("returned"), unsupported="no GPU", duration_ns=1),
        Observation(4, Ending("hung"), stack=stack, duration_ns=9),
        Observation(5, Ending("abandoned"), duration_ns=9),
        Observation(6, Ending("raised", detail="raised MessageError: rubbish"), raised=error, duration_ns=4),
    ]
    assert ends_of(seen) == (
        RankEnd(2, TestOutcome.CRASHED, "killed by SIGKILL", "last words"),
        RankEnd(3, TestOutcome.SKIPPED, "no GPU"),
        RankEnd(1, TestOutcome.FAILED, "tests.py:7 fail()", "the traceback", 2),
        RankEnd(0, TestOutcome.PASSED, num_constructed=1),
        RankEnd(6, TestOutcome.CRASHED, "raised MessageError: rubbish"),
        RankEnd(4, TestOutcome.HUNG, "File a\nFile b\nFile c", stack),
        RankEnd(5, TestOutcome.STOPPED, "still running after another rank had failed"),
    )


def test_a_run_that_shows_nothing_does_not_conform() -> None:
    idle = run("a", end(0, TestOutcome.PASSED, constructed=0))
    assert not Comparison("mine", (Row(idle, idle),)).conforms
    assert not Comparison("mine", ()).conforms


def test_exclusions_need_a_reason_and_a_test() -> None:
    good = '[[exclusion]]\ntest = "suite::a"\nreason = "because"\n'
    assert parse_exclusions(good) == {TestName("suite", "a"): "because"}
    with pytest.raises(SpecificationError, match="excluded twice"):
        parse_exclusions(good * 2)
    for bad in ('[[exclusion]]\ntest = "suite::a"', good.replace("because", ""), good + 'note = "x"', "[[exclusion]"):
        with pytest.raises(SpecificationError):
            parse_exclusions(bad)
    with pytest.raises(SpecificationError, match="no such test in this version of torch: suite::a;"):
        check_exclusions(parse_exclusions(good), {TestName("suite", "b")})


@pytest.mark.parametrize("device", [0, 1, "cuda", "cuda:1", torch.device("cuda", 3)])
def test_cuda_means_the_cpu(device: Any) -> None:
    assert on_cpu(device) == torch.device("cpu")


@pytest.mark.parametrize("other", ["cpu", "meta", None, True, torch.float16, torch.device("cpu")])
def test_nothing_else_does(other: Any) -> None:
    assert on_cpu(other) is other


def test_the_report_names_both_ways_and_the_excluded() -> None:
    passed = [end(0, TestOutcome.PASSED), end(1, TestOutcome.PASSED)]
    failed = [end(1, TestOutcome.FAILED, "tests.py:7 self.assertEqual(a, b)\nAssertionError: 1 != 2"), passed[0]]
    native = {"both": passed, "missing": passed, "ahead": failed, "neither": failed, "internal": passed}
    tested = {"both": passed, "missing": failed, "ahead": passed, "neither": failed, "internal": failed}
    comparison = compare(
        "mine",
        {TestName("suite", method): run(method, *ends) for method, ends in native.items()},
        {TestName("suite", method): run(method, *ends) for method, ends in tested.items()},
        {TestName("suite", "internal"): "looks at a C++ object"},
    )
    assert not comparison.conforms
    console = Console(width=80, record=True, file=io.StringIO())
    print_comparison(console, comparison)
    assert_expected_inline(
        "\n".join(line.rstrip() for line in console.export_text().splitlines()),
        """\
Passed by torch's DDP and not by mine
suite::missing             rank 1 failed: tests.py:7 self.assertEqual(a, b)
2 ranks                    AssertionError: 1 != 2

Passed by mine and not by torch's DDP
suite::ahead               rank 1 failed: tests.py:7 self.assertEqual(a, b)
2 ranks                    AssertionError: 1 != 2

Excluded
suite::internal            looks at a C++ object
2 ranks

torch's DDP: 3 of 5 passed (2 failed)
mine: 2 of 5 passed (3 failed)
Of 2 tests that torch's DDP passes, mine passes 1; 1 excluded.""",
    )
