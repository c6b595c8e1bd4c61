"""Checks that the subject agrees with torch's DDP in the facts for which a program requires it."""

from dataclasses import replace

from conformance.checkers.checker import Evidence, checker, failed, passed, unknown
from conformance.checkers.facts import explain_facts, mistake_of, reduced_steps, summarise, telling_first, wrong_facts
from conformance.observation import Raised
from conformance.truth.expected import Raises
from conformance.verdict import Finding


@checker("agrees_with_native")
def agrees_with_native(evidence: Evidence) -> Finding | None:
    """Every fact of torch's own DDP in the same scenario is the subject's, too.

    An exception's type must be torch's or derived from it; its message may differ. Does not apply where torch's DDP was
    not run or did not pass.
    """
    if evidence.native_facts is None or not any(evidence.native_facts.values()):
        return None
    if not evidence.all_returned:
        return unknown("agrees_with_native", "not every rank ran to its end")
    native = {
        rank: {name: Raises((value.type,)) if isinstance(value, Raised) else value for name, value in facts.items()}
        for rank, facts in evidence.native_facts.items()
    }
    observed = {rank: observation.facts for rank, observation in evidence.observations.items()}
    wrong = telling_first(wrong_facts(native, observed, reduced_steps(evidence)))
    if not wrong:
        return passed("agrees_with_native", f"{sum(map(len, native.values()))} fact(s) as torch's DDP has them")
    summary = f"unlike torch's own DDP: {summarise(wrong)}"
    found = failed("agrees_with_native", summary, explain_facts(wrong, native))
    return replace(found, mistake=mistake_of(wrong))
