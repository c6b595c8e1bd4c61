"""Checks that a run exercised something: a scenario that tests nothing must not be green."""

from conformance.checkers.checker import DEAD, REPORTED, Evidence, checker, failed, harness_error, passed, unknown
from conformance.checkers.explanation import ranks
from conformance.checkers.facts import wrong_facts
from conformance.checkers.unconnected import unconnected
from conformance.observation import Observation
from conformance.scenario import Fault
from conformance.verdict import Finding

#: Kinds of faults -> the fates that show that one fired, where the rank did not live to report it.
_TRACES = {
    "kill": DEAD,
    "exit": DEAD,
    "segfault": DEAD,
    "stop": ("hung",),
    "loop": ("hung",),
    "raise": ("raised",),
    "slow": (),  # such a rank lives to report it
}


@checker("exercised")
def exercised(evidence: Evidence) -> Finding:
    """Every rank reported, facts were observed, faults fired, and the declared number of collectives was issued.

    Collectives are counted only where they were recorded and the rank ran the program to its end. With too few of them,
    right facts show a fault of the scenario, wrong facts one of the subject. A single rank need not communicate.
    """
    scenario = evidence.scenario
    if why := unconnected(evidence.observations):
        return unknown("exercised", f"the scenario never began: {why}")
    if missing := set(range(scenario.world_size)) - set(evidence.observations) - scenario.expected_dead:
        return harness_error("exercised", f"no observation of {ranks(missing)}; world size {scenario.world_size}")
    if alive := scenario.expected_dead & {one.rank for one in evidence.ended(*REPORTED)}:
        return harness_error("exercised", f"{ranks(alive)} had to die, and did not")
    silent = [observation.rank for observation in evidence.by_rank if _fired_in_vain(scenario.faults, observation)]
    if silent:
        return harness_error("exercised", f"a fault on {ranks(silent)} did not fire")
    if wanted := _missing_fate(evidence):
        return harness_error("exercised", f"the scenario expects a {wanted}, but none occurred")
    if evidence.all_returned and not any(observation.facts for observation in evidence.by_rank):
        return harness_error("exercised", "no rank observed any fact")
    if not scenario.recorded:
        return passed("exercised", "not recorded")
    least = scenario.min_collectives if scenario.world_size > 1 else 0
    idle = {
        observation.rank: len(observation.history)
        for observation in evidence.ended("returned")
        if len(observation.history) < least
    }
    if idle:
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in idle.items())
        summary = f"fewer collectives than the {least} that the scenario declares ({counts})"
        observed = {rank: observation.facts for rank, observation in evidence.observations.items()}
        is_wrong = evidence.expected is not None and wrong_facts(evidence.expected, observed)
        return failed("exercised", summary) if is_wrong else harness_error("exercised", summary)
    return passed("exercised", f"{sum(len(observation.history) for observation in evidence.by_rank)} collective(s)")


def _fired_in_vain(faults: tuple[Fault, ...], observation: Observation) -> bool:
    """Whether fewer faults fired on a rank than were armed; the fate of a dead rank shows that one fired."""
    armed = [fault for fault in faults if fault.rank == observation.rank]
    traced = any(observation.fate.kind in _TRACES[fault.kind] for fault in armed)
    fired = max(observation.faults_fired, 1 if traced else 0)
    # A rank may have died or been abandoned before the next fault was due.
    needed = len(armed) if observation.fate.kind in REPORTED else min(len(armed), 1)
    return observation.fate.kind != "abandoned" and fired < needed


def _missing_fate(evidence: Evidence) -> str:
    """Return the fate that argument `expect_fate` demands, `crash` or `hang`, if no rank met it."""
    wanted = str(evidence.scenario.arguments.get("expect_fate", ""))
    met = {"": True, "crash": bool(evidence.ended(*DEAD)), "hang": bool(evidence.ended("hung"))}
    return "" if met.get(wanted, False) else wanted
