"""Checks that ranks refuse together: an error of one rank is an error of all ranks, in the same step."""

from conformance.checkers.checker import Evidence, checker, failed, passed, unknown
from conformance.checkers.explanation import ranks
from conformance.observation import Raised
from conformance.verdict import Finding


@checker("refuses_together")
def refuses_together(evidence: Evidence) -> Finding | None:
    """Demand that a fact that is an exception on one rank is an exception on every rank.

    Precondition: every rank ran to its end. Does not apply where no rank observed an exception.
    """
    if not evidence.all_returned:
        return unknown("refuses_together", "not every rank ran to its end")
    refused = {
        observation.rank: [name for name, value in observation.facts.items() if isinstance(value, Raised)]
        for observation in evidence.by_rank
    }
    names = dict.fromkeys(name for of_rank in refused.values() for name in of_rank)
    if not names:
        return None
    for name in names:
        alone = [rank for rank, of_rank in refused.items() if name in of_rank]
        if len(alone) < len(refused):
            error = evidence.observations[alone[0]].facts[name]
            others = ranks(rank for rank in refused if rank not in alone)
            return failed("refuses_together", f"only {ranks(alone)} refused {name}, and {others} did not: {error}")
    return passed("refuses_together", f"every rank refused {', '.join(names)}")
