"""Lanes: what they work on side by side comes back whole, in fewer seconds, and whatever ends them ends them all."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from click.testing import CliRunner

from conformance.backends.backend import get_backend
from conformance.backends.gloo import GLOO
from conformance.cli import main
from conformance.errors import SubjectError
from conformance.run import runner
from conformance.run.lanes import Enough, LaneError, Work, batches_of, in_lanes, num_lanes
from conformance.run.order import LISTED, Order
from conformance.scenario import Scenario
from conformance.subjects.subject import get_subject
from conformance.suite import load_scenarios
from conformance.surroundings.processes import children_of
from conformance.tests.processes import CAN_GATHER, all_end, huge_kb, processes_under
from conformance.verdict import Verdict
from conformance.waiting import loop
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

GIB = 2**30
PROGRAMS = "conformance.tests.worker_programs"
STEP = Scenario("lanes/LANE-01/step", ("LANE-01",), "workers/step")


Task = TypeVar("Task")
Result = TypeVar("Result")


def results(work: Work[Task, Result], batches: Iterable[Iterable[Task]], jobs: int) -> list[Result]:
    found: list[Result] = []
    in_lanes(work, batches, jobs, found.append)
    return found


@pytest.mark.parametrize("jobs", [1, 2, 4, 8])
def test_all_lanes_work_at_once_and_each_task_is_done_once(jobs: int) -> None:
    all_have_begun = multiprocessing.get_context("fork").Barrier(jobs)

    def meets(tasks: Iterator[int], take: Callable[[tuple[int, int]], None]) -> None:
        for number, task in enumerate(tasks):
            if number == 0:
                all_have_begun.wait()
            take((task, os.getpid()))

    found = results(meets, [(number, number + 1) for number in range(0, 64, 2)], jobs)
    assert sorted(task for task, _ in found) == list(range(64))
    assert len({pid for _, pid in found}) == jobs


def test_one_lane_keeps_the_order() -> None:
    def repeats(tasks: Iterator[int], take: Callable[[int], None]) -> None:
        for task in tasks:
            take(task)

    assert results(repeats, [(3, 1), (2,)], 1) == [3, 1, 2]


def test_what_work_raises_is_raised_here_and_no_lane_is_left() -> None:
    def fails(tasks: Iterator[int], take: Callable[[int], None]) -> None:
        for task in tasks:
            if task == 2:
                raise SubjectError("no such DDP")
            take(os.getpid())

    before = children_of(os.getpid()).keys()
    with pytest.raises(SubjectError, match="no such DDP"):
        results(fails, [(1,), (2,), (3,)], 2)
    assert children_of(os.getpid()).keys() <= before


def test_a_lane_that_dies_is_told() -> None:
    def dies(tasks: Iterator[int], take: Callable[[int], None]) -> None:
        for task in tasks:
            os._exit(task)

    with pytest.raises(LaneError, match="exit code 7"):
        results(dies, [(7,)], 2)


@pytest.mark.parametrize("in_loop", [False, True])
def test_who_wants_no_more_ends_lanes_in_the_midst_of_their_work_and_they_clean_up(
    tmp_path: Path, in_loop: bool
) -> None:
    both_have_begun = multiprocessing.get_context("fork").Barrier(2)  # else the first lane might do the work alone

    def goes_on(tasks: Iterator[int], take: Callable[[int], None]) -> None:
        try:
            both_have_begun.wait()
            for task in tasks:
                take(task)
                loop.run(trio.sleep_forever) if in_loop else signal.pause()
        finally:
            (tmp_path / str(os.getpid())).touch()

    found: list[int] = []

    def take(one: int) -> None:
        found.append(one)
        if len(found) == 2:
            raise Enough

    in_lanes(goes_on, [(1,), (2,)], 2, take)
    assert len(list(tmp_path.iterdir())) == 2


def test_there_are_as_many_lanes_as_processors_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr("conformance.run.lanes._available_bytes", lambda: 100 * GIB)
    assert num_lanes(GLOO) == 4
    assert num_lanes(GLOO, processors_each=2) == 8
    assert num_lanes(GLOO, num_scenarios=20) == 1
    for processors, lanes in ((1, 1), (2, 2), (6, 2), (12, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, number=processors: range(number))
        assert num_lanes(GLOO) == lanes


@pytest.mark.parametrize(("device_bytes", "lanes"), [(None, 1), (8 * GIB, 1), (24 * GIB, 2), (80 * GIB, 4)])
def test_lanes_share_a_device_that_has_room_for_them(
    device_bytes: int | None, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr("conformance.run.lanes._available_bytes", lambda: 100 * GIB)
    on_a_device = replace(GLOO, device_type="cuda", device_bytes=lambda: device_bytes)
    assert num_lanes(on_a_device) == lanes


def scenario(name: str, requirement: str = "GRAD-01", world_size: int = 2) -> Scenario:
    return Scenario(f"gradients/{requirement}/{name}", (requirement,), "train", world_size=world_size)


def test_neighbours_on_one_kind_of_ranks_go_to_one_lane_eight_at_a_time() -> None:
    chosen = (
        *(scenario(f"a{number}") for number in range(10)),
        scenario("b", "GRAD-02"),
        scenario("c", "GRAD-02", 3),
    )
    assert batches_of(chosen) == [tuple(range(8)), (8, 9, 10), (11,)]


def steps_on(zygote: ZygoteProcess) -> Work[int, tuple[bool, set[str]]]:
    """Return what runs a step for each task and yields whether `zygote` forked its ranks' zygote, and their ends."""

    def steps(tasks: Iterator[int], take: Callable[[tuple[bool, set[str]]], None]) -> None:
        with zygote.local() as own, Controller(get_backend("gloo"), zygote=own) as controller:
            for _ in tasks:
                ends = {str(seen.fate) for seen in controller.run(STEP, get_subject("torch")).values()}
                take((own.pid in children_of(zygote.pid), ends))

    return steps


def test_lanes_share_what_one_zygote_has_imported(tmp_path: Path) -> None:
    with closing(ZygoteProcess(tmp_path, (PROGRAMS,))) as zygote:
        zygote.await_ready()
        assert results(steps_on(zygote), [(1,), (2,)], 2) == [(True, {"returned"})] * 2
        assert huge_kb(zygote.pid) > 100_000 or not CAN_GATHER
        assert processes_under(tmp_path) == [zygote.pid]
        assert [path.name for path in zygote.directory.iterdir() if path.is_dir()] == []
    assert processes_under(tmp_path) == []


@pytest.mark.nightly
def test_a_lane_that_is_killed_leaves_no_ranks(tmp_path: Path) -> None:
    def is_killed(tasks: Iterator[int], take: Callable[[object], None]) -> None:
        def take_and_die(one: object) -> None:
            take(one)
            os.kill(os.getpid(), signal.SIGKILL)

        steps_on(zygote)(tasks, take_and_die)

    with closing(ZygoteProcess(tmp_path, (PROGRAMS,))) as zygote:
        zygote.await_ready()
        with pytest.raises(LaneError, match="exit code -9"):
            results(is_killed, [(1,), (2,)], 2)
        assert all_end([pid for pid in processes_under(tmp_path) if pid != zygote.pid], within_s=10)


@pytest.mark.nightly
def test_lanes_whose_zygote_has_ended_have_new_ones(tmp_path: Path) -> None:
    with closing(ZygoteProcess(tmp_path, (PROGRAMS,))) as zygote:
        zygote.await_ready()
        os.kill(zygote.pid, signal.SIGKILL)
        assert all_end([zygote.pid], within_s=10)
        assert results(steps_on(zygote), [(1,), (2,)], 2) == [(False, {"returned"})] * 2
    assert processes_under(tmp_path) == []


@pytest.mark.nightly
def test_lanes_come_to_the_verdicts_of_one() -> None:
    pairs = [one for one in load_scenarios() if one.world_size == 2 and one.recorded]
    chosen = [one for one in pairs if one.chapter == "accumulation"][::40]
    chosen += [one for one in pairs if one.chapter == "gradients"][::150]
    subject = get_subject("conformance.chapters.accumulation.mutants:ReducesInsideNoSync")
    found: list[dict[str, Verdict]] = []
    for jobs, order in ((1, LISTED), (3, LISTED), (2, Order("shuffled", 7))):
        report = runner.run(chosen, subject, get_backend("gloo"), native=False, jobs=jobs, order=order)
        assert report.complete
        assert len(report.scenarios) == len(chosen)
        found.append({one.id: one.subject.verdict for one in report.scenarios})
    assert found == [found[0]] * 3
    assert {Verdict.PASS, Verdict.FAIL} <= set(found[0].values())


@pytest.mark.nightly
def test_lanes_end_at_the_first_failure_and_leave_nothing() -> None:
    chosen = [one for one in load_scenarios() if one.chapter == "gradients" and one.world_size == 2][:20]
    subject = get_subject("conformance.chapters.gradients.mutants:NoDivision")
    before = children_of(os.getpid()).keys()
    report = runner.run(chosen, subject, get_backend("gloo"), native=False, jobs=2, fail_fast=True)
    assert report.failures
    assert not report.complete
    assert children_of(os.getpid()).keys() <= before


@pytest.mark.parametrize("jobs", ["0", "-1", "two", ""])
def test_what_is_no_number_of_lanes_is_refused(jobs: str) -> None:
    result = CliRunner().invoke(main, ["run", "--jobs", jobs])
    assert result.exit_code == 2
    assert "neither auto nor a number of lanes" in result.stderr


def test_lanes_do_not_go_with_ranks_of_a_launcher() -> None:
    result = CliRunner().invoke(main, ["run", "--jobs", "2", "--attach"])
    assert result.exit_code == 2
    assert "cannot go with --attach" in result.stderr
