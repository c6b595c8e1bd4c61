"""Which requirement a failure is to be put down to, and how grave it is.

A DDP that leaves a thread behind breaks every scenario that looks for such traces; what they are about is not to blame,
as their findings say.
"""

from conformance.run.outcome import Outcome
from conformance.verdict import Verdict


def blamed(outcome: Outcome) -> str:
    """Return the requirement to which a failure is to be put down first: that of the id, unless it is not broken."""
    return outcome.broken[0]


def gravity(outcome: Outcome) -> int:
    """Return how grave a failure is; a larger number is graver."""
    return list(Verdict).index(outcome.failed_result.verdict)
