"""Traces of scenarios on the definition: the facts that its plain ranks show, and the lines that they execute."""

import multiprocessing
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import torch

from conformance.observation import Facts
from conformance.programs.rank_context import UNSTATED, RankContext
from conformance.programs.registry import get_program
from conformance.programs.truth import PlainContext, plain_facts, truth_of
from conformance.scenario import Scenario
from conformance.truth import asking, backwards, casts, means, place, plain_bucket, plain_ddp, plain_join, tensors
from conformance.truth.digest import digest
from conformance.truth.expected import mismatch

#: The modules of the definition: all that says what ranks must get, and not how plain ranks take turns.
DEFINITION = (plain_ddp, means, backwards, plain_join, casts, place, plain_bucket, tensors, asking)
#: How long a fork may take for one scenario: a wrong definition may wait for ever.
_SILENCE_S = 60.0
_END = "end"


class Trace(msgspec.Struct, frozen=True):
    """Of one scenario: a digest of each fact by rank and name, executed lines by module, and CPU seconds."""

    id: str
    facts: dict[str, str]
    lines: dict[str, list[int]]
    cpu_s: float

    def reaches(self, module: str, lines: tuple[int, int]) -> bool:
        """Whether it executes one of these lines, from the first to the last."""
        return any(lines[0] <= line <= lines[1] for line in self.lines.get(module, ()))

    def differing(self, facts: Mapping[str, str]) -> list[str]:
        """Return the names of the facts that are not as they were."""
        return sorted(name for name in facts.keys() | self.facts.keys() if facts.get(name) != self.facts.get(name))


def facts_of(scenario: Scenario) -> dict[str, str]:
    """Return a digest of each fact that is expected of a rank, by its number and name.

    Where a program states what a fact must be, in its body or in an expectation of its own, it counts whether plain
    ranks show it: the body runs on them all the same. What it raises is a fact.
    """
    program = get_program(scenario.program)
    stated: Mapping[int, Facts] = {}
    judged: dict[str, str] = {}

    class Judging(PlainContext):
        def observe(self, name: str, value: Any, *, must: Any = UNSTATED) -> None:
            RankContext.observe(self, name, value)
            fact = f"{self.rank} {name}"
            if program.expectation is truth_of and must is UNSTATED:
                judged[fact] = digest(self.facts[name])[:12]
            elif (needs := stated.get(self.rank, {}).get(name, must)) is not UNSTATED:
                judged[fact] = str(mismatch(needs, self.facts[name]) is None)

    torch.manual_seed(0)
    try:
        if program.expectation is None:
            return {}
        if program.expectation is not truth_of:
            stated = program.expectation(scenario)
            judged |= {f"{rank} {name} is stated": digest(value)[:12] for rank, of_one in stated.items()
                       for name, value in of_one.items()}  # fmt: skip
        plain_facts(scenario, Judging)
    except Exception as error:
        judged["raised"] = f"{type(error).__name__}: {error}"
    return judged


def trace_all(scenarios: Iterable[Scenario]) -> Iterator[Trace]:
    """Yield the trace of each scenario, in their order; an empty one if it ends its process or never returns."""
    waiting = list(scenarios)

    def work() -> Iterator[Trace]:
        for scenario in waiting:
            begun = time.process_time()
            facts, lines = _executed(partial(facts_of, scenario))
            yield Trace(scenario.id, facts, lines, time.process_time() - begun)

    while waiting:
        for trace in in_fork(work):
            scenario = waiting.pop(0)
            yield Trace(scenario.id, {}, {}, 0.0) if trace is None else trace


def in_fork(work: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield what `work` yields in a fork of this process, and None in the end if the fork dies or falls silent."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: deque(map(sender.send, chain(work(), [_END])), maxlen=0))
    child.start()
    sender.close()
    try:
        while (item := receiver.recv() if receiver.poll(_SILENCE_S) else None) not in (_END, None):
            yield item
    except EOFError:
        item = None
    finally:
        child.kill()
        child.join()
        receiver.close()
    if item is None:
        yield None


def _executed(call: Callable[[], dict[str, str]]) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Return what `call` returns, and the lines of the definition that this thread and those it starts execute."""
    lines: dict[str, set[int]] = {module.__name__: set() for module in DEFINITION}
    of_file = {module.__file__: lines[module.__name__] for module in DEFINITION}

    def trace(frame: Any, *_: Any) -> Any:
        if (executed := of_file.get(frame.f_code.co_filename)) is None:
            return None
        executed.add(frame.f_lineno)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        return call(), {module: sorted(executed) for module, executed in lines.items() if executed}
    finally:
        sys.settrace(None)
        threading.settrace(None)
