"""One verdict from many findings, and when torch's own DDP is an authority."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from conformance.checkers.registry import get_checker
from conformance.errors import SpecificationError
from conformance.observation import Facts, Observation, Raised
from conformance.programs.registry import Program, load_programs
from conformance.run.judge import authority_of, judge
from conformance.spec.catalogue import load_catalogue
from conformance.tests.evidence_by_hand import PROGRAM, SCENARIO, ended, gradients, raised, returned
from conformance.verdict import Finding, Verdict, decisive

FOLLOWING = Program("follows", lambda ctx: None, native_facts=("step", "construct"))
MEAN = torch.tensor([2.0, 4.0])
EXPECTED: dict[int, Facts] = {rank: {"step0/grad/w": MEAN} for rank in range(2)}


def _run(gradient: object = MEAN, **more: object) -> dict[int, Observation]:
    facts = {"step0/grad/w": gradient, **{name.replace("_", "/"): value for name, value in more.items()}}
    return {rank: returned(rank, gradients(4), facts) for rank in range(2)}


def _judge(
    observations: Mapping[int, Observation],
    native: Mapping[int, Observation] | None = None,
    program: Program = PROGRAM,
    expected: Mapping[int, Facts] | None = EXPECTED,
) -> tuple[Verdict, tuple[Finding, ...]]:
    authority = None
    if native is not None:
        verdict, _ = judge(SCENARIO, program, native, expected, None)
        authority = authority_of(program, verdict, native)
    return judge(SCENARIO, program, observations, expected, authority)


def _named(findings: tuple[Finding, ...], name: str) -> Finding | None:
    return next((finding for finding in findings if finding.checker == name), None)


def test_passes_with_every_checker_heard() -> None:
    verdict, findings = _judge(_run())
    assert verdict is Verdict.PASS
    assert [finding.checker for finding in findings] == [
        "exercised", "no_crash", "no_hang", "no_exception", "facts", "same_collectives"
    ]  # fmt: skip


@pytest.mark.parametrize("asks_for", [(), ("leaves_no_trace",), ("same_collectives",), ("same_until_refused",)])
def test_the_order_of_collectives_is_judged_whatever_a_program_asks_for(asks_for: tuple[str, ...]) -> None:
    program = Program("p", lambda ctx: None, invariants=asks_for)
    other = {0: returned(0, gradients(4, 5)), 1: returned(1, gradients(5, 4))}
    verdict, findings = judge(SCENARIO, program, other, None, None)
    assert verdict is Verdict.FAIL
    told = [finding.checker for finding in findings if finding.verdict is Verdict.FAIL]
    assert told == [next((name for name in asks_for if name.startswith("same")), "one_order")]


def test_the_gravest_finding_decides_and_comes_first() -> None:
    verdict, findings = _judge({0: ended(0, "abandoned"), 1: ended(1, "killed")})
    assert (verdict, findings[0].checker) == (Verdict.CRASH, "no_crash")
    assert _named(findings, "facts") == Finding("facts", Verdict.UNKNOWN, "not every rank reported its facts")
    verdict, findings = _judge({0: ended(0, "hung", gradients(4, 5)), 1: raised(1, ValueError("no"), gradients(4))})
    assert [finding.checker for finding in findings[:2]] == ["no_hang", "no_exception"]
    assert verdict is Verdict.HANG


@pytest.mark.parametrize("checker", ["same_collectives", "same_until_refused"])
def test_collectives_that_meet_and_do_not_match_are_fail_whatever_came_of_it(checker: str) -> None:
    program = Program("p", lambda ctx: None, invariants=(checker,))
    for fate in ("killed", "hung"):
        for theirs, verdict in ((gradients(4, 5), None), (gradients(4, 6), Verdict.FAIL)):
            observations = {0: ended(0, fate, gradients(4, 5)), 1: ended(1, "abandoned", theirs)}
            came, findings = _judge(observations, program=program)
            of_fate = Verdict.CRASH if fate == "killed" else Verdict.HANG
            assert came is (verdict or of_fate)
            assert findings[0].verdict is of_fate  # told, and not the verdict
    crashed = Finding("no_crash", Verdict.HARNESS_ERROR)
    assert decisive([Finding(checker, Verdict.FAIL), crashed]) is Verdict.HARNESS_ERROR


def test_a_fact_speaks_for_the_requirement_that_its_program_says() -> None:
    tested = SCENARIO.requirements[0]
    speaks_for = {"warnings": ("GRAD-07",), "*/grad/*": ("GRAD-08", tested)}
    program = Program("speaks", lambda ctx: None, speaks_for=speaks_for)
    expected = {rank: {**facts, "warnings": [], "loss": 1} for rank, facts in EXPECTED.items()}
    right: dict[str, object] = {"warnings": [], "loss": 1}
    for more, gradient, broken in (
        ({"warnings": ["no"]}, MEAN, ("GRAD-07",)), ({}, -MEAN, (tested,)),
        ({"warnings": ["no"]}, -MEAN, (tested, "GRAD-07")), ({"warnings": ["no"], "loss": 2}, MEAN, ()),
    ):  # fmt: skip
        _, findings = _judge(_run(gradient, **{**right, **more}), program=program, expected=expected)
        assert (finding := _named(findings, "facts")) is not None
        assert finding.requirements == broken


def test_every_requirement_that_a_fact_speaks_for_exists() -> None:
    catalogue = load_catalogue()
    spoken_for = [each for program in load_programs().values() for each in program.speaks_for.values()]
    assert {requirement for each in spoken_for for requirement in each} - {each.id for each in catalogue} == set()
    assert spoken_for


def test_a_child_process_is_looked_for_in_every_program() -> None:
    left = {rank: dataclasses.replace(one, hygiene=("child process left behind: 7",)) for rank, one in _run().items()}
    verdict, findings = _judge(left)
    assert (verdict, findings[0].checker) == (Verdict.FAIL, "leaves_no_process")


def test_gradients_that_nobody_waited_for_are_looked_for_in_every_program() -> None:
    flying = {rank: dataclasses.replace(one, history=gradients(4, finished=False)) for rank, one in _run().items()}
    verdict, findings = _judge(flying)
    assert (verdict, findings[0].checker) == (Verdict.FAIL, "no_gradients_in_flight")


def test_wrong_facts_fail() -> None:
    verdict, findings = _judge(_run(MEAN * 2))
    assert (verdict, findings[0].checker) == (Verdict.FAIL, "facts")


def test_unsupported_is_a_verdict_if_all_ranks_say_so() -> None:
    says, silent = returned(0, unsupported="no sparse"), returned(1)
    verdict, findings = _judge({0: says, 1: returned(1, unsupported="no sparse")})
    assert (verdict, findings[0].summary) == (Verdict.UNSUPPORTED, "no sparse")
    assert _judge({0: says, 1: silent})[0] is Verdict.HARNESS_ERROR


def test_an_invariant_that_nobody_knows_is_our_fault() -> None:
    verdict, findings = _judge(_run(), program=Program("p", lambda ctx: None, invariants=("same_colectives",)))
    assert verdict is Verdict.HARNESS_ERROR
    assert "did you mean same_collectives" in findings[0].summary
    with pytest.raises(SpecificationError):
        get_checker("no such thing at all")


def test_torch_is_followed_where_it_passed() -> None:
    assert _judge(_run(step_hooks=3), _run(step_hooks=3), FOLLOWING)[0] is Verdict.PASS
    verdict, findings = _judge(_run(step_hooks=3), _run(step_hooks=4), FOLLOWING)
    assert verdict is Verdict.FAIL
    assert findings[0].summary == "unlike torch's own DDP: step/hooks on ranks 0 and 1 is 3, expected 4"
    assert _judge(_run(other=3), _run(other=4), FOLLOWING)[0] is Verdict.PASS  # not under a followed name
    assert _judge(_run(step_hooks=3), _run(step_hooks=4))[0] is Verdict.PASS  # a program that follows in nothing


def test_torch_is_no_authority_where_it_failed() -> None:
    verdict, findings = _judge(_run(step_hooks=3), _run(MEAN * 2, step_hooks=4), FOLLOWING)
    assert verdict is Verdict.PASS
    assert _named(findings, "agrees_with_native") is None


def test_torchs_errors_are_followed_in_type_and_not_in_wording() -> None:
    native = _run(construct=Raised.of(RuntimeError("torch's words")))
    assert _judge(_run(construct=Raised.of(NotImplementedError("ours"))), native, FOLLOWING)[0] is Verdict.PASS
    assert _judge(_run(construct=Raised.of(TypeError("ours"))), native, FOLLOWING)[0] is Verdict.FAIL
    assert _judge(_run(construct=None), native, FOLLOWING)[0] is Verdict.FAIL


def test_a_program_without_expectation_is_judged_by_its_invariants() -> None:
    observations = {0: returned(0, gradients(4)), 1: returned(1, gradients(5))}
    verdict, findings = _judge(observations, expected=None)
    assert (verdict, findings[0].checker) == (Verdict.FAIL, "same_collectives")
    assert _named(findings, "facts") is None
