"""The registry of programs: for each its function, the facts that ranks must observe, and its invariants.

A program receives a `RankContext` and never names a DDP implementation, backend or device. It reports facts with
`ctx.observe(name, value)`. Its expectation, registered with `expects`, computes the facts that each rank must observe
from the scenario alone; the controller calls it. No checker judges a fact that the expectation does not return; an
expected fact that a rank does not observe is a failure.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from conformance.errors import ScenarioError, certain, hint

if TYPE_CHECKING:
    from conformance.observation import Facts
    from conformance.programs.rank_context import RankContext
    from conformance.scenario import Scenario

    Body = Callable[[RankContext], None]
    Expectation = Callable[[Scenario], Mapping[int, Facts]]

#: Packages with programs: shared ones, those of chapters (at any depth), of the benchmark and of the smoke ladder.
PACKAGES = (
    "conformance.programs",
    "conformance.composed",
    "conformance.chapters",
    "conformance.bench.programs",
    "conformance.smoke.programs",
)

#: Modules of a chapter's folder that hold no programs, and that no rank needs.
_NO_PROGRAMS = {"scenarios", "mutants", "oracle"}

_PROGRAMS: dict[str, Program] = {}


@dataclass
class Program:
    """A registered program; `invariants` names the checkers of the collective history that apply to it.

    `native_facts` are prefixes of fact names in which the subject must equal torch's own DDP wherever torch's passes.
    `preload` names modules that take long to import; the zygote imports them once, before it forks ranks. `speaks_for`
    maps patterns of fact names to requirements: a fact of that name speaks for the one that the scenario tests, or else
    for the first, and for no other. All other facts speak for every requirement that the scenario tests. A program
    `without_ddp` wraps nothing: it is about the backend. One with `misuses` passes the backend wrong arguments, with
    which it may overwrite memory: its ranks run no further scenario.
    """

    name: str
    body: Body
    invariants: tuple[str, ...] = ("same_collectives",)
    native_facts: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    speaks_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_ddp: bool = False
    misuses: bool = False
    expectation: Expectation | None = None

    def expects(self, expectation: Expectation) -> Expectation:
        """Register the function that computes the required facts from the scenario alone."""
        self.expectation = expectation
        return expectation


def program_without_truth(name: str, **settings: Any) -> Callable[[Body], Program]:
    """Register the decorated function as program `name`, which the plain DDP cannot run or whose facts it cannot show.

    `settings` are further fields of `Program`; `Program.expects` then registers what ranks must observe.
    `conformance.programs.program` is for all others.
    """

    def register(body: Body) -> Program:
        certain(name not in _PROGRAMS, f"two programs are called {name}")
        _PROGRAMS[name] = Program(name, body, **settings)
        return _PROGRAMS[name]

    return register


def load_programs() -> Mapping[str, Program]:
    """Import every module that may register programs, and return the programs by name, later ones included."""
    while _unimported():
        _import_next()
    return _PROGRAMS


def _import_next() -> None:
    name = _unimported()[-1]
    importlib.import_module(name)
    with suppress(ValueError):  # another thread, or what was imported, has been as far
        _unimported().remove(name)  # afterwards: one that cannot be imported raises each time


@cache
def _unimported() -> list[str]:
    """Return the modules that may register programs and have not been imported here, shared ones last."""
    return [name for package in reversed(PACKAGES) for name in _modules_of(package)]


def _modules_of(package: str) -> Iterator[str]:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if module.name.rpartition(".")[2] in _NO_PROGRAMS:
            continue
        if module.ispkg:
            yield from _modules_of(module.name)
        else:
            yield module.name


def preloads_of(scenarios: Iterable[Scenario]) -> tuple[str, ...]:
    """Return the modules that the zygote imports for the programs of `scenarios` before it forks ranks, each once."""
    names = dict.fromkeys(scenario.program for scenario in scenarios)
    return tuple(dict.fromkeys(module for name in names for module in get_program(name).preload))


def misuses(name: str) -> bool:
    """Whether the program called `name` has `misuses`; False for one that this process has not imported."""
    return name in _PROGRAMS and _PROGRAMS[name].misuses


def get_program(name: str) -> Program:
    """Return the program called `name`; raises `ScenarioError`, which suggests similar names.

    Imports modules until one has registered it: a command that runs a few scenarios need not import what all need.
    """
    while name not in _PROGRAMS:
        if not _unimported():
            raise ScenarioError(f"unknown program {name!r}{hint(name, _PROGRAMS)}")
        _import_next()
    return _PROGRAMS[name]
