"""Deaths, hangs and exceptions: the right rank is named, and so is what the others wait for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import conformance
from conformance.checkers.checker import Evidence
from conformance.checkers.fate import OUR_FRAMES, missing_from
from conformance.checkers.registry import get_checker
from conformance.checkers.unconnected import unconnected
from conformance.errors import ScenarioError, SubjectError
from conformance.observation import Observation
from conformance.programs.registry import get_program
from conformance.run.judge import judge
from conformance.scenario import Fault
from conformance.tests.evidence_by_hand import SCENARIO, collective, ended, evidence_of, gradients, raised, returned
from conformance.truth.expected import Raises, Right
from conformance.verdict import Finding, Verdict
from conformance.workers.answers import lost


def test_the_frames_that_explanations_leave_out_are_of_files_that_exist() -> None:
    root = Path(conformance.__file__).parent.parent
    assert [part for part in OUR_FRAMES if not (root / part).exists()] == []


def _check(name: str, *observations: Observation, **scenario: Any) -> Finding:
    return _finding(name, evidence_of(*observations, **scenario))


def _finding(name: str, evidence: Evidence) -> Finding:
    finding = get_checker(name)(evidence)
    assert finding is not None
    return finding


def test_nothing_happened() -> None:
    for name in ("no_crash", "no_hang", "no_exception", "leaves_no_trace"):
        assert _check(name, returned(0), returned(1)).verdict is Verdict.PASS


@pytest.mark.parametrize(("kind", "phrase"), [("killed", "was killed by SIGKILL"), ("exited", "exited with code 3")])
def test_a_death_is_a_crash_of_that_rank(kind: str, phrase: str) -> None:
    finding = _check("no_crash", ended(0, "abandoned"), ended(1, kind, gradients(4), stderr="out of memory"))
    assert finding.verdict is Verdict.CRASH
    assert finding.summary == f"rank 1 {phrase} in phase backward, step 0"
    assert "out of memory" in finding.explanation


def test_errors_after_a_death_are_not_judged() -> None:
    finding = _check("no_exception", raised(0, RuntimeError("connection closed by peer")), ended(1, "killed"))
    assert finding.verdict is Verdict.UNKNOWN


@given(st.integers(2, 4), st.integers(0, 3), st.integers(0, 5), st.integers(0, 3))
def test_the_rank_missing_from_a_collective_is_named(
    world_size: int, culprit: int, num_issued: int, num_ahead: int
) -> None:
    """Whoever stops after however many collectives, with the others any number ahead, is found."""
    culprit %= world_size
    observations = {
        rank: ended(rank, "hung", gradients(*range(num_issued + (0 if rank == culprit else 1 + num_ahead))))
        for rank in range(world_size)
    }
    found = missing_from(observations)
    assert found is not None
    first_missing, waiting, absent = found
    assert first_missing.index == num_issued
    assert absent == [culprit]
    assert waiting == [rank for rank in range(world_size) if rank != culprit]
    finding = _check("no_hang", *observations.values())
    assert finding.verdict is Verdict.HANG
    assert finding.summary.startswith(f"rank {culprit} is missing from all_reduce #{num_issued} ")


def test_a_rank_that_left_is_the_missing_one() -> None:
    waiting = ended(0, "hung", gradients(4, 5))
    left = _check("no_hang", waiting, returned(1, gradients(4)))
    assert left.summary.endswith("rank 1 has run the program to its end")
    threw = _check("no_hang", waiting, raised(1, ValueError("no"), gradients(4)))
    assert threw.summary.endswith("rank 1 raised ValueError: no in phase backward, step 0")


def test_only_the_members_of_a_group_can_be_missing() -> None:
    in_group = [collective(0, group="group 1"), collective(1, group="group 1")]
    everyone = collective(0)
    hung = [
        ended(0, "hung", (everyone, *in_group)),
        ended(1, "hung", (everyone, in_group[0])),
        returned(2, (everyone,)),
    ]
    found = missing_from({one.rank: one for one in hung})
    assert found is not None
    assert (found[0].group, found[1], found[2]) == ("group 1", [0], [1])
    assert "of group 1; rank 1 is in phase backward" in _check("no_hang", *hung).summary


def test_a_rank_can_be_missing_from_the_first_collective_of_a_group() -> None:
    everyone = collective(0)
    hung = [
        ended(0, "hung", (everyone, collective(0, group="group 1", members=(0, 2)))),
        returned(1, (everyone,)),
        ended(2, "hung", (everyone,)),
    ]
    found = missing_from({one.rank: one for one in hung})
    assert found is not None
    assert (found[0].group, found[1], found[2]) == ("group 1", [0], [2])


def test_a_rank_that_waits_in_another_group_is_not_the_missing_one() -> None:
    together = (collective(0, group="group 1"),)
    hung = [
        ended(0, "hung", (*together, collective(1, group="group 1", started_ns=9))),
        ended(1, "hung", together),
        ended(2, "hung", (collective(0, started_ns=5),)),  # waits for both, and has done so for longer
    ]
    found = missing_from({one.rank: one for one in hung})
    assert found is not None
    assert (found[0].group, found[1], found[2]) == ("group 1", [0], [1])


def test_a_hang_in_which_nobody_is_missing() -> None:
    finding = _check("no_hang", ended(0, "hung", gradients(4), stack="wait"), ended(1, "hung", gradients(4)))
    assert finding.verdict is Verdict.HANG
    assert finding.summary.startswith("no rank is missing from a collective, but ranks 0 and 1 did not end")
    assert finding.summary.endswith("rank 1 did not write a stack when signalled")


def test_a_hang_that_was_not_recorded_says_nothing_of_collectives() -> None:
    finding = _check("no_hang", ended(0, "hung", stack="wait"), returned(1), recorded=False)
    assert finding.summary.startswith("rank 0 did not end: rank 0 is in phase ")


def test_the_rank_that_is_elsewhere_is_named() -> None:
    def at(place: str) -> str:
        return f'Thread 0x1 (most recent call first):\n  File "{place}.py", line 3 in issue\n'

    hung = [ended(rank, "hung", stack=at("other" if rank == 2 else "wait")) for rank in range(4)]
    found = _check("no_hang", *hung, recorded=False)
    assert found.summary.endswith("; rank 2 is not where the others are (see its stack)")


def test_ranks_that_end_without_a_cause_are_our_fault() -> None:
    assert _check("no_hang", returned(0), ended(1, "abandoned")).verdict is Verdict.HARNESS_ERROR


def test_ranks_whose_zygote_was_killed_say_so_and_accuse_nobody() -> None:
    gone = [replace(ended(rank, "abandoned"), fate=lost("was killed by SIGKILL")) for rank in range(2)]
    finding = _check("no_hang", *gone)
    assert (finding.verdict, finding.summary) == (
        Verdict.HARNESS_ERROR,
        "ranks 0 and 1 ended, because the process that forks ranks was killed by SIGKILL; nobody of the harness did"
        " that, perhaps the subject or the kernel",
    )
    assert "nobody" not in _check("no_hang", *[replace(one, fate=lost()) for one in gone]).summary


def test_a_child_process_that_is_left_counts_in_every_scenario_and_against_one_requirement() -> None:
    left = [replace(returned(rank), hygiene=("grad mode changed", "child process left behind: 7")) for rank in range(2)]
    finding = _check("leaves_no_process", *left)
    assert (finding.verdict, finding.requirements) == (Verdict.FAIL, ("COMPAT-12",))
    assert finding.explanation == "Rank 0: child process left behind: 7\nRank 1: child process left behind: 7"
    evidence = evidence_of(replace(returned(0), hygiene=("grad mode changed",)), returned(1))
    assert get_checker("leaves_no_process")(evidence) is None


def test_exceptions_name_rank_and_message() -> None:
    one = _check("no_exception", returned(0), raised(1, ValueError("no"), traceback="a\nb"))
    assert (one.verdict, one.summary) == (Verdict.FAIL, "rank 1 raised ValueError: no")
    alike = _check("no_exception", raised(0, ValueError("no")), raised(1, ValueError("no")))
    assert alike.summary == "every rank raised ValueError: no"
    unlike = _check("no_exception", raised(0, ValueError("no")), raised(1, TypeError("yes")))
    assert unlike.summary == "rank 0 raised ValueError: no; rank 1 raised TypeError: yes"


def test_of_what_is_not_recorded_the_phase_says_what_was_called() -> None:
    apart = _check("no_exception", returned(0), raised(1, ValueError("no")), recorded=False)
    assert apart.summary == "rank 1 raised ValueError in phase backward: no"


def test_before_its_first_phase_a_rank_is_in_the_function_of_torch_that_it_called() -> None:
    stack = """Current thread 0x1 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 5 in _new_group_with_tag
  File "/lib/torch/distributed/distributed_c10d.py", line 6 in new_group
  File "/lib/torch/distributed/c10d_logger.py", line 7 in wrapper
  File "/conformance/program.py", line 8 in body"""
    hung = _check("no_hang", ended(0, "hung", stack=stack, phase="start"), returned(1), recorded=False)
    assert hung.summary.startswith("rank 0 did not end: rank 0 is in new_group")
    traceback = "\n".join(f"{line}," for line in reversed(stack.replace(" in ", ", in ").splitlines()))
    failed = replace(raised(1, ValueError("no"), traceback=traceback), phase="start")
    assert _check("no_exception", returned(0), failed, recorded=False).summary == (
        "rank 1 raised ValueError in new_group: no"
    )
    nowhere = replace(raised(1, ValueError("no")), phase="start")
    assert _check("no_exception", returned(0), nowhere, recorded=False).summary == (
        "rank 1 raised ValueError before its first phase: no"
    )


@pytest.mark.parametrize(
    ("phases", "broken"),
    [
        (("gather", "gather, at root 1"), ("GRAD-07",)),
        (("gather in a group, at root 1", "gather in a group"), ("GRAD-08",)),
        (("gather in a group", "gather, at root 1"), ("GRAD-07",)),  # the ranks that wait are ahead
        (("gather", "scatter"), ("GRAD-07",)), (("scatter", "scatter"), ()), (("gather", "gathering"), ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "checker"), [("hung", "no_hang"), ("killed", "no_crash"), ("raised", "no_exception")])
def test_an_end_in_a_trial_speaks_for_the_requirement_of_the_trial(
    phases: tuple[str, str], broken: tuple[str, ...], kind: str, checker: str
) -> None:
    trials = dict.fromkeys(("gather", "gather in a group", "scatter"), Right())
    evidence = evidence_of(
        *(ended(rank, kind, phase=phase) for rank, phase in enumerate(phases)),
        expected=dict.fromkeys(range(2), trials), recorded=False,
    )  # fmt: skip
    speaks_for = {"gather": ("GRAD-07",), "*in a group": ("GRAD-08",)}
    finding = _finding(checker, replace(evidence, speaks_for=speaks_for))
    assert (finding.verdict.is_failure, finding.requirements) == (True, broken)


def test_stacks_show_the_most_recent_calls_without_ours() -> None:
    ours = '  File "conformance/workers/faults.py", line 1 in fire\n'
    stack = ours + "".join(f'  File "ddp.py", line {number} in call\n' for number in range(40))
    finding = _check("no_hang", ended(0, "hung", gradients(4)), ended(1, "hung", stack=stack))
    assert "faults.py" not in finding.explanation
    assert "line 0 in call" in finding.explanation
    assert "line 39 in call" not in finding.explanation


def test_the_main_thread_comes_first_and_idle_threads_of_pools_do_not_come() -> None:
    idle = '  File "lib/concurrent/futures/thread.py", line 81 in _worker\n  File "threading.py", line 9 in run\n'
    threads = [idle, '  File "group.py", line 7 in carry_out\n' + idle, '  File "user.py", line 3 in wait\n']
    stack = "\n".join(f"Thread 0x{number} (most recent call first):\n{text}" for number, text in enumerate(threads))
    told = _check("no_hang", ended(0, "hung", stack=stack), returned(1)).explanation
    assert "Thread 0x0" not in told
    assert told.index("user.py") < told.index("group.py")


def test_long_messages_are_cut_in_the_summary() -> None:
    finding = _check("no_exception", returned(0), raised(1, ValueError("no " * 200 + "\nmore")))
    assert len(finding.summary) < 200
    assert finding.summary.endswith(" ...")


def test_errors_of_the_harness_are_not_the_subjects() -> None:
    ours = raised(0, ScenarioError("unknown model"))
    theirs = raised(0, SubjectError("is no nn.Module"))
    assert _check("no_exception", ours, ours).verdict is Verdict.HARNESS_ERROR
    assert _check("no_exception", theirs, theirs).verdict is Verdict.FAIL


def test_traces_left_behind() -> None:
    finding = _check("leaves_no_trace", returned(0), returned(1, hygiene=("a thread was left: Thread-1",)))
    assert (finding.verdict, finding.summary) == (Verdict.FAIL, "rank 1 left traces: a thread was left: Thread-1")


def test_exercised_counts_collectives_where_they_were_recorded() -> None:
    assert _check("exercised", returned(0, gradients(4)), returned(1, gradients(4))).verdict is Verdict.PASS
    idle = _check("exercised", returned(0, gradients(4)), returned(1))
    assert (idle.verdict, idle.summary) == (
        Verdict.HARNESS_ERROR, "fewer collectives than the 1 that the scenario declares (rank 1: 0)"
    )  # fmt: skip
    assert _check("exercised", returned(0), min_collectives=0).verdict is Verdict.PASS
    assert _check("exercised", returned(0), returned(1), recorded=False).verdict is Verdict.PASS
    assert _check("exercised", ended(0, "hung"), ended(1, "hung")).verdict is Verdict.PASS


def test_a_run_without_facts_or_ranks_exercised_nothing() -> None:
    nothing = _check("exercised", returned(0, gradients(4), {}), returned(1, gradients(4), {}))
    assert (nothing.verdict, nothing.summary) == (Verdict.HARNESS_ERROR, "no rank observed any fact")
    evidence = Evidence(evidence_of(returned(0), returned(1)).scenario, {0: returned(0, gradients(4))})
    assert _finding("exercised", evidence).verdict is Verdict.HARNESS_ERROR


@pytest.mark.parametrize(
    ("fault", "observation", "verdict"),
    [
        ("kill", ended(1, "killed"), Verdict.PASS),
        ("segfault", ended(1, "killed"), Verdict.PASS),
        ("exit", ended(1, "exited"), Verdict.PASS),
        ("stop", ended(1, "hung"), Verdict.PASS),
        ("raise", raised(1, RuntimeError("injected")), Verdict.PASS),
        ("raise", returned(1, gradients(4), faults_fired=1), Verdict.PASS),
        ("kill", returned(1, gradients(4)), Verdict.HARNESS_ERROR),
        ("stop", ended(1, "killed"), Verdict.HARNESS_ERROR),
        ("raise", returned(1, gradients(4)), Verdict.HARNESS_ERROR),
        ("slow", returned(1, gradients(4), faults_fired=1), Verdict.PASS),
        ("slow", returned(1, gradients(4)), Verdict.HARNESS_ERROR),
        ("kill", ended(1, "abandoned"), Verdict.PASS),
    ],
)
def test_an_injected_fault_must_fire(fault: str, observation: Observation, verdict: Verdict) -> None:
    first = returned(0, gradients(4))
    assert _check("exercised", first, observation, faults=(Fault(fault, 1),)).verdict is verdict


def test_an_expected_fate_must_come() -> None:
    hung, dead, fine = ended(0, "hung"), ended(0, "killed"), returned(0, gradients(4))
    for fate, came, verdict in (
        ("hang", hung, Verdict.PASS), ("crash", dead, Verdict.PASS), ("hang", dead, Verdict.HARNESS_ERROR),
        ("crash", fine, Verdict.HARNESS_ERROR), ("nonsense", fine, Verdict.HARNESS_ERROR),
    ):  # fmt: skip
        assert _check("exercised", came, arguments={"expect_fate": fate}).verdict is verdict


def test_nothing_is_judged_of_a_doomed_rank_that_died_and_one_that_lives_is_our_fault() -> None:
    arguments = {"doomed": [1]}
    alive = evidence_of(returned(0), returned(1), arguments=arguments)
    assert _finding("exercised", alive).verdict is Verdict.HARNESS_ERROR

    def found(**scenario: Any) -> list[str]:
        dead = evidence_of(returned(0), ended(1, "killed"), **scenario)
        _, findings = judge(dead.scenario, get_program("lost_peer"), dead.observations, None, None)
        return [one.checker for one in findings if one.verdict is Verdict.CRASH]

    assert found(arguments=arguments) == []
    assert found() == ["no_crash"]


_LOST = "Gloo connectFullMesh failed with [pair.cc:144] no error: Connection closed by peer [127.0.0.1]:3218"


def _apart(rank: int, message: str = _LOST, phase: str = "start", **rest: Any) -> Observation:
    return replace(raised(rank, RuntimeError(message)), phase=phase, **rest)


def test_ranks_that_could_not_connect_never_began_what_the_scenario_is_about() -> None:
    assert unconnected({0: _apart(0), 1: ended(1, "abandoned", phase="start")}).startswith(
        "rank 0 could not connect to the others: RuntimeError: Gloo connectFullMesh"
    )
    doomed = SCENARIO.replace(world_size=2, faults=(Fault("kill", 1, "killed"),))
    evidence = replace(evidence_of(_apart(0), _apart(1)), scenario=doomed)
    assert getattr(get_checker("exercised")(evidence), "verdict", None) is Verdict.UNKNOWN
    finding = _check("no_exception", _apart(0), _apart(1))
    assert (finding.verdict, finding.mistake) == (Verdict.FAIL, "not-connected")


@pytest.mark.parametrize(
    "seen",
    [
        (_apart(0, phase="backward"),),
        (_apart(0, "out of memory"),),
        (_apart(0, history=gradients(4)),),
        (_apart(0), ended(1, "killed")),  # which is why the connection was closed
        (_apart(0, faults_fired=1),),
        (returned(0),),
    ],
)  # fmt: skip
def test_what_breaks_later_or_because_a_rank_died_has_begun(seen: tuple[Observation, ...]) -> None:
    assert unconnected({one.rank: one for one in seen}) == ""


def test_ranks_that_hang_or_die_where_they_had_to_raise_lack_a_check() -> None:
    hung = (ended(0, "hung", phase="construct"), returned(1, facts={"construct": None}))
    refusal = Raises(("RuntimeError",))
    first = {rank: {"construct": refusal, "step0/grad/w": 1.0} for rank in (0, 1)}
    only = {rank: {"step0/backward": None, "step1/backward": refusal} for rank in (0, 1)}
    later = (ended(0, "hung", phase="backward"), ended(1, "hung", phase="backward"))
    for seen, expected, mistake in (
        (hung, first, "lacks-check"), (later, only, "lacks-check"), (later, first, ""), (hung, None, ""),
    ):  # fmt: skip
        finding = _finding("no_hang", replace(evidence_of(*seen), expected=expected))
        assert (finding.verdict, finding.mistake) == (Verdict.HANG, mistake)
    died = (ended(0, "killed", phase="construct"), returned(1, facts={"construct": None}))
    values: dict[int, dict[str, object]] = {0: {"step0/grad/w": 1.0}}
    for demanded, mistake in ((first, "lacks-check"), (values, "")):
        finding = _finding("no_crash", replace(evidence_of(*died), expected=demanded))
        assert (finding.verdict, finding.mistake) == (Verdict.CRASH, mistake)
