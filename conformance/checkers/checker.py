"""A checker: a pure function from the evidence of one run to a finding, registered by name.

If a checker's precondition fails, it returns UNKNOWN, never PASS or FAIL; if it does not apply to the run, None.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from conformance.errors import certain
from conformance.observation import Facts, Observation
from conformance.scenario import Scenario
from conformance.truth.expected import Right
from conformance.verdict import Finding, Verdict

#: Fates of ranks whose process ended before it could report.
DEAD = ("killed", "exited")
#: Fates of ranks that sent a complete report.
REPORTED = ("returned", "raised")


@dataclass(frozen=True)
class Evidence:
    """Everything that the harness knows about one run of one scenario.

    `expected` holds the facts required of each rank, None where the program requires none. `native_facts` are the facts
    of each rank under torch's own DDP that the subject must equal, if torch's DDP passed. For `speaks_for` and
    `without_ddp` see `Program`.
    """

    scenario: Scenario
    observations: Mapping[int, Observation]
    expected: Mapping[int, Facts] | None = None
    native_facts: Mapping[int, Facts] | None = None
    speaks_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_ddp: bool = False

    @property
    def by_rank(self) -> list[Observation]:
        """The observations, by ascending rank."""
        return [self.observations[rank] for rank in sorted(self.observations)]

    def ended(self, *kinds: str) -> list[Observation]:
        """Return the observations of ranks whose fate is one of `kinds`."""
        return [observation for observation in self.by_rank if observation.fate.kind in kinds]

    def spoken_for(self, facts: Iterable[str]) -> tuple[str, ...]:
        """Return the requirements that `facts` speak for; none if a fact speaks for all of the scenario."""
        found: dict[str, None] = {}
        for name in facts:
            patterns = [pattern for pattern in self.speaks_for if fnmatchcase(name, pattern)]
            if not patterns:
                return ()
            spoken_for = self.speaks_for[patterns[0]]
            found[next((one for one in spoken_for if one in self.scenario.requirements), spoken_for[0])] = None
        return tuple(found)

    def about(self, observations: Iterable[Observation]) -> tuple[str, ...]:
        """Return the requirements that the phases in which these ranks ended speak for, as `spoken_for` for facts.

        A rank that judges itself is in a phase with the name of the fact, or with a comma and more after it. The
        earliest phase counts: all ranks enter them in one order, and a rank that is ahead waits for the others.
        """
        places: list[tuple[int, str]] = []
        for one in observations:
            expected = (self.expected or {}).get(one.rank, {})
            names = [name for name, demand in expected.items() if isinstance(demand, Right)]
            found = [each for each in enumerate(names) if f"{one.phase}, ".startswith(f"{each[1]}, ")]
            if not found:
                return ()
            places.append(max(found, key=lambda each: len(each[1])))
        return self.spoken_for([min(places)[1]]) if places else ()

    @property
    def all_returned(self) -> bool:
        """Whether every rank ran the program to its end."""
        return len(self.ended("returned")) == len(self.observations)


Checker = Callable[[Evidence], Finding | None]

#: Every checker; `registry` imports all their modules.
CHECKERS: dict[str, Checker] = {}


def checker(name: str) -> Callable[[Checker], Checker]:
    """Register the decorated function as checker `name`."""

    def register(check: Checker) -> Checker:
        certain(name not in CHECKERS, f"two checkers are called {name}")
        CHECKERS[name] = check
        return check

    return register


def passed(name: str, summary: str = "") -> Finding:
    """Return a PASS."""
    return Finding(name, Verdict.PASS, summary)


def failed(name: str, summary: str, explanation: str = "", requirements: tuple[str, ...] = ()) -> Finding:
    """Return a FAIL of `requirements`, or of all that the scenario tests."""
    return Finding(name, Verdict.FAIL, summary, explanation, requirements)


def unknown(name: str, why: str) -> Finding:
    """Return UNKNOWN: the checker's precondition failed."""
    return Finding(name, Verdict.UNKNOWN, why)


def harness_error(name: str, summary: str, explanation: str = "") -> Finding:
    """Return a HARNESS_ERROR."""
    return Finding(name, Verdict.HARNESS_ERROR, summary, explanation)
