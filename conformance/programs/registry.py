"""The registry of programs: for each its function, the facts that ranks must observe, and its invariants.

A program receives a `RankContext` and never names a DDP implementation, backend or device. It reports what it sees with
`ctx.observe(name, value)`. What must be seen is computed from the scenario alone, in the controller, by the function
given to `expects`; it returns for each rank the facts that are required. Facts without an expectation are reported but
not judged; an expected fact that was not observed is a failure.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conformance.errors import ScenarioError

if TYPE_CHECKING:
    from conformance.observation import Facts
    from conformance.programs.rank_context import RankContext
    from conformance.scenario import Scenario

    Body = Callable[[RankContext], None]
    Expectation = Callable[[Scenario], Mapping[int, Facts]]

#: Where programs are: shared ones, those of chapters (of any depth), of the benchmark and of the smoke ladder.
PACKAGES = ("conformance.programs", "conformance.chapters", "conformance.bench.programs", "conformance.smoke.programs")

#: What else stands in a chapter's folder; a rank needs none of it.
_NO_PROGRAMS = {"scenarios", "mutants", "oracle"}

_PROGRAMS: dict[str, Program] = {}


@dataclass
class Program:
    """A registered program; `invariants` names the checkers of the collective history that apply to it.

    `preload` are modules that take long to import: they are imported once, before ranks are forked.
    """

    name: str
    body: Body
    invariants: tuple[str, ...] = ("same_collectives",)
    native_facts: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    expectation: Expectation | None = field(default=None)

    def expects(self, expectation: Expectation) -> Expectation:
        """Register the function that computes the required facts from the scenario alone."""
        assert self.expectation is None, f"program {self.name} has an expectation already"
        self.expectation = expectation
        return expectation


def program(
    name: str,
    *,
    invariants: tuple[str, ...] = ("same_collectives",),
    native_facts: tuple[str, ...] = (),
    preload: tuple[str, ...] = (),
) -> Callable[[Body], Program]:
    """Register the decorated function as program `name`.

    `native_facts` are prefixes of fact names in which the subject must equal torch's own DDP wherever torch's passes.
    """

    def register(body: Body) -> Program:
        assert name not in _PROGRAMS, f"two programs are called {name}"
        _PROGRAMS[name] = Program(name, body, invariants, native_facts, preload)
        return _PROGRAMS[name]

    return register


def load_programs() -> Mapping[str, Program]:
    """Import every module in which programs may be registered and return the programs by name."""
    for package in PACKAGES:
        _import_all(package)
    return _PROGRAMS


def _import_all(package: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if module.name.rpartition(".")[2] in _NO_PROGRAMS:
            continue
        if module.ispkg:
            _import_all(module.name)
        else:
            importlib.import_module(module.name)


def preloads_of(scenarios: Iterable[Scenario]) -> tuple[str, ...]:
    """Return the modules that the programs of `scenarios` want imported before ranks are forked, each once."""
    names = dict.fromkeys(scenario.program for scenario in scenarios)
    return tuple(dict.fromkeys(module for name in names for module in get_program(name).preload))


def get_program(name: str) -> Program:
    """Return the program called `name`; raises `ScenarioError` with near misses."""
    programs = load_programs()
    if name not in programs:
        import difflib

        near = difflib.get_close_matches(name, programs, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else f"; known: {', '.join(sorted(programs))}"
        raise ScenarioError(f"unknown program {name!r}{hint}")
    return programs[name]
