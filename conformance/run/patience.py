"""How long a run waits for a DDP that hangs again and again. Values and pure functions; nothing here imports torch."""

from collections.abc import Iterable

from conformance.run.outcome import Outcome
from conformance.scenario import DEFAULT_DEADLINE_S, Scenario
from conformance.verdict import Verdict
from conformance.waiting.limits import SHORT_DEADLINE_S

#: After so many hangs in a row a scenario gets `SHORT_DEADLINE_S` without progress, until one does not hang.
HANGS_IN_A_ROW = 3
#: The message when that happens.
HURRIES = (
    f"{HANGS_IN_A_ROW} scenarios in a row hung; the next ones get {SHORT_DEADLINE_S:g} s without progress, until one"
    " does not hang. --fail-fast ends a run at the first failure."
)

#: A scenario that was known to hang gets this part of its deadline: more than programs take to find out that a Work is
#: never done, or that a timeout does not come.
_PART_IF_KNOWN = 0.5

#: When so many scenarios have run and every one hung, a run of everything ends: nobody reads HANG 700 times.
MOST_HANGS = 12


def hurried(scenario: Scenario, num_hangs: int) -> Scenario:
    """Return `scenario` with the deadline that it gets after `num_hangs` hangs in a row.

    A scenario with another deadline than most has it for a reason, such as compiling, and keeps it.
    """
    if num_hangs < HANGS_IN_A_ROW or scenario.deadline_s != DEFAULT_DEADLINE_S:
        return scenario
    return scenario.replace(deadline_s=SHORT_DEADLINE_S)


def shortened(scenario: Scenario) -> Scenario:
    """Return `scenario`, which is known to hang, with the deadline that it gets; if it hangs no more, that is seen.

    Ranks that hang may keep processors busy, as gloo does that asks again and again for a socket's events, and where
    others want the processors they have up to ten deadlines.
    """
    return scenario.replace(deadline_s=scenario.deadline_s * _PART_IF_KNOWN)


def hangs_after(outcome: Outcome, num_hangs: int) -> int:
    """Return how many scenarios in a row the subject hung in, now that `outcome` is known."""
    if outcome.subject.verdict in (Verdict.UNSUPPORTED, Verdict.HARNESS_ERROR):  # a starved rank shows nothing
        return num_hangs
    return num_hangs + 1 if outcome.subject.hung else 0


def nothing_but_hangs(outcomes: Iterable[Outcome]) -> int:
    """Return how many scenarios hung if every one that could run did so, and was not known to; else 0."""
    num_hung = 0
    for one in outcomes:
        if one.subject.verdict is not Verdict.UNSUPPORTED:
            if not (one.subject.hung and one.is_failure):
                return 0
            num_hung += 1
    return num_hung
