"""Whether requirements detect mutants: runs the scenarios on mutants and their bases, and compares.

A requirement kills a mutant if some scenario of it fails for the mutant and passes for its base. A mutant is active if
its ranks observe something that the base's ranks do not; an inactive mutant does not test the requirement. A control is
made from the base as mutants are, without a bug. A scenario that fails for a control is a false alarm, no kill.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from pathlib import Path
from types import TracebackType

from conformance.backends.backend import OF_NEWER_TORCH, Backend
from conformance.mutants.catalogue import Kill, Mutant, Trial
from conformance.mutants.kept import keep
from conformance.observation import Facts, Observation
from conformance.programs.registry import preloads_of
from conformance.run.lanes import in_lanes
from conformance.run.needs import lacks_of
from conformance.run.scenario_runner import ScenarioRunner
from conformance.run.watched_ranks import WatchedRanks
from conformance.scenario import Scenario
from conformance.spec.cheapest import cheapest_first
from conformance.spec.quick import load_all_kills
from conformance.suite import load_scenarios
from conformance.verdict import Finding, ScenarioResult, Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

#: The verdicts that kill a mutant. A harness error does not: it is our own fault.
CAUGHT = frozenset({Verdict.FAIL, Verdict.HANG, Verdict.CRASH})
#: Over how many backends there are ranks at once; most mutants of a backend are one each.
_MOST_BACKENDS = 3
#: What every mutant must pass like its base, so that it is broken in one way only.
UNTOUCHED = ("CONS-17", "CONS-08")


class Fate(Enum):
    """What became of a mutant in the scenarios of one requirement."""

    KILLED = "killed"
    SURVIVED = "survived"
    INACTIVE = "not active"


@dataclass(frozen=True, slots=True)
class Detection:
    """The fate of a mutant, the scenario that killed it, and the CPU seconds that this takes the base's ranks."""

    mutant: Mutant
    kill: Kill
    fate: Fate
    scenario_id: str = ""
    cpu_s: float = 0.0

    @property
    def is_as_expected(self) -> bool:
        """Whether the mutant was killed, or survived as is known."""
        return (self.fate is Fate.KILLED) != self.kill.survived


def scenarios_of(where: str) -> tuple[Scenario, ...]:
    """Return the scenario of that id, or all of that requirement, the cheapest first."""
    scenarios = load_scenarios()
    if "/" in where:
        return tuple(scenario for scenario in scenarios if scenario.id == where)
    return cheapest_first(scenario for scenario in scenarios if where in scenario.requirements)


def of_newer_torch(mutants: Iterable[Mutant]) -> dict[str, frozenset[str]]:
    """Return by name what mutants need that not every supported torch has: all scenarios of one of their kills do."""
    needed: dict[str, frozenset[str]] = {}
    for scenario in load_scenarios():
        needs = frozenset(OF_NEWER_TORCH).intersection((*scenario.needs, *lacks_of(scenario)))
        for where in (*scenario.requirements, scenario.id):
            needed[where] = needed.get(where, needs) & needs
    found = {one.name: frozenset[str]().union(*(needed[kill.where] for kill in one.kills)) for one in mutants}
    return {name: needs for name, needs in found.items() if needs}


@dataclass(frozen=True, slots=True)
class Tried:
    """How one DDP fared in one scenario: the verdict, and what its ranks saw."""

    result: ScenarioResult
    observations: Mapping[int, Observation]
    expected: Mapping[int, Facts] | None

    @property
    def seen(self) -> tuple[object, ...]:
        """What ranks saw, to be compared with what those of another DDP did."""
        return tuple(map(_seen_by, self.observations.values()))

    @property
    def cpu_s(self) -> float:
        """The processor's time that ranks took, in seconds."""
        return sum(one.cpu_ns for one in self.observations.values()) / 1e9

    @property
    def passed(self) -> bool:
        """Whether the verdict is PASS."""
        return self.result.verdict is Verdict.PASS

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings for which it counts as caught; none where the harness itself failed."""
        if Verdict.HARNESS_ERROR is self.result.verdict:
            return ()
        return tuple(finding for finding in self.result.findings if finding.verdict in CAUGHT)


class Detector:
    """Ranks for mutants and for their bases. A context manager; a base runs each scenario once."""

    def __init__(self, zygote: ZygoteProcess, kept: Path | None = None) -> None:
        """Have `zygote` fork the ranks; it stays open. Kills go into the folder `kept`."""
        self._kept = kept
        self._zygote = zygote
        self._controllers: dict[str, Controller] = {}
        self._of_bases: dict[tuple[str, str], Tried] = {}

    def __enter__(self) -> Detector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for controller in self._controllers.values():
            controller.close()

    def detect(self, mutant: Mutant, kill: Kill) -> Detection:
        """Run scenarios of one requirement until one of them kills the mutant: first those that are known to."""
        active, known = False, load_all_kills().get(mutant.name, {})
        for scenario in sorted(scenarios_of(kill.where), key=lambda scenario: scenario.id not in known):
            tried = self.tried(mutant.trial, scenario)
            caught = any(kill.evidence in finding.summary + finding.explanation for finding in tried.findings)
            base = self.of_base(mutant, scenario) if caught or not active else None
            if caught and base is not None and base.passed:
                if self._kept is not None:
                    keep(self._kept, mutant.name, kill.requirement, scenario, tried.observations, tried.expected)
                return Detection(mutant, kill, Fate.KILLED, scenario.id, base.cpu_s)
            active = active or (base is not None and base.seen != tried.seen)
        return Detection(mutant, kill, Fate.SURVIVED if active else Fate.INACTIVE)

    def killers(self, mutant: Mutant, scenarios: Iterable[Scenario]) -> Iterator[str]:
        """Run all `scenarios` and yield the requirements that kill the mutant, each once."""
        known: set[str] = set()
        for scenario in scenarios:
            new = [requirement for requirement in scenario.requirements if requirement not in known]
            if new and self.detects(mutant, scenario):
                known.update(new)
                yield from new

    def detects(self, mutant: Mutant, scenario: Scenario) -> bool:
        """Whether `scenario` fails for the mutant and passes for its base."""
        return bool(self.tried(mutant.trial, scenario).findings) and self.of_base(mutant, scenario).passed

    def spoilt(self, mutant: Mutant) -> list[str]:
        """Return the scenarios about something else that the mutant does not pass although its base does."""
        broken = {kill.requirement for kill in mutant.kills}
        scenarios = [scenarios_of(where)[0] for where in UNTOUCHED if where not in broken]
        return [scenario.id for scenario in scenarios if self.detects(mutant, scenario)]

    def false_alarms(self, detections: Iterable[Detection]) -> Iterator[str]:
        """Run the scenarios that killed on the mutants' controls; yield those that do not pass, as the bases did."""
        for one in detections:
            (scenario,) = scenarios_of(one.scenario_id)
            control = one.mutant.control
            verdict = self.tried(control, scenario).result.verdict
            if verdict is not Verdict.PASS:
                name = f"{control.subject.name} on {control.backend.name}"
                yield f"{scenario.id} gives {name} the verdict {verdict.value}, and what it is made from PASS"

    def of_base(self, mutant: Mutant, scenario: Scenario) -> Tried:
        """Return how the mutant's base fares in `scenario`."""
        key = (f"{mutant.base.subject.name} on {mutant.backend}", scenario.id)
        if key not in self._of_bases:
            self._of_bases[key] = self.tried(mutant.base, scenario)
        return self._of_bases[key]

    def _controller_of(self, backend: Backend) -> Controller:
        """Return ranks over `backend`; those over the backend that was used longest ago end when they are too many."""
        controller = self._controllers.pop(backend.source, None) or Controller(backend, zygote=self._zygote)
        self._controllers[backend.source] = controller
        if len(self._controllers) > _MOST_BACKENDS:
            self._controllers.pop(next(iter(self._controllers))).close()
        return controller

    def tried(self, trial: Trial, scenario: Scenario) -> Tried:
        """Run `scenario` on one DDP and backend."""
        backend = trial.backend
        ranks = WatchedRanks(self._controller_of(backend), trial.subject)
        outcome = ScenarioRunner(trial.subject, backend, ranks, native=False).run(scenario)
        return Tried(outcome.subject, ranks.observations, ranks.expected)


def _seen_by(rank: Observation) -> object:
    facts = hashlib.sha256(pickle.dumps(rank.facts)).hexdigest()
    return facts, rank.fate, str(rank.raised), tuple(collective.describe() for collective in rank.history)


@dataclass(frozen=True, slots=True)
class Found:
    """What a run over mutants found: the fates expected in advance, torch's own, and who else killed, by mutant.

    With `false_alarms` it shows nothing.
    """

    detections: tuple[Detection, ...]
    deviations: tuple[Detection, ...] = ()
    killers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    false_alarms: tuple[str, ...] = ()

    @property
    def mutants(self) -> tuple[Mutant, ...]:
        """Return every mutant once."""
        return tuple(dict.fromkeys(one.mutant for one in self.detections))

    def fate_of(self, mutant: Mutant) -> Fate:
        """Return KILLED if some requirement killed it, otherwise SURVIVED if it was active in any."""
        fates = {one.fate for one in self.detections if one.mutant == mutant}
        return next(fate for fate in Fate if fate in fates)

    def requirements(self, mutant: Mutant, fate: Fate) -> list[str]:
        """Return the requirements in which the mutant had that fate."""
        return [one.kill.requirement for one in self.detections if one.mutant == mutant and one.fate is fate]

    def num(self, fate: Fate) -> int:
        """Return how many mutants have that fate."""
        return sum(self.fate_of(mutant) is fate for mutant in self.mutants)

    @property
    def kills(self) -> dict[str, dict[str, float]]:
        """By the mutant's name, then by the scenario that killed it: the CPU seconds of the base's ranks."""
        return {
            mutant.name: {
                one.scenario_id: one.cpu_s for one in self.detections if one.mutant == mutant and one.scenario_id
            }
            for mutant in self.mutants
        }

    @property
    def headline(self) -> str:
        """One sentence with the figures."""
        expected = [one for one in self.detections if not one.kill.survived]
        seen = sum(one.fate is Fate.KILLED for one in expected)
        return (
            f"{self.num(Fate.KILLED)} of {len(self.mutants)} mutants killed, {self.num(Fate.SURVIVED)} survived, "
            f"{self.num(Fate.INACTIVE)} not active; {seen} of {len(expected)} expected kills seen"
        )


def detect_all(
    mutants: Iterable[Mutant],
    on_detection: Callable[[int, int, Detection], None] = lambda done, total, detection: None,
    *,
    deviations: Mutant | None = None,
    further: Sequence[Scenario] = (),
    work_dir: Path | None = None,
    jobs: int = 1,
    kept: Path | None = None,
) -> Found:
    """Run every expected kill, torch's `deviations` too if given, the controls, and the `further` scenarios.

    `on_detection` gets how many of how many are done, and the last one. `jobs` lanes share first the mutants, then the
    controls. Kills are kept in the folder `kept`, if one is given.
    """
    mutants = tuple(mutants)
    judged = [*mutants, *([deviations] if deviations is not None else [])]
    todo = [(mutant, kill) for mutant in judged for kill in mutant.kills]
    needed = {one.id: one for _, kill in todo for one in scenarios_of(kill.where)}
    preload = preloads_of([*needed.values(), *further])

    def detect(numbers: Iterator[int], take: Callable[[tuple[int, Detection]], None]) -> None:
        with shared.local() as own, Detector(own, kept) as detector:
            for number in numbers:
                take((number, detector.detect(*todo[number])))

    def kill_more(some: Iterator[Mutant], take: Callable[[tuple[str, tuple[str, ...]]], None]) -> None:
        with shared.local() as own, Detector(own) as detector:
            for mutant in some:
                take((mutant.name, tuple(detector.killers(mutant, further))))

    def try_controls(some: Iterator[Detection], take: Callable[[str], None]) -> None:
        with shared.local() as own, Detector(own) as detector:
            for alarm in detector.false_alarms(some):
                take(alarm)

    found: dict[int, Detection] = {}
    killers: dict[str, tuple[str, ...]] = {}
    false_alarms: list[str] = []

    def note(detected: tuple[int, Detection]) -> None:
        number, detection = detected
        found[number] = detection
        on_detection(len(found), len(todo), detection)

    of_one = groupby(range(len(todo)), lambda number: todo[number][0].name)
    with closing(ZygoteProcess(work_dir, preload)) as shared:
        shared.await_ready()
        in_lanes(detect, [tuple(numbers) for _, numbers in of_one], jobs, note)
        if further:
            in_lanes(kill_more, [(mutant,) for mutant in mutants], jobs, lambda each: killers.update([each]))
        detections = [found[number] for number in sorted(found)]
        of_mutants = tuple(one for one in detections if one.mutant != deviations)
        killing = {(one.mutant.control, one.scenario_id): one for one in of_mutants if one.scenario_id}
        in_lanes(try_controls, [(one,) for one in killing.values()], jobs, false_alarms.append)
    of_torch = tuple(one for one in detections if one.mutant == deviations)
    return Found(of_mutants, of_torch, killers, tuple(false_alarms))
