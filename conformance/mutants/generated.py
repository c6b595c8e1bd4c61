"""Mutants of a DDP that a machine makes, judged on ranks, as `definition.py` judges mutants of the definition.

One zygote forks all ranks; the ranks of a mutant make its mistake before they load the DDP. Mistakes are made in lines
that scenarios of profile quick, or one of each requirement, execute: what that is, a run with a trace shows once. A
mutant meets those that execute its line, then further ones of their requirements.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from types import ModuleType

from conformance.backends.gloo import GLOO
from conformance.mutants.definition import Verdict, append, equivalents, read
from conformance.mutants.detector import CAUGHT
from conformance.mutants.made import take_lines, traced, with_mistake
from conformance.mutants.mistakes import Mistake
from conformance.mutants.truth_trace import Trace
from conformance.observation import Facts, Observation
from conformance.report.causes import cause_of
from conformance.run.lanes import in_lanes
from conformance.run.needs import why_unsupported
from conformance.run.outcome import Outcome
from conformance.run.patience import HANGS_IN_A_ROW, hurried
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.cheapest import cheapest_first
from conformance.subjects.subject import Subject
from conformance.verdict import ScenarioResult
from conformance.verdict import Verdict as Result
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

#: A mutant that ranks have not killed in so many CPU seconds survives; one called equivalent gets less.
_MOST_CPU_S, _MOST_CPU_OF_EQUIVALENT_S = 12.0, 2.0
#: So long is looked for further scenarios that execute a mutant's line.
_MOST_TRACING_S = 8.0
#: What the shortest trace counts as.
_LEAST_CPU_S = 0.001
#: So many scenarios that have killed mutants of the same module come first.
_MOST_KILLERS = 6
#: No mistake is made in tests, nor in what runs before ranks do.
_LEFT_OUT = ("tests", "startup", "__main__")
_MADE = with_mistake.__module__
_TRACES = "traces.jsonl"


def modules_of(subject: Subject) -> list[ModuleType]:
    """Return the modules in whose code mistakes are made: that of the subject's class, or all of its package."""
    module = importlib.import_module(subject.target.partition(":")[0])
    inner = pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}.")
    names = [one.name for one in inner if not set(_LEFT_OUT) & set(one.name.split("."))]
    return [module, *map(importlib.import_module, names)]


class Campaign:
    """Ranks for a DDP and for its mutants, and what its scenarios execute. A context manager."""

    def __init__(
        self, subject: Subject, folder: Path, scenarios: Sequence[Scenario], further: Sequence[Scenario]
    ) -> None:
        """Begin with the `scenarios`, to be traced, and `further` ones of their requirements; `folder` keeps lines."""
        self.modules = modules_of(subject)
        self._names = tuple(module.__name__ for module in self.modules)
        self._subject, self._folder = subject, folder
        self._zygote = ZygoteProcess(None, (_MADE, *self._names))
        self._zygote.await_ready()
        self._ranks = _KnowingRanks(Controller(GLOO, zygote=self._zygote))
        runs = [one for one in (*scenarios, *further) if not why_unsupported(one, subject, GLOO)]
        self._scenarios = {one.id: one for one in runs}
        self._first = [one.id for one in scenarios if one.id in self._scenarios]
        self._traces = {one.id: one for one in read(folder / _TRACES, Trace)}
        self._spent_s = 0.0
        self._kills: Counter[tuple[str, str]] = Counter()
        self._passes: dict[str, bool] = {}
        self._equivalents = equivalents(subject.target, self.modules)
        self._statements = load_catalogue().statements

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *raised: object) -> None:
        self._ranks.close()
        self._zygote.close()

    def trace(self, say: Callable[[str], None]) -> None:
        """Trace the lines that each of the first scenarios executes, of which the folder has no trace."""
        for number, id_ in enumerate(self._first, 1):
            if not self._trace_of(id_).lines:
                say(f"not run, for {self._subject.name} itself does not pass it, or executes nothing: {id_}")
            if number % 50 == 0:
                say(f"{number:>5}/{len(self._first)}  scenarios traced")

    def is_executed(self, mistake: Mistake) -> bool:
        """Whether one of the first scenarios executes the line."""
        lines = self._executed.get(mistake.module, frozenset())
        return not lines.isdisjoint(range(mistake.lines[0], mistake.lines[1] + 1))

    @cached_property
    def _executed(self) -> dict[str, frozenset[int]]:
        traces = [self._trace_of(id_).lines for id_ in self._first]
        return {name: frozenset[int]().union(*(lines.get(name, ()) for lines in traces)) for name in self._names}

    def _trace_of(self, id_: str) -> Trace:
        """Return the lines that a scenario executes; none if it does not pass."""
        if id_ not in self._traces:
            file = self._folder / f"lines{os.getpid()}"
            begun_s = self._spent_s
            result = self._run(traced(self._subject, file, self._names), self._scenarios[id_])
            lines = take_lines(file)
            known = Trace(id_, {}, lines if result.verdict is Result.PASS else {}, self._spent_s - begun_s)
            self._traces[id_] = append(self._folder / _TRACES, known)
        return self._traces[id_]

    def judge_all(self, mistakes: Sequence[Mistake], jobs: int, take: Callable[[Verdict], None]) -> None:
        """Have `take` called with what becomes of each mistake; the folder keeps it, and what it has is known."""
        file = self._folder / "verdicts.jsonl"
        known = {one.mistake: one for one in read(file, Verdict)}
        for mistake in filter(known.__contains__, mistakes):
            take(known[mistake])
            self._kills[mistake.module, known[mistake].killed_by] += 1

        def judge_some(some: Iterator[Mistake], hand_over: Callable[[Verdict], None]) -> None:
            with self._zygote.local() as own, closing(_KnowingRanks(Controller(GLOO, zygote=own))) as self._ranks:
                for mistake in some:
                    hand_over(self.judge(mistake))

        waiting = [(mistake,) for mistake in mistakes if mistake not in known]
        in_lanes(judge_some, waiting, jobs, lambda one: take(append(file, one)))

    def judge(self, mistake: Mistake) -> Verdict:
        """Ask of a mutant what reaches it, until a scenario kills it or the time is over."""
        reaching = [self._traces[id_] for id_ in self._first if self._reaches(mistake, id_)]
        equivalent = self._equivalents.get((mistake.function, mistake.before, mistake.after), "")
        most_s = _MOST_CPU_OF_EQUIVALENT_S if equivalent else _MOST_CPU_S
        mutant, cpu_s, num_run = with_mistake(self._subject, mistake), 0.0, 0
        for id_ in self._in_turn(mistake, reaching):
            begun_s, num_run = self._spent_s, num_run + 1
            result = self._run(mutant, hurried(self._scenarios[id_], HANGS_IN_A_ROW))
            cpu_s += self._spent_s - begun_s
            num_reaching = max(len(reaching), num_run)
            if result.verdict in CAUGHT and self._is_passed(id_):
                self._kills[mistake.module, id_] += 1
                cause = cause_of(Outcome.of(self._scenarios[id_], result), self._statements)
                facts = [cause.sentence, result.summary]
                return Verdict(mistake, id_, facts, num_run, num_reaching, cpu_s, equivalent)
            if cpu_s > most_s:
                break
        return Verdict(mistake, "", [], num_run, max(len(reaching), num_run), cpu_s, equivalent)

    def _reaches(self, mistake: Mistake, id_: str) -> bool:
        return self._trace_of(id_).reaches(mistake.module, mistake.lines)

    def _in_turn(self, mistake: Mistake, reaching: Sequence[Trace]) -> Iterator[str]:
        """Yield scenarios that reach the line: killers, what executes other lines than those, others that ask alike."""
        kills = {one.id: self._kills[mistake.module, one.id] for one in reaching}
        killers = sorted(filter(kills.__getitem__, kills), key=lambda id_: -kills[id_])[:_MOST_KILLERS]
        yield from killers
        yield from _unlike_first([one for one in reaching if one.id not in killers])
        requirements = {name for one in reaching for name in self._scenarios[one.id].requirements}
        others = [one for one in self._scenarios.values() if one.id not in self._first]
        asking = cheapest_first(each for each in others if requirements & set(each.requirements))
        searched_s = 0.0
        for id_ in _in_turns([one.id for one in asking], lambda id_: self._scenarios[id_].requirements[0]):
            begun_s = self._spent_s
            if self._reaches(mistake, id_):
                yield id_
            searched_s += self._spent_s - begun_s
            if searched_s > _MOST_TRACING_S:
                return

    def _is_passed(self, id_: str) -> bool:
        if id_ not in self._passes:
            self._passes[id_] = self._run(self._subject, self._scenarios[id_]).verdict is Result.PASS
        return self._passes[id_]

    def _run(self, subject: Subject, scenario: Scenario) -> ScenarioResult:
        """Return what becomes of a scenario, and add the CPU seconds of ranks and of this process to those spent."""
        runner = ScenarioRunner(subject, GLOO, self._ranks, native=False, first=frozenset())
        self._ranks.cpu_s, begun = 0.0, time.process_time()
        result = runner.run(scenario).subject
        self._spent_s += self._ranks.cpu_s + time.process_time() - begun
        return result


def _unlike_first(traces: Sequence[Trace]) -> Iterator[str]:
    """Yield the id of what executes most lines in its time that none before it does; when there are none, begin anew.

    Scenarios that do so use other features, or use them otherwise: of two that are alike one is enough for a while.
    """
    cpu_s = {one.id: one.cpu_s or _LEAST_CPU_S for one in traces}
    lines = {one.id: {(name, line) for name in one.lines for line in one.lines[name]} for one in traces}
    new: dict[str, set[tuple[str, int]]] = {}
    while lines:
        if not any(new.values()):
            new = {id_: set(its) for id_, its in lines.items()}
        id_ = max(new, key=lambda id_: len(new[id_]) / cpu_s[id_])
        yield id_
        executed = lines.pop(id_)
        del new[id_]
        for its in new.values():
            its -= executed


def _in_turns(ids: Sequence[str], kind: Callable[[str], str]) -> list[str]:
    """Return the ids, the first of each kind first, then the second ones."""
    num_of: Counter[str] = Counter()
    turns: list[tuple[int, str]] = []
    for id_ in ids:
        turns.append((num_of[kind(id_)], id_))
        num_of[kind(id_)] += 1
    return [id_ for _, id_ in sorted(turns)]


class _KnowingRanks:
    """Ranks that compute what each scenario must show once, and count the CPU seconds that they take."""

    def __init__(self, controller: Controller) -> None:
        self.cpu_s = 0.0
        self._controller = controller
        self._expected: dict[str, Mapping[int, Facts]] = {}
        self.retire, self.close = controller.retire, controller.close

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        observations = await self._controller.observe(scenario, subject, fresh)
        self.cpu_s += sum(one.cpu_ns for one in observations.values()) / 1e9
        return observations

    async def expect(self, scenario: Scenario) -> Mapping[int, Facts]:
        if scenario.id not in self._expected:
            self._expected[scenario.id] = await self._controller.expect(scenario)
        return self._expected[scenario.id]
