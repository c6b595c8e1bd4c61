"""Combines what the checkers say about one run into one verdict."""

from collections.abc import Mapping

from conformance.checkers.checker import DEAD, Evidence, harness_error
from conformance.checkers.explanation import ranks
from conformance.checkers.protocol import ASKED_FOR_ORDER, ONE_ORDER
from conformance.checkers.registry import get_checker
from conformance.errors import SpecificationError
from conformance.observation import Facts, Observation
from conformance.programs.registry import Program
from conformance.scenario import Scenario
from conformance.verdict import Finding, Verdict, decisive

#: Run for every program, in the order in which a reader wants to hear of them.
_ALWAYS = (
    "exercised", "no_crash", "no_hang", "no_exception", "facts", "does_not_interfere", "leaves_no_process",
    "no_gradients_in_flight", "device_is_content",
)  # fmt: skip


def judge(
    scenario: Scenario,
    program: Program,
    observations: Mapping[int, Observation],
    expected: Mapping[int, Facts] | None,
    authority: Mapping[int, Facts] | None,
) -> tuple[Verdict, tuple[Finding, ...]]:
    """Return the verdict on one run, to which its findings lead (`decisive`), and all findings with the gravest first.

    `expected` are the facts required of each rank (None: the program requires none); `authority` those in which torch's
    own DDP is to be followed, see `authority_of`. A scenario in which a fault kills or stops a rank is CRASH or HANG
    like any other: a test that injects a fault expects that verdict. A rank of `expected_dead` that died is not judged.
    """
    gone = {rank for rank in scenario.expected_dead & observations.keys() if observations[rank].fate.kind in DEAD}
    observations = {rank: seen for rank, seen in observations.items() if rank not in gone}
    if expected is not None:
        expected = {rank: facts for rank, facts in expected.items() if rank not in gone}
    if finding := _unsupported(observations):
        return finding.verdict, (finding,)
    evidence = Evidence(
        scenario, observations, expected, authority, program.speaks_for, without_ddp=program.without_ddp
    )
    findings = []
    order_too = () if ASKED_FOR_ORDER & set(program.invariants) else (ONE_ORDER,)
    for name in (*_ALWAYS, *order_too, *program.invariants, "agrees_with_native"):
        try:
            check = get_checker(name)
        except SpecificationError as error:
            findings.append(harness_error(name, f"program {program.name}: {error}"))
            continue
        if (found := check(evidence)) is not None:
            findings.append(found)
    order = list(Verdict)
    findings.sort(key=lambda finding: -order.index(finding.verdict))
    return decisive(findings), tuple(findings)


def authority_of(
    program: Program, verdict: Verdict, observations: Mapping[int, Observation]
) -> Mapping[int, Facts] | None:
    """Return the facts in which torch's own DDP is to be followed, None unless it passed the scenario itself.

    `verdict` is that on torch's DDP, and `observations` are what its ranks did in the scenario.
    """
    if verdict is not Verdict.PASS or not program.native_facts:
        return None
    return {
        rank: {name: value for name, value in observation.facts.items() if name.startswith(program.native_facts)}
        for rank, observation in observations.items()
    }


def _unsupported(observations: Mapping[int, Observation]) -> Finding | None:
    """Return UNSUPPORTED if all ranks say that the scenario cannot apply here; ranks that disagree are our fault."""
    reasons = {rank: observation.unsupported for rank, observation in observations.items() if observation.unsupported}
    if not reasons:
        return None
    reason = next(iter(reasons.values()))
    if len(reasons) < len(observations):
        return harness_error("unsupported", f"only {ranks(reasons)} found the scenario unsupported: {reason}")
    return Finding("unsupported", Verdict.UNSUPPORTED, reason)
