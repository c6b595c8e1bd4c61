"""The runner, on ranks that only pretend: what it orders, refuses, survives and reports."""

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import trio

import conformance.run.attempt
import conformance.run.judge
import conformance.run.scenario_runner
from conformance.backends.backend import Backend, get_backend
from conformance.cli.interrupt import interrupted_once
from conformance.errors import BackendError, ReplicaError, ScenarioError, SubjectError, present
from conformance.observation import Collective, Ending, Facts, Observation, Raised
from conformance.programs.registry import Program
from conformance.run import runner
from conformance.run.first_uses import first_uses
from conformance.run.known_failures import MET, Excuse
from conformance.run.order import LISTED, Order
from conformance.run.outcome import Note, Outcome, Progress
from conformance.run.patience import hangs_after, nothing_but_hangs
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject, by_itself, get_subject
from conformance.truth.expected import Satisfies
from conformance.verdict import Finding, ScenarioResult, Verdict
from conformance.waiting.processors import Processors
from conformance.workers.answers import lost

GLOO = get_backend("gloo")
MINE = Subject("mine", "tests:Mine", frozenset({"static_graph"}))
#: Pretended ranks end at once, and what comes of one scenario is known before the next one begins.
run_in_turn = partial(runner.run, one_at_a_time=True)
COLLECTIVE = Collective(0, "all_reduce", "default", ((4,),), ("float32",), "sum", phase="backward", step=0)


def scenario(name: str, world_size: int = 1, **changes: object) -> Scenario:
    return Scenario(f"gradients/GRAD-01/{name}", ("GRAD-01",), "train", world_size=world_size).replace(**changes)


class PretendedRanks:
    """Ranks that observe what a function says, and remember what they were asked."""

    def __init__(
        self, observe: Callable[[Scenario, Subject], Facts] = lambda scenario, subject: {"answer": 42}
    ) -> None:
        self.facts_of = observe
        self.asked: list[tuple[str, str]] = []

    def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
        if scenario.id != "probe":
            self.asked.append((scenario.id.rpartition("/")[2], subject.name))
        facts = self.facts_of(scenario, subject)
        fate = Ending("returned")
        return {
            rank: Observation(rank, fate, facts, history=(COLLECTIVE,), phase="observe")
            for rank in range(scenario.world_size)
        }

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        return self.run(scenario, subject, fresh=fresh)

    def retire(self, scenario: Scenario, subject: Subject) -> None:
        """Have nothing to end: what these observe depends on nothing that ran before."""

    async def expect(self, scenario: Scenario) -> Mapping[int, Facts]:
        expectation = vars(conformance.run.scenario_runner)["get_program"](scenario.program).expectation
        facts: Mapping[int, Facts] = present(expectation)(scenario)
        return facts


@pytest.fixture(autouse=True)
def answer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program("train", lambda ctx: None, invariants=())
    program.expects(lambda scenario: {rank: {"answer": 42} for rank in range(scenario.world_size)})
    monkeypatch.setattr(conformance.run.scenario_runner, "get_program", lambda name: program)


def verdicts(
    *scenarios: Scenario, ranks: PretendedRanks, native: bool = False, backend: Backend = GLOO
) -> list[Verdict]:
    report = run_in_turn(scenarios, MINE, backend, native=native, controller=ranks)
    return [outcome.subject.verdict for outcome in report.scenarios]


def test_the_cheapest_runs_first_then_others_by_world_size_and_unrecorded_ones_last() -> None:
    ranks = PretendedRanks()
    chosen = [scenario("a", 3), scenario("b", 1, recorded=False), scenario("c", 1), scenario("d", 3), scenario("e", 2)]
    run_in_turn(chosen, MINE, GLOO, native=False, controller=ranks)
    assert [name for name, _ in ranks.asked] == ["e", "c", "b", "a", "d"]


def test_verdicts_do_not_depend_on_the_order_and_pools_stay_together() -> None:
    """Every fourth scenario fails, and every fifth cannot run, whatever came before it."""
    chosen = [
        scenario(f"{n}", 1 + n % 3, seed=n, recorded=n % 7 != 0, needs=("join",) if n % 5 == 0 else ())
        for n in range(15)  # so few that the listed order has them in one round
    ]
    by_id = {one.id: one for one in chosen}
    found = {}
    for order in (LISTED, Order("reversed"), Order("shuffled", 1), Order("shuffled", 2)):
        ranks = PretendedRanks(lambda one, subject: {"answer": 41 if one.seed % 4 == 0 else 42})
        report = run_in_turn(chosen, MINE, GLOO, native=False, controller=ranks, order=order)
        found[order] = [(by_id[outcome.id], outcome.subject.verdict) for outcome in report.scenarios]
        pools = [(one.world_size, one.recorded) for one, _ in found[order]]
        listed_first = 0 if order.name == "shuffled" else 1  # of the only requirement
        assert len(list(itertools.groupby(pools))) == len(set(pools)) + listed_first == 6 + listed_first
    assert {Verdict.PASS, Verdict.FAIL, Verdict.UNSUPPORTED} == {verdict for _, verdict in found[LISTED]}
    verdicts_by_id = [sorted((one.id, verdict.value) for one, verdict in run) for run in found.values()]
    assert verdicts_by_id == [verdicts_by_id[0]] * 4
    assert found[Order("reversed")] == found[LISTED][::-1]
    assert len({str(run) for run in found.values()}) == 4
    assert Order("shuffled", 1).apply(chosen) == tuple(one for one, _ in found[Order("shuffled", 1)])


def test_torch_runs_beside_the_subject_but_not_beside_itself() -> None:
    ranks = PretendedRanks()
    report = run_in_turn([scenario("a")], MINE, GLOO, controller=ranks)
    assert ranks.asked == [("a", "mine"), ("a", "torch")]
    assert report.scenarios[0].native is not None
    for name in ("torch", "torch.nn.parallel:DistributedDataParallel"):
        ranks.asked.clear()
        report = run_in_turn([scenario("a")], get_subject(name), GLOO, controller=ranks)
        assert len(ranks.asked) == 1
        assert report.scenarios[0].native is None


def test_a_wrong_fact_fails_the_column_it_came_from() -> None:
    ranks = PretendedRanks(lambda scenario, subject: {"answer": 42 if subject is MINE else 41})
    report = run_in_turn([scenario("a")], MINE, GLOO, controller=ranks)
    outcome = report.scenarios[0]
    assert outcome.native is not None
    assert (outcome.subject.verdict, outcome.native.verdict) == (Verdict.PASS, Verdict.FAIL)
    assert report.is_green


def test_each_attempt_is_judged_once_and_torch_is_followed_where_it_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    def judge(scenario: Scenario, program: Program, observations: dict[int, Observation], *facts: object) -> object:
        judged.append((observations[0].facts["step"], facts[1]))
        return real(scenario, program, observations, *facts)  # type: ignore[arg-type]

    real = conformance.run.judge.judge
    monkeypatch.setattr(conformance.run.attempt, "judge", judge)
    monkeypatch.setattr(conformance.run.judge, "judge", judge)
    program = Program("train", lambda ctx: None, invariants=(), native_facts=("step",))
    monkeypatch.setattr(conformance.run.scenario_runner, "get_program", lambda name: program)
    program.expects(lambda scenario: {0: {"answer": 42}})
    for answer, verdict in ((42, Verdict.FAIL), (41, Verdict.PASS)):  # torch's answer, and what becomes of the subject
        judged.clear()
        observed = {"mine": {"answer": 42, "step": 1}, "torch": {"answer": answer, "step": 2}}
        ranks = PretendedRanks(partial(lambda observed, scenario, subject: observed[subject.name], observed))
        report = run_in_turn([scenario("a")], MINE, GLOO, controller=ranks)
        assert report.scenarios[0].subject.verdict is verdict
        assert judged == [(2, None), (1, {0: {"step": 2}} if answer == 42 else None)]


def test_a_number_that_has_only_a_bound_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program("train", lambda ctx: None, invariants=())
    bound = Satisfies("at least 0.9", lambda value: value >= 0.9)
    word = Satisfies("a word", str.isalpha)
    program.expects(lambda scenario: {0: {"accuracy": bound, "step0/accuracy": bound, "name": word, "answer": 42}})
    monkeypatch.setattr(conformance.run.scenario_runner, "get_program", lambda name: program)
    observed = {"accuracy": 0.97, "step0/accuracy": 0.91, "name": "digits", "answer": 42}
    ranks = PretendedRanks(lambda scenario, subject: observed)
    (one,) = run_in_turn([scenario("a")], MINE, GLOO, controller=ranks).scenarios
    assert one.notes == one.native_notes == (Note("accuracy", 0.97, "at least 0.9"),)


@pytest.mark.parametrize(("answer", "verdict"), [(42, Verdict.HARNESS_ERROR), (41, Verdict.FAIL)])
def test_silent_ranks_are_the_subjects_fault_only_when_they_are_wrong(answer: int, verdict: Verdict) -> None:
    class SilentRanks(PretendedRanks):
        def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
            observations = super().run(scenario, subject, fresh=fresh)
            return {rank: dataclasses.replace(seen, history=()) for rank, seen in observations.items()}

    ranks = SilentRanks(lambda scenario, subject: {"answer": answer})
    assert verdicts(scenario("a", 2), ranks=ranks) == [verdict]


@pytest.mark.parametrize(("answer", "verdict"), [(42, Verdict.PASS), (41, Verdict.HARNESS_ERROR)])
def test_what_the_machine_denies_is_not_the_subjects_fault(
    answer: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance.run.scenario_runner, "shortage_since", lambda before: "the kernel refused a thread")
    ranks = PretendedRanks(lambda scenario, subject: {"answer": answer})
    report = run_in_turn([scenario("a", 2)], MINE, GLOO, native=False, controller=ranks)
    result = report.scenarios[0].subject
    assert result.verdict is verdict
    if verdict is not Verdict.PASS:
        assert result.findings[0].summary == "the verdict would be FAIL, but the kernel refused a thread"
        assert any(finding.checker == "facts" for finding in result.findings)


def test_ranks_that_got_no_processor_are_not_judged() -> None:
    class StarvedRanks(PretendedRanks):
        def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
            return {rank: Observation(rank, Ending("hung"), starved="it ran for 0.1 of 25 s") for rank in range(2)}

    report = run_in_turn([scenario("a", 2)], MINE, GLOO, native=False, controller=StarvedRanks())
    result = report.scenarios[0].subject
    assert result.verdict is Verdict.HARNESS_ERROR
    assert result.findings[0].summary == "the verdict would be HANG, but it ran for 0.1 of 25 s"


def test_a_single_rank_may_be_silent() -> None:
    class SilentRanks(PretendedRanks):
        def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
            return {0: Observation(0, Ending("returned"), {"answer": 42})}

    assert verdicts(scenario("a", 1), ranks=SilentRanks()) == [Verdict.PASS]


def test_an_exception_of_the_harness_spoils_one_scenario_and_no_other() -> None:
    def observe(scenario: Scenario, subject: Subject) -> Facts:
        if scenario.id.endswith("broken"):
            raise OSError("disk on fire")
        return {"answer": 42}

    ranks = PretendedRanks(observe)
    report = run_in_turn([scenario("broken"), scenario("fine")], MINE, GLOO, native=False, controller=ranks)
    broken, fine = report.scenarios
    assert broken.subject.verdict is Verdict.HARNESS_ERROR
    assert "OSError: disk on fire" in broken.subject.findings[0].summary
    assert "observe" in broken.subject.findings[0].explanation  # the traceback
    assert fine.subject.verdict is Verdict.PASS
    assert not report.is_green


@pytest.mark.parametrize("part", ["expectation", "judge"])
def test_an_exception_in_truth_or_judge_is_a_harness_error(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError(part)

    if part == "judge":
        monkeypatch.setattr(conformance.run.attempt, "judge", fail)
    else:
        program = Program("train", lambda ctx: None, expectation=fail)  # type: ignore[arg-type]
        monkeypatch.setattr(conformance.run.scenario_runner, "get_program", lambda name: program)
    assert verdicts(scenario("a"), ranks=PretendedRanks()) == [Verdict.HARNESS_ERROR]


@pytest.mark.parametrize(
    ("message", "verdict"), [("division by zero", Verdict.HARNESS_ERROR), ("no such rank", Verdict.FAIL)]
)
def test_a_program_that_raises_without_a_ddp_judges_none(
    message: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RaisingRanks(PretendedRanks):
        def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
            raised = Raised("ZeroDivisionError", ("ZeroDivisionError", "Exception"), message)
            observations = super().run(scenario, subject, fresh=fresh)
            fate = Ending("raised", detail=f"raised {raised}")
            return {rank: dataclasses.replace(seen, fate=fate, raised=raised) for rank, seen in observations.items()}

    def fail(scenario: Scenario) -> Mapping[int, Facts]:
        raise ZeroDivisionError("division by zero")

    program = Program("train", lambda ctx: None, expectation=fail)
    monkeypatch.setattr(conformance.run.scenario_runner, "get_program", lambda name: program)
    assert verdicts(scenario("a"), ranks=RaisingRanks()) == [verdict]


def test_a_missing_capability_is_unsupported_and_does_not_run() -> None:
    ranks = PretendedRanks()
    report = run_in_turn(
        [
            scenario("a", needs=("join",)), scenario("b", needs=("static_graph", "all_to_all")),
            scenario("c", needs=("pickling", "streams", "join")),
        ],
        MINE, GLOO, native=False, controller=ranks,
    )  # fmt: skip
    assert [outcome.subject.verdict for outcome in report.scenarios] == [
        Verdict.UNSUPPORTED, Verdict.PASS, Verdict.UNSUPPORTED,
    ]  # fmt: skip
    assert [outcome.subject.summary for outcome in report.scenarios] == [
        "mine declares no join", "", "mine declares no join, pickling and gloo declares no streams",
    ]  # fmt: skip
    assert ranks.asked == [("b", "mine")]


def test_a_run_in_which_nothing_passed_is_not_green() -> None:
    report = run_in_turn([scenario("a", needs=("join",))], MINE, GLOO, native=False, controller=PretendedRanks())
    assert report.complete
    assert not report.failures
    assert not report.is_green


def test_world_sizes_beyond_the_backend_are_unsupported_beside_others_and_refused_alone() -> None:
    small = dataclasses.replace(GLOO, max_world_size=lambda: 2)
    found = verdicts(scenario("a", 2), scenario("b", 3), ranks=PretendedRanks(), backend=small)
    assert found == [Verdict.PASS, Verdict.UNSUPPORTED]
    with pytest.raises(BackendError, match=r"'gloo' serves at most 2 rank\(s\) here, got world size 3"):
        verdicts(scenario("b", 3), ranks=PretendedRanks(), backend=small)


def test_what_can_be_known_before_the_run_is_said_before_it() -> None:
    ranks = PretendedRanks()
    misspelt = dataclasses.replace(GLOO, capabilities=frozenset({"al_to_all"}))
    broken = dataclasses.replace(GLOO, unavailable=lambda: "no driver")
    for scenarios, backend, error, message in (
        ([], GLOO, ScenarioError, "no scenario to run"),
        ([scenario("a", program="trian")], GLOO, ScenarioError, "unknown program 'trian'; did you mean train"),
        ([scenario("a", model="mpl")], GLOO, ScenarioError, "a: unknown model 'mpl'; did you mean mlp"),
        ([scenario("a", dtype="complex64")], GLOO, ScenarioError, "a: model mlp exists in float32, "),
        ([scenario("a")], broken, BackendError, "backend 'gloo' cannot be used here: no driver"),
        ([scenario("a")], misspelt, BackendError, "capability 'al_to_all' means nothing .* did you mean all_to_all"),
    ):
        with pytest.raises(error, match=message):
            run_in_turn(scenarios, MINE, backend, controller=ranks)
    assert ranks.asked == []


@pytest.mark.parametrize(
    "last_word", [Raised("ValueError", ("ValueError",), "no GPU, no DDP"), Ending("exited", 3, "exited 3")]
)
def test_a_subject_that_dies_in_its_constructor_ends_the_run(last_word: Raised | Ending) -> None:
    class DyingRanks(PretendedRanks):
        def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
            raised = last_word if isinstance(last_word, Raised) else None
            fate = last_word if isinstance(last_word, Ending) else Ending("raised")
            return {0: Observation(0, fate, raised=raised, phase="construct")}

    with pytest.raises(SubjectError) as caught:
        verdicts(scenario("a"), ranks=DyingRanks())
    assert f"mine cannot be constructed around a small MLP at world size 1; rank 0: {last_word}." in str(caught.value)


@pytest.mark.parametrize("phase", ["rendezvous", "start"])
def test_a_rank_that_had_not_begun_when_another_died_in_its_constructor_has_no_say(phase: str) -> None:
    raised = Raised("ValueError", ("ValueError",), "no GPU, no DDP")

    class Ranks(PretendedRanks):
        def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
            return {
                0: Observation(0, Ending("abandoned"), phase=phase),
                1: Observation(1, Ending("raised"), raised=raised, phase="construct"),
            }

    with pytest.raises(SubjectError, match="rank 1: ValueError: no GPU, no DDP"):
        runner.probe(get_subject("torch"), 2, Ranks())


def test_ranks_that_do_not_meet_are_refused_before_anything_is_judged() -> None:
    """Without a loopback interface, every DDP would fail every requirement."""
    apart = Observation(0, Ending("raised"), phase="rendezvous", raised=Raised("RuntimeError", (), "no address"))

    class Apart(PretendedRanks):
        def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
            return {0: apart}

    with pytest.raises(BackendError, match=r"cannot connect to each other, with no DDP yet; rank 0: .*no address"):
        runner.probe(get_subject("torch"), 1, Apart())


def test_ctrl_c_leaves_a_report_of_what_is_known() -> None:
    def observe(scenario: Scenario, subject: Subject) -> Facts:
        if scenario.id.endswith("second"):
            raise KeyboardInterrupt
        return {"answer": 42}

    chosen = [scenario("first"), scenario("second"), scenario("third")]
    report = run_in_turn(chosen, MINE, GLOO, native=False, controller=PretendedRanks(observe))
    assert report.interrupted
    assert [outcome.id for outcome in report.scenarios] == ["gradients/GRAD-01/first"]
    assert not report.complete
    assert not report.is_green


def test_ctrl_c_while_ranks_end_costs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(PretendedRanks):
        def __enter__(self) -> "Ending":
            return self

        def __exit__(self, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "Controller", lambda *_, **__: Ending())
    report = runner.run([scenario("a"), scenario("b")], MINE, GLOO, native=False, zygote=mock.Mock())
    assert [one.subject.verdict for one in report.scenarios] == [Verdict.PASS] * 2
    assert not report.interrupted


def test_a_signal_while_the_report_is_written_is_ignored() -> None:
    with interrupted_once() as ignore_signals:
        ignore_signals()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)


def test_fail_fast_stops_where_a_verdict_depends_on_what_ran_before() -> None:
    ranks = WarmRanks(lambda before, wanted: before[-1:] == (scenario("dirty").id,))
    chosen = [scenario("dirty"), scenario("next"), scenario("last")]
    report = run_in_turn(chosen, MINE, GLOO, native=False, fail_fast=True, controller=ranks)
    assert [one.id for one in report.scenarios] == [one.id for one in chosen[:2]]


def test_fail_fast_stops_at_the_first_failure() -> None:
    ranks = PretendedRanks(lambda scenario, subject: {"answer": 41 if scenario.id.endswith("b") else 42})
    chosen = [scenario("a"), scenario("b"), scenario("c")]
    report = run_in_turn(chosen, MINE, GLOO, native=False, fail_fast=True, controller=ranks)
    assert [name for name, _ in ranks.asked] == ["a", "b"]
    assert not report.complete
    assert not report.interrupted


@pytest.fixture(autouse=True)
def idle_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processors, "num_idle", lambda self: 2.0)


class SlowRanks(PretendedRanks):
    """Ranks of which one DDP ends in the scenarios that `slow_in` names when so many further tries have begun.

    Or when nobody begins another for long.
    """

    def __init__(self, slow: Subject, slow_in: str = "", further: int = 4) -> None:
        super().__init__()
        self.slow, self.slow_in, self.further = slow, slow_in, further

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        observations = self.run(scenario, subject, fresh=fresh)
        begun = len(self.asked)
        if subject is self.slow and self.slow_in in scenario.id:
            for _ in range(1000):  # then others can have begun, if they may
                if len(self.asked) - begun >= self.further:
                    break
                await trio.sleep(0.001)
        return observations


@pytest.mark.parametrize("slow", [MINE, get_subject("torch")], ids=lambda subject: subject.name)
def test_nothing_waits_for_a_ddp_that_is_slow(slow: Subject) -> None:
    events: list[tuple[str, bool]] = []

    def note(event: Progress) -> None:
        events.append((event.scenario.id[-1], event.outcome is not None))

    ranks = SlowRanks(slow, slow_in="/a")
    report = runner.run([scenario(name) for name in "abcd"], MINE, GLOO, controller=ranks, on_event=note)
    assert events.index(("c", False)) < events.index(("a", True))
    assert [name for name, has_ended in events if not has_ended] == list("abcd")
    assert [one.id[-1] for one in report.scenarios] == list("abcd")
    assert all(one.native and one.native.verdict is one.subject.verdict is Verdict.PASS for one in report.scenarios)


@pytest.mark.parametrize("is_idle", [False, True])
def test_what_compiles_has_no_other_beside_it_unless_a_processor_is_idle(
    is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processors, "num_idle", lambda self: 2.0 * is_idle)
    events: list[Progress] = []
    chosen = [scenario("a"), scenario("b", deadline_s=60.0), scenario("c")]
    runner.run(chosen, MINE, GLOO, controller=SlowRanks(MINE), on_event=events.append)
    told = [(one.scenario.id[-1], one.outcome is not None) for one in events]
    assert (told.index(("b", True)) < told.index(("c", False))) is not is_idle


def test_who_waits_for_long_keeps_the_others_waiting_only_where_they_are_many() -> None:
    events: list[Progress] = []
    chosen = [scenario(f"{number:02}") for number in range(30)]
    ranks = SlowRanks(MINE, slow_in="/00", further=20)
    runner.run(chosen, MINE, GLOO, native=False, controller=ranks, on_event=events.append)
    told = [(one.scenario.id[-2:], one.outcome is not None) for one in events]
    ended_before = [name for name, has_ended in told[: told.index(("00", True))] if has_ended]
    assert len(ended_before) > 10
    begun = 0
    for _, has_ended in told:
        begun += -1 if has_ended else 1
        assert begun <= 12


def test_one_at_a_time_means_so() -> None:
    events: list[Progress] = []
    chosen = [scenario(name) for name in "abc"]
    runner.run(chosen, MINE, GLOO, controller=SlowRanks(MINE), on_event=events.append, one_at_a_time=True)
    assert [one.outcome is not None for one in events] == [False, True] * 3


def test_a_device_runs_one_ddp_at_a_time() -> None:
    ranks = SlowRanks(MINE)
    device = dataclasses.replace(GLOO, device_type="sim")
    events: list[Progress] = []
    runner.run([scenario(name) for name in "ab"], MINE, device, controller=ranks, on_event=events.append)
    assert [one.outcome is not None for one in events] == [False, True] * 2


class HangingRanks(PretendedRanks):
    """Ranks that hang in the scenarios that are named, and note every deadline: no time passes."""

    def __init__(self, hangs: Callable[[str], bool], subject: Subject = MINE) -> None:
        super().__init__()
        self.hangs = hangs
        self.subject = subject
        self.deadlines: dict[str, float] = {}

    def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
        seen = super().run(scenario, subject, fresh=fresh)
        name = scenario.id.rpartition("/")[2]
        if subject == self.subject:
            self.deadlines[name] = scenario.deadline_s
        fate = Ending("hung" if subject == self.subject and self.hangs(name) else "returned")
        return {rank: dataclasses.replace(one, fate=fate) for rank, one in seen.items()}


def test_a_subject_that_hangs_three_times_in_a_row_gets_less_time_until_it_does_not() -> None:
    ranks = HangingRanks(lambda name: name not in ("b", "g"))
    chosen = [scenario(name, deadline_s=60.0 if name == "h" else 20.0) for name in "abcdefghij"]
    report = run_in_turn(chosen, MINE, GLOO, controller=ranks)
    assert list(ranks.deadlines.values())[1:] == [20, 20, 20, 20, 20, 5, 5, 60, 20, 20]  # the first is the probe's
    digests = {one.id: one.digest for one in chosen}
    assert {one.id: one.sha256 for one in report.scenarios} == digests  # they are the same scenarios all the same
    explanation = report.scenarios[5].subject.findings[0].explanation
    assert "did not end within 5 s" in explanation


def test_what_is_unsupported_ends_no_row_of_hangs_and_counts_as_none() -> None:
    ranks = HangingRanks(lambda name: True)
    chosen = [scenario(name, needs=("join",) if name in "bd" else ()) for name in "abcdefg"]
    report = run_in_turn(chosen, MINE, GLOO, native=False, most_hangs=4, controller=ranks)
    assert list(ranks.deadlines.values())[1:] == [20, 20, 20, 5]
    assert [one.subject.verdict for one in report.scenarios].count(Verdict.HANG) == 4
    assert not report.complete
    assert not report.interrupted


def test_a_subject_that_also_does_something_else_than_hang_runs_to_the_end() -> None:
    ranks = HangingRanks(lambda name: name != "a")
    report = run_in_turn([scenario(name) for name in "abcdefg"], MINE, GLOO, most_hangs=2, controller=ranks)
    assert len(report.scenarios) == 7


def test_ranks_that_hung_for_a_reason_that_is_the_verdict_hung_all_the_same() -> None:
    chosen = scenario("a")
    findings = (Finding("no_hang", Verdict.HANG), Finding("same_collectives", Verdict.FAIL))
    for found, hung in ((findings, True), (findings[1:], False)):
        mine = ScenarioResult("mine", Verdict.FAIL, 1.0, 0, found, ())
        came = Outcome.of(chosen, mine, None)
        assert hangs_after(came, 2) == (3 if hung else 0)
        assert nothing_but_hangs([came]) == (1 if hung else 0)


def test_a_known_failure_is_not_run_again_on_fresh_ranks() -> None:
    """Whether it also comes there decides nothing: what was known does not make a run red by being unsteady."""
    ranks = WarmRanks(lambda before, scenario: bool(before))
    known = Excuse(MET, Verdict.FAIL, "a reason", "an issue", "")
    for excuse, ran in ((False, 8), (True, 3)):  # after the failure c has fresh ranks
        ranks.asked.clear()
        ranks.before.clear()
        one = ScenarioRunner(MINE, GLOO, ranks, native=False, excuses=[lambda *_: None, lambda *_: known][excuse])
        outcomes = [one.run(scenario(name)) for name in "abc"]
        assert bool(outcomes[1].contaminated_by) is not excuse
        assert len(ranks.asked) == ran


@pytest.mark.parametrize("without_ddp", [True, False])
def test_ranks_of_a_failure_run_nothing_more_though_it_was_known(
    monkeypatch: pytest.MonkeyPatch, without_ddp: bool
) -> None:
    usual = vars(conformance.run.scenario_runner)["get_program"]("train")
    program = dataclasses.replace(usual, without_ddp=without_ddp)
    monkeypatch.setattr(conformance.run.scenario_runner, "get_program", lambda name: program)
    retired: list[str] = []
    ranks = PretendedRanks(lambda one, subject: {"answer": 41 if one.id.endswith("a") else 42})
    monkeypatch.setattr(ranks, "retire", lambda one, subject: retired.append(one.id))
    known = Excuse(MET, Verdict.FAIL, "a reason", "an issue", "")
    one = ScenarioRunner(MINE, GLOO, ranks, native=False, excuses=lambda *_: known)
    for name in "ab":
        one.run(scenario(name))
    assert retired == [scenario("a").id]


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize(
    ("known", "without_ddp", "deadline_s"),
    [
        (Verdict.HANG, True, 10.0),
        (Verdict.FAIL, True, 20.0),
        (Verdict.HANG, False, 20.0),  # what torch's DDP breaks is excused whether it hangs or not
    ],
)
def test_a_backend_that_is_known_to_hang_is_not_waited_for_as_long(
    monkeypatch: pytest.MonkeyPatch, known: Verdict, without_ddp: bool, deadline_s: float, hangs: bool
) -> None:
    def excuse(scenario: Scenario, result: ScenarioResult) -> Excuse | None:
        return Excuse(MET, known, "a reason", "an issue", "") if result.verdict is known else None

    usual = vars(conformance.run.scenario_runner)["get_program"]("train")
    program = dataclasses.replace(usual, without_ddp=without_ddp)
    monkeypatch.setattr(conformance.run.scenario_runner, "get_program", lambda name: program)
    ranks = HangingRanks(lambda name: hangs, subject=by_itself(GLOO.name) if without_ddp else MINE)
    outcome = ScenarioRunner(MINE, GLOO, ranks, native=False, excuses=excuse).run(scenario("a"))
    assert ranks.deadlines == {"a": deadline_s}
    assert outcome.sha256 == scenario("a").digest
    assert outcome.subject.hung is hangs


def test_events_report_the_progress_of_a_run() -> None:
    events: list[Progress] = []
    chosen = [scenario("a"), scenario("b")]
    run_in_turn(chosen, MINE, GLOO, native=False, controller=PretendedRanks(), on_event=events.append)
    assert [(event.done, event.total, event.outcome is not None) for event in events] == [
        (0, 2, False), (1, 2, True), (1, 2, False), (2, 2, True),
    ]  # fmt: skip


class WarmRanks(PretendedRanks):
    """Ranks that remember the scenarios before, and may let them spoil the next one."""

    def __init__(self, spoils: Callable[[tuple[str, ...], Scenario], bool] = lambda before, scenario: False) -> None:
        super().__init__()
        self.spoils = spoils
        self.before: dict[tuple[int, bool, bool], tuple[str, ...]] = {}

    def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
        before = () if fresh else self.before.get(scenario.kind_of_ranks, ())
        answer = 41 if self.spoils(before, scenario) else 42
        self.facts_of = lambda scenario, subject: {"answer": answer}
        self.before[scenario.kind_of_ranks] = (*before, scenario.id)
        return {
            rank: dataclasses.replace(seen, after=before)
            for rank, seen in super().run(scenario, subject, fresh=fresh).items()
        }

    def retire(self, scenario: Scenario, subject: Subject) -> None:
        self.before.pop(scenario.kind_of_ranks, None)


def test_ranks_that_have_run_something_are_warm() -> None:
    one = ScenarioRunner(MINE, GLOO, WarmRanks(), native=False)
    assert [one.run(scenario(name)).warm for name in "ab"] == [False, True]


def test_a_failure_after_another_scenario_is_tried_on_fresh_ranks_and_named_for_what_it_is() -> None:
    ranks = WarmRanks(lambda before, wanted: before[-1:] == (scenario("dirty").id,))
    chosen = [scenario("dirty"), scenario("next"), scenario("last")]
    report = run_in_turn(chosen, MINE, GLOO, native=False, controller=ranks)
    assert [one.subject.verdict for one in report.scenarios] == [Verdict.PASS] * 3
    assert [one.contaminated_by for one in report.scenarios] == ["", chosen[0].id, ""]
    summary = report.scenarios[1].subject.findings[0].summary
    says = "FAIL on ranks that had run it, twice, PASS on fresh ones, 3 times"
    leaves = "it left something behind that ranks could not notice"
    assert summary.startswith(f"contaminated by {chosen[0].id}: {says}; {leaves}; wrong was: answer on rank")
    assert not report.is_green
    assert [name for name, _ in ranks.asked] == ["dirty", "next", "next", "dirty", "next", "next", "next", "last"]


def test_a_backend_that_fails_only_after_other_scenarios_fails_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = dataclasses.replace(vars(conformance.run.scenario_runner)["get_program"]("train"), without_ddp=True)
    monkeypatch.setattr(conformance.run.scenario_runner, "get_program", lambda name: program)
    ranks = WarmRanks(lambda before, wanted: before[-1:] == (scenario("dirty").id,))
    chosen = [scenario("dirty"), scenario("next")]
    report = run_in_turn(chosen, MINE, GLOO, native=False, controller=ranks)
    assert [one.subject.verdict for one in report.scenarios] == [Verdict.PASS, Verdict.FAIL]
    assert not report.contaminated
    first, *_, last = (finding.summary for finding in report.scenarios[1].subject.findings)
    assert first.startswith("answer on rank")
    begun = f"FAIL, twice, on ranks that had begun with {chosen[0].id}; PASS on fresh ones, 3 times"
    assert last.startswith(f"only in processes that have used other groups before: {begun}")


def test_what_several_scenarios_later_is_spoilt_is_charged_to_the_one_that_spoilt_it() -> None:
    """What ran in between is innocent, and so is what comes after: it has fresh ranks."""
    dirty, last = scenario("c"), scenario("g")
    ranks = WarmRanks(lambda before, wanted: dirty.id in before and wanted in (last, scenario("h")))
    report = run_in_turn([*map(scenario, "abcdefgh")], MINE, GLOO, native=False, controller=ranks)
    assert [one.subject.verdict for one in report.scenarios] == [Verdict.PASS] * 8
    assert {one.id: one.contaminated_by for one in report.scenarios if one.contaminated_by} == {last.id: dirty.id}


def test_the_first_scenario_of_each_requirement_has_fresh_ranks() -> None:
    """Most people wrap one model in a process: what is wrong with the first wrapper only is wrong for them."""
    judges = ScenarioRunner(MINE, GLOO, WarmRanks(), native=False)
    chosen = [scenario(name, requirements=tuple(names)) for name, *names in map(list, ("aX", "bX", "cXY", "dY", "eZ"))]
    assert [judges.run(one).warm for one in chosen] == [False, True, False, True, False]


def test_the_first_scenario_of_a_requirement_is_the_same_in_however_many_lanes() -> None:
    chosen = [scenario("a", requirements=("X",)), scenario("b", needs=("join",)), scenario("c", requirements=("X",))]
    first = first_uses([scenario("unsupported", needs=("join",)), *chosen], MINE, GLOO)
    assert first == {chosen[0].id}
    lanes = [ScenarioRunner(MINE, GLOO, WarmRanks(), native=False, first=first) for _ in "12"]
    lanes[1].run(scenario("other"))
    assert lanes[1].run(chosen[2]).warm
    assert not lanes[0].run(chosen[0]).warm


def test_every_scenario_runner_gets_the_first_uses_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[frozenset[str]] = []

    def made(*arguments: Any, **options: Any) -> ScenarioRunner:
        told.append(options["first"])
        return ScenarioRunner(*arguments, **options)

    monkeypatch.setattr(runner, "ScenarioRunner", made)
    chosen = [scenario("a"), scenario("b")]
    run_in_turn(chosen, MINE, GLOO, native=False, controller=PretendedRanks())
    assert told == [first_uses(chosen, MINE, GLOO)] == [{chosen[0].id}]


def test_what_is_unsupported_has_exercised_nothing() -> None:
    judges = ScenarioRunner(MINE, GLOO, WarmRanks(), native=False)
    chosen = [scenario("a"), scenario("b", requirements=("X",), needs=("join",)), scenario("c", requirements=("X",))]
    outcomes = [judges.run(one) for one in chosen]
    assert outcomes[1].subject.verdict is Verdict.UNSUPPORTED
    assert not outcomes[2].warm


def test_after_a_failure_ranks_of_that_kind_are_fresh() -> None:
    ranks = WarmRanks(lambda before, wanted: wanted.id.endswith("/wrong"))
    judges = ScenarioRunner(MINE, GLOO, ranks, native=False)
    sizes = [("a", 1), ("e", 2), ("wrong", 1), ("b", 2), ("c", 1), ("d", 1)]
    outcomes = [judges.run(scenario(name, size)) for name, size in sizes]
    assert [one.warm for one in outcomes] == [False, False, True, True, False, True]


def test_a_failure_that_does_not_come_again_is_a_failure_and_nobody_else_is_blamed_for_it() -> None:
    turns = iter((False, True))
    ranks = WarmRanks(lambda before, wanted: next(turns, False))
    judges = ScenarioRunner(MINE, GLOO, ranks, native=False)
    innocent, racy, last = (judges.run(scenario(name)) for name in ("innocent", "racy", "last"))
    assert [one.subject.verdict for one in (innocent, racy, last)] == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    assert racy.contaminated_by == ""
    assert racy.subject.findings[-1].summary == (
        "the verdict is not stable: FAIL, then PASS on fresh ranks, and again no FAIL on others that had first run what"
        f" those that failed had, {innocent.id} last; replay it with --times 100"
    )
    assert [name for name, _ in ranks.asked] == ["innocent", "racy", "racy", "innocent", "racy", "last"]


def test_nobody_is_blamed_for_what_also_fails_at_times_on_fresh_ranks() -> None:
    turns = iter((False, True, False, False, True, True))  # innocent, racy, fresh, innocent, racy, fresh
    ranks = WarmRanks(lambda before, wanted: next(turns, False))
    judges = ScenarioRunner(MINE, GLOO, ranks, native=False)
    _, racy = (judges.run(scenario(name)) for name in ("innocent", "racy"))
    assert (racy.subject.verdict, racy.contaminated_by) == (Verdict.FAIL, "")
    assert racy.subject.findings[-1].summary == (
        "the verdict is not stable: FAIL, then PASS on fresh ranks, then FAIL on other fresh ones, as where two things"
        " race; replay it with --times 100"
    )


class KeepingRanks(WarmRanks):
    """Ranks that start a process: each time, or only where there is none yet."""

    def __init__(self, *, always: bool, what: str = "child process left behind: 7 (sleep)") -> None:
        super().__init__()
        self.always = always
        self.what = what
        self.taken_after = 0  # so many runs, others get the ranks

    def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
        seen = super().run(scenario, subject, fresh=fresh)
        if len(self.asked) == self.taken_after:
            self.before[scenario.kind_of_ranks] = ("elsewhere",)
        keeps = self.always or not seen[0].after
        return {rank: dataclasses.replace(one, hygiene=(self.what,) * keeps) for rank, one in seen.items()}


def test_what_a_process_keeps_once_is_no_failure() -> None:
    ranks = KeepingRanks(always=False)
    judges = ScenarioRunner(MINE, GLOO, ranks, native=False)
    assert [judges.run(scenario(name)).subject.verdict for name in "ab"] == [Verdict.PASS] * 2
    assert [name for name, _ in ranks.asked] == ["a", "a", "b"]


def test_ranks_that_ran_another_scenario_meanwhile_confirm_nothing() -> None:
    ranks = KeepingRanks(always=False)
    ranks.taken_after = 1
    outcome = ScenarioRunner(MINE, GLOO, ranks, native=False).run(scenario("a"))
    assert outcome.subject.verdict is Verdict.PASS
    assert [name for name, _ in ranks.asked] == ["a", "a", "a", "a"]


@pytest.mark.parametrize(
    "ranks",
    [KeepingRanks(always=True), KeepingRanks(always=False, what="grad mode changed")],
    ids=["each_time", "what_nobody_may_keep"],
)
def test_what_else_ranks_keep_is_a_failure(ranks: KeepingRanks) -> None:
    program = Program("train", lambda ctx: None, invariants=("leaves_no_trace",))
    program.expects(lambda scenario: {rank: {"answer": 42} for rank in range(scenario.world_size)})
    with mock.patch.object(conformance.run.scenario_runner, "get_program", return_value=program):
        one = ScenarioRunner(MINE, GLOO, ranks, native=False).run(scenario("a"))
    assert (one.subject.verdict, one.subject.broken) == (Verdict.FAIL, ("COMPAT-12",))


def test_who_spoilt_the_ranks_is_a_guess_where_no_others_can_run_the_same() -> None:
    ranks = WarmRanks(lambda before, wanted: "run elsewhere" in before)
    judges = ScenarioRunner(MINE, GLOO, ranks, native=False)
    judges.run(scenario("first"))
    ranks.before[scenario("next").kind_of_ranks] = ("run elsewhere",)
    one = judges.run(scenario("next"))
    assert (one.subject.verdict, one.contaminated_by) == (Verdict.PASS, "run elsewhere")
    assert "could not notice, or the verdict is not stable; wrong was: " in one.subject.findings[0].summary


def test_a_failure_on_fresh_ranks_too_is_the_subject_s() -> None:
    ranks = WarmRanks(lambda before, wanted: wanted.id.endswith("/broken"))
    report = run_in_turn([scenario("a"), scenario("broken")], MINE, GLOO, native=False, controller=ranks)
    assert [one.subject.verdict for one in report.scenarios] == [Verdict.PASS, Verdict.FAIL]
    assert report.contaminated == ()


class SlowWhenFresh(WarmRanks):
    """Ranks that, where they are fresh, need two others to have begun before they end, if others may."""

    may_others = True

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        observations = self.run(scenario, subject, fresh=fresh)
        begun = len(self.asked)
        while fresh and self.may_others and scenario.id != "probe" and len(self.asked) - begun < 2:
            await trio.sleep(0.001)
        return observations


@pytest.mark.parametrize(("device_type", "begun"), [("cpu", "abcd"), ("sim", "ab")])
def test_others_go_on_while_a_failure_is_tried_on_fresh_ranks(device_type: str, begun: str) -> None:
    ranks, begun_before = SlowWhenFresh(lambda before, wanted: wanted.id.endswith("/b")), {}
    ranks.may_others = device_type == "cpu"
    backend = dataclasses.replace(GLOO, device_type=device_type)

    def note(event: Progress) -> None:
        if event.outcome is not None:
            begun_before[event.outcome.id[-1]] = {name for name, _ in ranks.asked}

    chosen = [scenario(name) for name in "abcde"]
    report = runner.run(chosen, MINE, backend, native=False, controller=ranks, on_event=note)
    assert [one.id[-1] for one in report.failures] == ["b"]
    assert begun_before["b"] >= {*begun}
    assert ("c" in begun_before["b"]) == ranks.may_others


def test_ranks_that_cannot_connect_are_replaced_once_and_that_is_told() -> None:
    lost = RuntimeError("Gloo connectFullMesh failed: Connection closed by peer")

    class Apart(PretendedRanks):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times

        def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> dict[int, Observation]:
            seen = super().run(scenario, subject, fresh=fresh)
            if scenario.id == "probe" or not self.times:
                return seen
            self.times -= 1
            fate = Ending("raised", detail=f"raised {lost}")
            return {rank: Observation(rank, fate, raised=Raised.of(lost), phase="start") for rank in seen}

    for times, verdict, end in ((1, Verdict.PASS, "; not there"), (2, Verdict.FAIL, "; the same there")):
        ranks = Apart(times)
        report = run_in_turn([scenario("a", 2)], MINE, GLOO, native=False, controller=ranks)
        one = report.scenarios[0].subject
        assert one.verdict is verdict
        assert len(ranks.asked) == 2
        assert one.findings[-1].summary.startswith("tried again on fresh ranks: ranks 0 and 1 could not connect")
        assert one.findings[-1].summary.endswith(end)
        assert not any("exercised" in each.checker and each.verdict.is_failure for each in one.findings)


class Orphaned(PretendedRanks):
    """Ranks that are lost as many `times` from the attempt number `since`; rank 0 raises where another one is gone."""

    def __init__(self, since: int, times: int, answer: int = 42) -> None:
        super().__init__(lambda scenario, subject: {"answer": answer})
        self.lost = range(since, since + times)

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        number, seen = len(self.asked), self.run(scenario, subject, fresh=fresh)
        if number not in self.lost:
            return {rank: dataclasses.replace(one, after=() if fresh else ("before",)) for rank, one in seen.items()}
        raised = Raised.of(RuntimeError("Connection closed by peer"))
        alone = Observation(0, Ending("raised", detail=f"raised {raised}"), raised=raised, phase="train")
        gone = Observation(1, lost("was killed by SIGKILL"), phase="train")
        return {0: alone, 1: gone}


@pytest.mark.parametrize(
    ("ranks", "verdict", "asked"),
    [
        (Orphaned(0, 1), Verdict.PASS, 2),
        (Orphaned(0, 2), Verdict.HARNESS_ERROR, 2),
        pytest.param(Orphaned(1, 1, answer=41), Verdict.FAIL, 3, id="while a failure is confirmed"),
    ],
)
def test_what_a_killed_process_that_forks_ranks_left_is_tried_again_and_no_verdict(
    ranks: Orphaned, verdict: Verdict, asked: int
) -> None:
    judging = ScenarioRunner(MINE, GLOO, ranks, native=False, first=frozenset())
    one = judging.run(scenario("a", 2)).subject
    assert (one.verdict, len(ranks.asked)) == (verdict, asked)
    told = "the process that forks ranks was killed by SIGKILL"
    assert verdict is Verdict.FAIL or told in one.findings[-1].summary
    assert verdict is not Verdict.FAIL or "answer" in one.findings[0].summary


def test_a_truth_whose_rank_is_lost_is_computed_again() -> None:
    class Alone(PretendedRanks):
        num_expected = 0

        async def expect(self, scenario: Scenario) -> Mapping[int, Facts]:
            self.num_expected += 1
            if self.num_expected == 1:
                raise ReplicaError(f"the rank that computes the truth {lost('was killed by SIGKILL')}")
            return await super().expect(scenario)

    assert verdicts(scenario("a"), ranks=Alone()) == [Verdict.PASS]
