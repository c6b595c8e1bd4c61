"""Which scenarios are the first of their requirements: a process in which nobody has wrapped a model runs them.

Whoever trains wraps a model once in a process, so that a DDP whose first wrapper is wrong is wrong for everybody.
"""

from collections.abc import Iterable

from conformance.backends.backend import Backend
from conformance.programs.registry import Program, get_program
from conformance.run.needs import why_unsupported
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject


class FirstUses:
    """What has been exercised so far on ranks that had run nothing yet."""

    def __init__(self) -> None:
        self._exercised: set[str] = set()

    def is_one(self, scenario: Scenario, program: Program) -> bool:
        """Tell whether a requirement of `scenario` has not been exercised so far; from now on they all have.

        Where ranks compile, warming up takes longer than the scenario: there it is the first of each program.
        """
        if program.without_ddp:  # nothing is constructed in a process that could be wrong the first time
            return False
        new = {program.name} if program.preload else set(scenario.requirements)
        is_first = not new <= self._exercised
        self._exercised |= new
        return is_first


def first_uses(scenarios: Iterable[Scenario], subject: Subject, backend: Backend) -> frozenset[str]:
    """Return the ids of the first scenarios, among the ones that `subject` and `backend` can run, in this order.

    Whoever runs them in several processes asks once for all of these.
    """
    uses = FirstUses()
    can_run = (one for one in scenarios if not why_unsupported(one, subject, backend))
    return frozenset(one.id for one in can_run if uses.is_one(one, get_program(one.program)))
