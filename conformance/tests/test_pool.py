"""What a pool makes of ranks that die, stop, raise, or leave something behind, and that the next scenario runs."""

import math
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
import trio

from conformance.backends.backend import get_backend
from conformance.observation import Ending, Observation, Raised
from conformance.recorder.flight_record import LastSeen, read_flight
from conformance.scenario import Fault, Scenario, Step
from conformance.subjects.subject import get_subject
from conformance.tests.busy_machine import at_this_load
from conformance.tests.processes import all_end, processes_under
from conformance.tests.worker_programs import LEAKS, OWNERS
from conformance.waiting import loop
from conformance.waiting.limits import DEATH_GRACE_S, RAISE_GRACE_S
from conformance.workers import answers as answers_module
from conformance.workers import controller as controller_module
from conformance.workers.answers import Answers
from conformance.workers.channel import Channel, pair, wait
from conformance.workers.controller import Controller
from conformance.workers.deadline import Deadline
from conformance.workers.messages import Answer, FromRank, Seat
from conformance.workers.pool import Pool
from conformance.workers.zygote_process import ZygoteProcess

TORCH = get_subject("torch")
PROGRAMS = "conformance.tests.worker_programs"

T = TypeVar("T")


def scenario(program: str, **changes: Any) -> Scenario:
    return Scenario(id=f"pool/POOL-01/{program}", requirements=("POOL-01",), program=f"workers/{program}", **changes)


@pytest.fixture(scope="module")
def controller(zygote: ZygoteProcess) -> Iterator[Controller]:
    with Controller(get_backend("gloo"), preload=(PROGRAMS,), zygote=zygote) as controller:
        yield controller


def run(controller: Controller, wanted: Scenario) -> Mapping[int, Observation]:
    observations = controller.run(wanted, TORCH)
    assert list(observations) == list(range(wanted.world_size))
    assert all(observation.rank == rank for rank, observation in observations.items())
    return observations


def pids(observations: Mapping[int, Observation]) -> list[int]:
    return [observation.facts["pid"] for observation in observations.values()]


def next_scenario_runs(controller: Controller) -> bool:
    return {str(seen.fate) for seen in run(controller, scenario("step")).values()} == {"returned"}


def flights(controller: Controller) -> list[LastSeen]:
    """Return what the ranks of the one pool at work have written about themselves, by rank."""
    (pool,) = controller._busy
    return [read_flight(seat.file("flight")) for seat in pool._seats.values()]


def beside(
    controller: Controller, wanted: Scenario, act: Callable[[], Awaitable[T]]
) -> tuple[Mapping[int, Observation], T]:
    """Run `wanted`, and `act` when its ranks, which must be there, have been told to begin."""
    seen, done = loop.run(loop.together, partial(controller.observe, wanted, TORCH), act)
    return seen, done


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[Deadline]:
    """Return what will hold the deadline of every job."""
    made: list[Deadline] = []

    def make(*arguments: Any) -> Deadline:
        made.append(Deadline(*arguments))
        return made[-1]

    monkeypatch.setattr(answers_module, "Deadline", make)
    return made


async def has_answered(controller: Controller, rank: int) -> None:
    """Return when the rank of the one pool at work has."""
    (pool,) = controller._busy
    while pool._answers is None or rank not in pool._answers.messages:
        await trio.sleep(0.01)


class Interference:
    """Does something to the process that a rank names through a pipe, once it has and `when` is true."""

    def __init__(self, pipe: Path, act: Callable[[int], None], when: Callable[[], bool] = lambda: True) -> None:
        os.mkfifo(pipe)
        self._thread = threading.Thread(target=self._meet, args=(pipe, act, when), daemon=True)
        self._thread.start()

    def _meet(self, pipe: Path, act: Callable[[int], None], when: Callable[[], bool]) -> None:
        pid = int(pipe.read_text())
        while not when():
            time.sleep(0.01)
        act(pid)

    def join(self) -> None:
        self._thread.join()


# ------------------------------------------------------------------------------------------------------- going well


def test_the_next_fresh_ranks_connect_ahead_and_are_replaced_if_one_has_died(tmp_path: Path) -> None:
    def idle() -> list[int]:
        seen = controller.run(scenario("idle"), TORCH, fresh=True)
        assert {one.fate.kind for one in seen.values()} == {"returned"}
        return pids(seen)

    def ahead() -> list[int]:
        return [pid for pid in processes_under(tmp_path)[1:] if pid not in used]

    with Controller(get_backend("gloo"), work_dir=tmp_path, preload=(PROGRAMS,)) as controller:
        used = idle()
        waiting = ahead()
        assert len(waiting) == 2, "others are there before anybody asks"
        used += idle()
        assert used[2:] == waiting
        os.kill(killed := ahead()[0], signal.SIGKILL)
        (pool,) = controller._ahead.values()
        while pool.is_whole:  # until the zygote has reported the death
            controller._zygote.update()
        assert killed not in idle()
    assert processes_under(tmp_path) == []


def test_ranks_in_doubt_run_nothing_more(controller: Controller) -> None:
    """What made a scenario fail may be in any of them, also in those that another scenario has got since."""
    first = pids(run(controller, scenario("idle")))

    async def doubt() -> list[int]:
        others = pids(await controller.observe(scenario("idle"), TORCH))
        controller.retire(scenario("idle"), TORCH)
        assert all_end(others, 5.0), "those that run nothing"
        return others

    busy, others = beside(controller, scenario("slow", arguments={"times": 1, "seconds": 0.3}), doubt)
    assert busy, "those that do"
    after = pids(run(controller, scenario("idle")))
    assert not {*after} & {*first, *others}
    assert all_end(first, 5.0)


def test_ranks_run_nothing_more_after_wrong_arguments(controller: Controller) -> None:
    """A refusal of gloo's comes when memory is overwritten, and its ranks return as if nothing had happened."""
    misused = pids(run(controller, scenario("misuse")))
    assert not {*misused} & {*pids(run(controller, scenario("idle")))}
    assert all_end(misused, 5.0)


def test_fresh_ranks_leave_those_that_are_warm(controller: Controller) -> None:
    first = pids(run(controller, scenario("idle")))
    fresh = pids(controller.run(scenario("idle"), TORCH, fresh=True))
    assert not {*fresh} & {*first}
    slow = scenario("slow", arguments={"times": 1, "seconds": 0.3})
    _, warm = beside(controller, slow, partial(controller.observe, scenario("idle"), TORCH))
    assert pids(warm) == first


def test_ranks_that_were_ended_run_nothing_more(controller: Controller) -> None:
    """Also where they have left nothing behind: one may have died once it had answered."""
    run(controller, scenario("idle"))
    pool = next(one for one in controller._pools() if one.reusable)
    pool.close()
    assert not pool.reusable


def test_ranks_that_nobody_needs_for_long_are_ended(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "_MOST_TURNS_IDLE", 2)
    unneeded = pids(run(controller, scenario("idle", world_size=1)))
    needed = pids(run(controller, scenario("idle")))
    for _ in range(2):
        assert not all_end(unneeded, 0.0)
        assert pids(run(controller, scenario("idle"))) == needed
    assert all_end(unneeded, 5.0)


def test_a_long_answer_is_read_though_the_reader_is_away_for_longer_than_the_deadline(controller: Controller) -> None:
    run(controller, scenario("idle"))  # ranks are there

    async def be_away() -> None:
        (pool,) = controller._busy
        for _ in range(2):
            assert all(wait([channel], None) for channel in pool._channels)  # the ranks wait for a reader
            time.sleep(2.1)
            await trio.lowlevel.checkpoint()  # who reads a part each time

    observations, _ = beside(controller, scenario("long_answer", deadline_s=2.0), be_away)
    assert [str(one.fate) for one in observations.values()] == ["returned"] * 2


def test_other_ranks_run_while_some_are_waited_for(controller: Controller, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)  # waits for no reader
    run(controller, scenario("idle"))  # ranks are there

    async def step_and_release() -> list[int]:
        first = pids(await controller.observe(scenario("step"), TORCH))
        os.write(pipe, b"go")  # a letter for each
        return first

    waits = scenario("await_release", arguments={"pipe": str(tmp_path / "pipe")})
    observations, first = beside(controller, waits, step_and_release)
    os.close(pipe)
    assert {str(one.fate) for one in observations.values()} == {"returned"}
    assert pids(run(controller, scenario("idle"))) != first  # those that came back last are the warm ones


def test_ranks_are_reused_from_one_scenario_to_the_next(controller: Controller) -> None:
    assert pids(run(controller, scenario("step"))) == pids(run(controller, scenario("idle")))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_reports_what_it_saw(controller: Controller, world_size: int) -> None:
    observations = run(controller, scenario("environment", world_size=world_size))
    for rank, seen in observations.items():
        assert str(seen.fate) == "returned"
        assert seen.facts["world"] == [rank, world_size]
        assert seen.facts["backend"] == "gloo"
        assert seen.facts["torch_threads"] == 1
        assert seen.facts["policies"] == [os.SCHED_BATCH]
        assert torch.equal(seen.facts["sum"], torch.full((2,), float(sum(range(world_size)))))
        assert [collective.op for collective in seen.history] == ["all_reduce"]
        assert seen.duration_ns > 0


def test_an_unrecorded_scenario_runs_on_a_plain_group_and_sees_the_same(controller: Controller) -> None:
    recorded = run(controller, scenario("environment"))[0]
    plain = run(controller, scenario("environment", recorded=False))[0]
    assert recorded.facts["group_type"] == "RecordedGroup"
    assert plain.facts["group_type"] == "ProcessGroup"
    assert plain.history == ()
    assert torch.equal(plain.facts["sum"], recorded.facts["sum"])


def test_options_reach_the_subject(controller: Controller) -> None:
    known = run(controller, scenario("step", options={"bucket_cap_mb": 1}))
    assert str(known[0].fate) == "returned"
    unknown = run(controller, scenario("step", options={"no_such_option": 1}))
    raised = unknown[1].raised
    assert raised is not None
    assert raised.type == "TypeError"
    assert "no_such_option" in raised.message


def test_every_scenario_draws_the_same_random_numbers(controller: Controller) -> None:
    one, again = (run(controller, scenario("random", seed=5)) for _ in range(2))
    other = run(controller, scenario("random", seed=6))
    assert torch.equal(one[0].facts["drawn"], again[0].facts["drawn"])
    assert torch.equal(one[0].facts["drawn"], one[1].facts["drawn"])
    assert not torch.equal(one[0].facts["drawn"], other[0].facts["drawn"])


# ----------------------------------------------------------------------------------------------------- going wrong


def test_a_killed_rank_is_named_long_before_the_deadline(
    controller: Controller, tmp_path: Path, deadlines: list[Deadline]
) -> None:
    others_wait = lambda: all(flight.collectives for flight in flights(controller)[:2])  # noqa: E731
    interference = Interference(tmp_path / "pipe", lambda pid: os.kill(pid, signal.SIGKILL), others_wait)
    wanted = scenario("await_interference", arguments={"pipe": str(tmp_path / "pipe")}, world_size=3, deadline_s=60)
    observations = run(controller, wanted)
    interference.join()
    assert deadlines[-1].patience_s == DEATH_GRACE_S
    assert str(observations[2].fate) == "killed by SIGKILL"
    assert observations[2].fate.code == signal.SIGKILL
    assert observations[2].phase == "forward"
    assert {observations[rank].fate.kind for rank in (0, 1)} <= {"raised", "abandoned"}
    assert [collective.op for collective in observations[0].history] == ["all_reduce"]
    assert observations[2].history == ()
    assert next_scenario_runs(controller)


def test_others_that_notice_nothing_are_not_waited_for(
    controller: Controller, tmp_path: Path, deadlines: list[Deadline]
) -> None:
    other_waits = lambda: flights(controller)[0].phase == "forward"  # noqa: E731
    interference = Interference(tmp_path / "pipe", lambda pid: os.kill(pid, signal.SIGKILL), other_waits)
    arguments = {"pipe": str(tmp_path / "pipe"), "deaf": True}
    observations = run(controller, scenario("await_interference", arguments=arguments, deadline_s=60))
    interference.join()
    assert deadlines[-1].patience_s == DEATH_GRACE_S
    assert str(observations[1].fate) == "killed by SIGKILL"
    assert str(observations[0].fate) == "abandoned in forward"
    assert "in await_interference" in observations[0].stack


@pytest.mark.parametrize("what", ["streams", "os._exit"])
def test_a_rank_ends_alone_whatever_it_has_lost(controller: Controller, what: str) -> None:
    """An error while it ends must not take it into the zygote's code, which ends every rank."""
    others = pids(run(controller, scenario("idle", world_size=1)))
    fates = [str(seen.fate) for seen in run(controller, scenario("exit_without", arguments={"what": what})).values()]
    assert "exited 3" in fates
    assert not all_end(others, 0.0)
    assert pids(run(controller, scenario("idle", world_size=1))) == others


@pytest.mark.parametrize(
    ("kind", "fate"), [("kill", "killed by SIGKILL"), ("segfault", "killed by SIGSEGV"), ("exit", "exited 3")]
)
def test_a_rank_that_dies_of_a_fault(controller: Controller, kind: str, fate: str) -> None:
    observations = run(controller, scenario("step", faults=(Fault(kind, rank=1, at="backward", occurrence=1),)))
    dead = observations[1]
    assert str(dead.fate) == fate
    assert dead.phase == "backward"
    assert dead.faults_fired == 1
    assert {one.step for one in dead.history if one.phase == "backward"} == {0}, "it died on entering the second"
    assert observations[0].faults_fired == 0
    assert ("in backward" in dead.stack) == (kind == "segfault")
    assert next_scenario_runs(controller)


def test_a_rank_that_dies_at_a_collective_has_not_issued_it(controller: Controller) -> None:
    everything = run(controller, scenario("step"))[1].history
    for occurrence in (0, len(everything) - 1):
        faults = (Fault("kill", rank=1, at="collective", occurrence=occurrence),)
        dead = run(controller, scenario("step", faults=faults))[1]
        assert [one.signature for one in dead.history] == [one.signature for one in everything[:occurrence]]
        assert dead.faults_fired == 1


def test_a_fault_whose_place_is_never_reached_does_not_fire(controller: Controller) -> None:
    faults = (Fault("kill", rank=1, at="backward", occurrence=2),)
    observations = run(controller, scenario("step", schedule=(Step(), Step()), faults=faults))
    assert {str(seen.fate) for seen in observations.values()} == {"returned"}
    assert observations[1].faults_fired == 0


def test_a_stopped_rank_is_named_by_the_deadline(controller: Controller) -> None:
    run(controller, scenario("idle"))  # ranks are there: their making is not part of the deadline
    deadline_s = 1.5
    started = time.monotonic()
    faults = (Fault("stop", rank=1, at="backward"),)
    observations = run(controller, scenario("step", faults=faults, deadline_s=deadline_s))
    assert deadline_s <= time.monotonic() - started
    assert str(observations[1].fate) == "hung in backward, stopped by a signal"
    assert str(observations[0].fate) == "hung in backward"
    assert [observations[rank].fate.kind for rank in (0, 1)] == ["hung", "hung"]
    assert observations[1].faults_fired == 1
    assert "in backward" in observations[1].stack
    assert all("in step" in one.stack for one in observations.values())  # down to the program: stacks are whole
    waits_in, missing = observations[0].history, observations[1].history
    assert len(waits_in) == len(missing) + 1
    assert waits_in[-1].op == "all_reduce"
    assert waits_in[-1].phase == "backward"
    assert next_scenario_runs(controller)


class KilledZygote:
    """Stands for a zygote that was killed: its ranks are killed with it, and nobody reports how they end."""

    gone, end, is_stopped = True, "was killed by SIGKILL", False

    def signal(self, seat: Seat, signum: int) -> None: ...

    def exit_status(self, seat: Seat) -> None: ...


def test_a_rank_that_ends_late_on_a_busy_machine_has_lost_its_zygote_too(tmp_path: Path) -> None:
    seats = [Seat(rank, 2, "gloo", directory=str(tmp_path)) for rank in (0, 1)]
    ours, (first, late) = zip(*(pair(FromRank, FromRank) for _ in seats), strict=True)
    zygote = cast(ZygoteProcess, KilledZygote())

    async def arrive() -> Answers:
        answers = Answers(zygote, seats, [os.getpid()] * 2, ours, number=1, deadline_s=60.0)
        first.close()

        async def end_late() -> None:
            await trio.sleep(3 * DEATH_GRACE_S)
            late.close()

        await loop.together(answers.wait, end_late)
        return answers

    answers = loop.run(arrive)
    assert all(
        "process that forks ranks was killed by SIGKILL" in str(one.fate) for one in answers.silent_ranks().values()
    )
    for channel in ours:
        channel.close()


class SlowZygote:
    """Stands for a zygote that tells late of the death of a rank, which hangs up at the first look at it."""

    gone, end, is_stopped = False, "", False

    def __init__(self, killed: Channel) -> None:
        self._killed = killed
        self._has_reported = False

    async def wait_for_report(self) -> None:
        self._killed.close()
        await trio.sleep(0.4)  # twice as long as ranks outlive others that have raised
        self._has_reported = True

    def signal(self, seat: Seat, signum: int) -> None: ...

    def exit_status(self, seat: Seat) -> int | None:
        return -9 if seat.rank == 1 and self._has_reported else None


def test_a_rank_that_hung_up_after_another_raised_has_died_also_if_reported_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "RAISE_GRACE_S", 0.2)
    seats = [Seat(rank, 2, "gloo", directory=str(tmp_path)) for rank in (0, 1)]
    ours, (failed, killed) = zip(*(pair(FromRank, FromRank) for _ in seats), strict=True)
    zygote = cast(ZygoteProcess, SlowZygote(killed))
    raised = Raised("ValueError", ("ValueError",), "as asked")
    failed.send(Answer(1, Observation(0, Ending("raised"), raised=raised)))

    async def arrive() -> Answers:
        answers = Answers(zygote, seats, [os.getpid()] * 2, ours, number=1, deadline_s=60.0)
        await answers.wait()
        return answers

    assert [str(one.fate) for one in loop.run(arrive).silent_ranks().values()] == ["killed by SIGKILL"]
    for channel in ours:
        channel.close()


def test_ranks_that_were_stopped_while_nobody_listened_are_not_late(controller: Controller) -> None:
    """As in a machine that stands still while the controller judges."""
    ranks = [seen.facts["pid"] for seen in run(controller, scenario("idle")).values()]
    deadline_s, began = at_this_load(1.0), time.monotonic()

    async def stop() -> None:
        while any(flight.alive_at < began for flight in flights(controller)):
            await trio.sleep(0.01)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5 * deadline_s)
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)

    slow = scenario("slow", arguments={"times": 1, "seconds": deadline_s / 2, "sleeps": 20}, deadline_s=deadline_s)
    observations, _ = beside(controller, slow, stop)
    assert [str(one.fate) for one in observations.values()] == ["returned"] * 2


def test_a_rank_that_was_stopped_goes_no_further_once_it_has_shown_its_stack(zygote: ZygoteProcess) -> None:
    """Another host's agent may look at the rank that waits for it a moment later, and must find it waiting."""
    zygote.preload((PROGRAMS,))
    zygote.await_ready()
    with closing(Pool(zygote, [Seat(rank, 2, "gloo") for rank in range(2)])) as pool:
        faults = (Fault("stop", rank=1, at="backward"),)

        async def stop() -> dict[int, Observation]:
            assert await pool.connect() == {}
            pool.begin(scenario("step", faults=faults, deadline_s=1.0), TORCH)
            return await pool.finish()

        observations = loop.run(stop)
        assert [one.fate.kind for one in observations.values()] == ["hung", "hung"]
        assert not wait(pool._channels, 0.5)  # neither has ended its step


@pytest.mark.nightly
def test_ranks_that_are_slow_get_more_time(controller: Controller) -> None:
    run(controller, scenario("idle"))
    deadline_s = at_this_load(1.0)
    wanted = scenario("slow", arguments={"times": 4, "seconds": deadline_s / 2}, deadline_s=deadline_s)
    assert {str(seen.fate) for seen in run(controller, wanted).values()} == {"returned"}


@pytest.mark.nightly
def test_ranks_that_never_end_do_not_get_it_for_ever(controller: Controller) -> None:
    run(controller, scenario("idle"))
    started = time.monotonic()
    deadline_s = at_this_load(0.5)  # as long as a rank may be without a processor
    wanted = scenario("slow", arguments={"times": 1_000_000, "seconds": 0.01}, deadline_s=deadline_s)
    observations = run(controller, wanted)
    assert time.monotonic() - started >= 5 * deadline_s
    assert {seen.fate.kind for seen in observations.values()} == {"hung"}  # in a phase or, for a moment, between two


def test_a_rank_that_holds_the_interpreter_is_seen_all_the_same(controller: Controller, tmp_path: Path) -> None:
    interference = Interference(tmp_path / "pipe", lambda pid: None)
    arguments = {"pipe": str(tmp_path / "pipe"), "holds_interpreter": True}
    observations = run(controller, scenario("await_interference", arguments=arguments, deadline_s=1.0))
    interference.join()
    assert str(observations[1].fate) == "hung in forward"
    assert "in await_interference" in observations[1].stack
    assert next_scenario_runs(controller)


def test_an_exception_on_one_rank_ends_the_wait_of_the_others(
    controller: Controller, deadlines: list[Deadline]
) -> None:
    arguments = {"ranks": [1], "meet": True}
    observations = run(controller, scenario("raise", arguments=arguments, deadline_s=60))
    assert deadlines[-1].patience_s == RAISE_GRACE_S
    raised = observations[1].raised
    assert raised is not None
    assert str(raised) == "ValueError: as asked"
    assert "worker_programs.py" in raised.traceback
    assert observations[1].fate.kind == "raised"
    assert "about to raise" in observations[1].stderr
    assert str(observations[0].fate) == "abandoned in start"
    assert "in raise_" in observations[0].stack
    assert next_scenario_runs(controller)


def test_a_program_may_leave_through_sys_exit(controller: Controller, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    run(controller, scenario("idle"))  # ranks are there

    async def tell() -> None:
        await has_answered(controller, 1)
        (tmp_path / "pipe").write_text("x")

    observations, _ = beside(controller, scenario("exit", arguments={"pipe": str(tmp_path / "pipe")}), tell)
    assert str(observations[0].fate) == "exited 3"
    assert "leaving" in observations[0].stderr
    assert str(observations[1].fate) == "returned"


def test_an_error_that_is_no_exception_class_is_raised_all_the_same(controller: Controller) -> None:
    caught = run(controller, scenario("base_error"))
    assert [(str(seen.fate), str(seen.facts["caught"])) for seen in caught.values()] == [
        ("returned", "BaseError: as asked")
    ] * 2
    let_through = run(controller, scenario("base_error", arguments={"through": True}))
    assert [(seen.fate.kind, str(seen.raised)) for seen in let_through.values()] == [
        ("raised", "BaseError: as asked")
    ] * 2


def test_facts_that_cannot_travel_are_an_error_of_their_rank(controller: Controller) -> None:
    observations = run(controller, scenario("unreadable"))
    assert (
        str(observations[0].raised) == "TypeError: facts are tensors, Raised, Unmeasured or JSON data, got Unreadable"
    )
    assert observations[0].facts == {}


def test_unsupported_is_said_with_its_reason(controller: Controller) -> None:
    before = pids(run(controller, scenario("idle")))
    observations = run(controller, scenario("unsupported"))
    assert {seen.unsupported for seen in observations.values()} == {"no such device"}
    assert pids(run(controller, scenario("idle"))) == before


def test_ranks_may_find_at_different_times_that_it_is_unsupported(
    controller: Controller, tmp_path: Path, deadlines: list[Deadline]
) -> None:
    """Once rank 0 has answered, the pool is to wait for rank 1 longer than it would if rank 0 had raised."""
    run(controller, scenario("idle"))  # ranks are there, and nothing but their answers is waited for
    os.mkfifo(tmp_path / "pipe")

    async def tell() -> None:
        await has_answered(controller, 0)
        assert deadlines[-1].patience_s == math.inf
        (tmp_path / "pipe").write_text("x")

    wanted = scenario("half_unsupported", arguments={"pipe": str(tmp_path / "pipe")})
    observations, _ = beside(controller, wanted, tell)
    assert {seen.unsupported for seen in observations.values()} == {"no such device"}


def test_a_rank_that_goes_on_is_waited_for_though_another_has_raised(controller: Controller) -> None:
    arguments = {"times": 3, "seconds": RAISE_GRACE_S / 2}
    seen = run(controller, scenario("raise_one_by_one", arguments=arguments))
    assert [one.fate.kind for one in seen.values()] == ["raised", "raised"]


def test_memory_that_nobody_has_written_holds_the_same_each_time(controller: Controller) -> None:
    seen = run(controller, scenario("fresh_memory"))
    assert [list(one.facts.values()) for one in seen.values()] == [[[0x7F7F7F7F]] * 3] * 2


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["forked", "apart"])
def test_ranks_are_no_twins(controller: Controller, apart: bool) -> None:
    seen = list(run(controller, scenario("likeness", apart=apart)).values())
    assert seen[0].facts["order"] != seen[1].facts["order"]
    assert (seen[0].facts["hash"] != seen[1].facts["hash"]) == apart
    assert seen[0].facts["parent"] == seen[1].facts["parent"]
    again = run(controller, scenario("likeness", apart=apart))
    assert [one.facts["hash"] for one in again.values()] == [one.facts["hash"] for one in seen]


@pytest.mark.nightly
def test_the_death_of_a_rank_in_its_own_interpreter_is_reported(controller: Controller) -> None:
    seen = run(controller, scenario("exit", apart=True))
    assert str(seen[0].fate) == "exited 3"
    assert seen[0].stderr == "leaving\n"


def test_an_unknown_program_is_every_ranks_error(controller: Controller) -> None:
    observations = run(controller, scenario("no_such_program"))
    assert all(seen.raised is not None and seen.raised.type == "ScenarioError" for seen in observations.values())


# ------------------------------------------------------------------------------------- which ranks may be used again


def test_ranks_that_all_raise_the_same_are_kept(controller: Controller) -> None:
    before = pids(run(controller, scenario("idle")))
    for _ in range(2):
        raised = run(controller, scenario("raise", arguments={"ranks": [0, 1]}))
        assert pids(raised) == before
        assert {seen.stderr for seen in raised.values()} == {"about to raise\n"}
    assert pids(run(controller, scenario("idle"))) == before


def test_ranks_are_kept_when_nobody_waited_for_what_all_have_issued(controller: Controller) -> None:
    before = pids(run(controller, scenario("idle")))
    forgotten = run(controller, scenario("forget", arguments={"ranks": [0, 1]}))
    assert not any(collective.finished for seen in forgotten.values() for collective in seen.history)
    assert pids(run(controller, scenario("step"))) == before


@pytest.mark.parametrize(
    "wanted",
    [
        scenario("raise", arguments={"ranks": [0]}),
        scenario("raise", arguments={"ranks": [0, 1]}, recorded=False),
        scenario("forget", arguments={"ranks": [0]}),
    ],
    ids=["one_of_two_raised", "nobody_knows_what_is_in_flight", "a_collective_is_short_of_a_rank"],
)
def test_ranks_in_doubt_are_replaced(controller: Controller, wanted: Scenario) -> None:
    same_pool = scenario("idle", recorded=wanted.recorded)
    before = pids(run(controller, same_pool))
    run(controller, wanted)
    assert not set(pids(run(controller, same_pool))) & set(before)


@pytest.mark.parametrize("what", LEAKS)
def test_what_a_scenario_leaves_behind_is_noted_and_costs_the_ranks(controller: Controller, what: str) -> None:
    leaked = run(controller, scenario("leak", arguments={"what": what}))
    for seen in leaked.values():
        assert any(LEAKS[what][1] in phrase for phrase in seen.hygiene), seen.hygiene
    after = run(controller, scenario("step"))
    assert (pids(after) == pids(leaked)) == (what in ("thread", "process_group")), "only those may be kept once"
    assert {seen.hygiene for seen in after.values()} == {()}


@pytest.mark.parametrize("what", OWNERS)
def test_what_goes_with_an_owner_in_a_cycle_is_not_left_behind(controller: Controller, what: str) -> None:
    seen = run(controller, scenario("own", arguments={"what": what}))
    assert {one.hygiene for one in seen.values()} == {()}
    assert pids(run(controller, scenario("step"))) == pids(seen)


def test_a_process_that_a_program_started_goes_with_its_rank(controller: Controller) -> None:
    observations = run(controller, scenario("spawn"))
    for seen in observations.values():
        assert [phrase.split(" (")[0] for phrase in seen.hygiene] == [
            f"child process left behind: {seen.facts['child']}"
        ]
    controller.retire(scenario("idle"), TORCH)
    assert all_end([seen.facts["child"] for seen in observations.values()], within_s=5)
    # One rank: of several that exit, the first one's death can end the others' before they have said theirs.
    (orphaned,) = run(controller, scenario("spawn", world_size=1, arguments={"exits": True})).values()
    assert str(orphaned.fate) == "exited 4"
    assert all_end([int(orphaned.stderr)], within_s=5)


def test_a_rank_that_dies_between_scenarios_harms_none(controller: Controller) -> None:
    victim = pids(run(controller, scenario("idle")))[0]
    os.kill(victim, signal.SIGKILL)
    assert all_end([victim], within_s=5)
    assert next_scenario_runs(controller)
