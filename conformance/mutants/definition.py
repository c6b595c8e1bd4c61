"""Mutants of the definition that a machine makes: which scenarios depend on each line of the definition.

A mutant is killed where a scenario's truth, or a fact that its program states, is no longer what it was. No ranks run:
each mutant is made in a fork of this process, which has warmed up, and meets the scenarios that execute its line.
"""

import itertools
import random
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from conformance.errors import ReportError
from conformance.mutants.mistakes import Mistake, mistakes_in
from conformance.mutants.truth_trace import DEFINITION, Trace, facts_of, in_fork, trace_all
from conformance.scenario import Scenario
from conformance.spec.cheapest import one_per_requirement

_EQUIVALENT = Path(__file__).with_name("equivalent.toml")
#: A mutant that so many CPU seconds of scenarios have not killed is a survivor; one called equivalent gets less.
_MOST_CPU_S, _MOST_CPU_OF_EQUIVALENT_S = 20.0, 1.0
_NUM_WARMING = 20


class Verdict(msgspec.Struct, frozen=True):
    """The fate of a mistake: the scenario that killed it, by which facts, or why none can; else it survives."""

    mistake: Mistake
    killed_by: str
    by_facts: list[str]
    num_run: int
    num_reaching: int
    cpu_s: float
    equivalent: str = ""

    @property
    def is_open(self) -> bool:
        """Whether nobody has killed or explained it, or somebody has done both."""
        return bool(self.killed_by) is bool(self.equivalent)

    def __str__(self) -> str:
        """Return what became of it, and what it is."""
        fate = f"survives {self.num_run} scenarios; {self.num_reaching} are known to reach it"
        if self.killed_by:
            called = "called equivalent, and " if self.equivalent else ""
            fate = f"{called}killed by {self.killed_by} ({', '.join(self.by_facts)})"
        return f"{self.mistake}: {self.equivalent if self.equivalent and not self.killed_by else fate}"


def equivalents(
    of: str = "definition", modules: Sequence[ModuleType] = DEFINITION, file: Path = _EQUIVALENT
) -> dict[tuple[str, str, str], str]:
    """Return why mistakes in `modules` change nothing, by function and change.

    Raises `ReportError` where one that is listed for `of`, a DDP's target or the definition, cannot be made.
    """
    listed = [
        one
        for one in tomllib.loads(file.read_text(encoding="utf-8"))["equivalent"]
        if one.get("of", "definition") == of
    ]
    why = {(one["function"], one["before"], after): one["why"] for one in listed for after in one["after"]}
    every = {(one.function, one.before, one.after) for module in modules for one in mistakes_in(module)}
    if unknown := why.keys() - every:
        raise ReportError(f"{file.name} explains what cannot be made: {sorted(unknown)}")
    return why


class Judge:
    """Asks scenarios of mutants: those that killed most before, then one of each requirement, the cheapest first."""

    def __init__(self, traces: Sequence[Trace], scenarios: Mapping[str, Scenario]) -> None:
        self._traces, self._scenarios, self._equivalents = traces, scenarios, equivalents()
        self._kills: Counter[str] = Counter()
        self._is_firm: dict[str, bool] = {}

    def judge(self, mistake: Mistake) -> Verdict:
        """Ask of a mutant all that reaches it, until one kills it or the time is over."""
        reaching = [one for one in self._traces if one.reaches(mistake.module, mistake.lines)]
        reaching.sort(key=lambda one: -self._kills[one.id])
        equivalent = self._equivalents.get((mistake.function, mistake.before, mistake.after), "")
        most_s = _MOST_CPU_OF_EQUIVALENT_S if equivalent else _MOST_CPU_S

        def work() -> Iterator[tuple[float, list[str]]]:
            mistake.make()
            for one in reaching:
                yield time.process_time(), one.differing(facts_of(self._scenarios[one.id]))
                if time.process_time() > most_s:
                    return

        num_run, cpu_s = 0, 0.0
        for one, answer in zip(reaching, in_fork(work), strict=False):
            num_run += 1
            cpu_s, facts = answer or (cpu_s, ["its fork hangs or dies"])
            if facts and self._is_repeatable(one):
                self._kills[one.id] += 1
                return Verdict(mistake, one.id, facts[:3], num_run, len(reaching), cpu_s, equivalent)
        return Verdict(mistake, "", [], num_run, len(reaching), cpu_s, equivalent)

    def _is_repeatable(self, one: Trace) -> bool:
        """Whether a scenario has the same truth once more, without a mistake, in another fork."""
        if one.id not in self._is_firm:
            again = next(in_fork(lambda: iter([facts_of(self._scenarios[one.id])])))
            self._is_firm[one.id] = again is not None and not one.differing(again)
        return self._is_firm[one.id]


def headline(of: str, verdicts: Sequence[Verdict]) -> str:
    """One sentence with the figures of mutants of something."""
    cpu_s = sorted(one.cpu_s for one in verdicts if one.killed_by)
    equivalent = sum(bool(one.equivalent and not one.killed_by) for one in verdicts)
    return (
        f"{len(verdicts)} mutants of {of}, {len(cpu_s)} killed, {equivalent} equivalent, "
        f"{len(verdicts) - len(cpu_s) - equivalent} survive; a kill takes "
        f"{cpu_s[len(cpu_s) // 2] if cpu_s else 0.0:.2f} s of CPU (median)"
    )


def sampled(
    names: Sequence[str],
    size: int | None,
    seed: int,
    modules: Sequence[ModuleType] = DEFINITION,
    is_meant: Callable[[Mistake], bool] = lambda _: True,
) -> list[Mistake]:
    """Return so many mistakes (None: all), evenly over functions; those whose name holds one of `names`, if any.

    Others than those that are meant do not count.
    """
    of_function: dict[str, list[Mistake]] = defaultdict(list)
    for mistake in itertools.chain.from_iterable(map(mistakes_in, modules)):
        of_function[f"{mistake.module} {mistake.function}"].append(mistake)
    chosen = [made for name, made in of_function.items() if not names or any(each in name for each in names)]
    if not chosen:
        raise ReportError(f"there is no function {' or '.join(names)}; there are {', '.join(of_function)}")
    random.Random(seed).shuffle(chosen)
    for made in chosen:
        random.Random(seed).shuffle(made)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*(filter(is_meant, made) for made in chosen)))
    return list(itertools.islice(filter(None, in_turn), size))


def traces_of(scenarios: Mapping[str, Scenario], folder: Path, say: Callable[[str], None]) -> list[Trace]:
    """Return the traces of scenarios, the cheapest of each requirement first; read from and added to `folder`."""
    first = {one.id for one in one_per_requirement(scenarios.values())}
    traces = [one for one in read(folder / "traces.jsonl", Trace) if one.id in scenarios]
    done = {one.id for one in traces}
    waiting = sorted((id_ for id_ in scenarios if id_ not in done), key=lambda id_: id_ not in first)
    for one in trace_all([scenarios[id_] for id_ in waiting]):
        traces.append(append(folder / "traces.jsonl", one))
        if len(traces) % 100 == 0:
            say(f"{len(traces):>5}/{len(scenarios)}  scenarios traced")
    traces.sort(key=lambda one: (one.id not in first, one.cpu_s))
    reaching = [one for one in traces if one.lines]
    for one in reaching[:: max(1, len(reaching) // _NUM_WARMING)]:
        facts_of(scenarios[one.id])  # what torch does for the first time, it does before the forks
    return traces


def judge_all(mistakes: Sequence[Mistake], judge: Callable[[Mistake], Verdict], folder: Path) -> Iterator[Verdict]:
    """Yield what becomes of each mistake; `folder` keeps it, and nothing that it has is done again."""
    before = {one.mistake: one for one in read(folder / "verdicts.jsonl", Verdict)}
    for mistake in mistakes:
        yield before.get(mistake) or append(folder / "verdicts.jsonl", judge(mistake))


def read(file: Path, kind: type[Any]) -> list[Any]:
    """Return the values of this kind that a file has, one a line; none if it is not there."""
    return [msgspec.json.decode(line, type=kind) for line in file.read_bytes().splitlines()] if file.exists() else []


def append(file: Path, value: Any) -> Any:
    """Append a value to a file of `read`, and return it."""
    with file.open("ab") as out:
        out.write(msgspec.json.encode(value) + b"\n")
    return value
