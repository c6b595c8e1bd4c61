"""How much the suite holds of what: numbers whose every change a reviewer is to see."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from conformance.models.catalogue import load_fixtures
from conformance.mutants.catalogue import load_deviations, load_mutants
from conformance.programs.registry import PACKAGES, load_programs
from conformance.spec.catalogue import load_catalogue
from conformance.suite import load_scenarios
from workshop.implementation import Implementation, measure

_HEAD = """\
# How much the suite holds of what. Made by `python -m workshop renew`; say in the commit why a number falls.
# `kills` are pairs of a mutant and a requirement that notices it, `deviations` are requirements that torch breaks.
"""


@dataclass(frozen=True, slots=True)
class ChapterCounts:
    """What one chapter holds; scenarios count where their id says that they belong."""

    requirements: int
    scenarios: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What the suite holds, in all and by chapter; and how large `ddp_impl` is."""

    requirements: int
    scenarios: int
    programs: int
    models: int
    mutants: int
    kills: int
    survivals: int
    deviations: int
    ddp_impl: Implementation
    chapters: Mapping[str, ChapterCounts]

    def to_toml(self) -> str:
        """Return the numbers one a line, so that a difference shows which have changed."""
        totals = "".join(f"{name} = {getattr(self, name)}\n" for name in self.__slots__[:-2])
        size = "".join(f"{name} = {getattr(self.ddp_impl, name)}\n" for name in self.ddp_impl.__slots__)
        chapters = "".join(
            f"{name} = {{ requirements = {one.requirements}, scenarios = {one.scenarios} }}\n"
            for name, one in self.chapters.items()
        )
        return f"{_HEAD}{totals}\n[ddp_impl]  # these may only fall\n{size}\n[chapters]\n{chapters}"


def count() -> Counts:
    """Import the whole suite and count; programs of tests and of plugins are not of the suite."""
    catalogue, scenarios, mutants = load_catalogue(), load_scenarios(), load_mutants()
    of_chapter = Counter(scenario.chapter for scenario in scenarios)
    kills = [kill for mutant in mutants for kill in mutant.kills]
    return Counts(
        requirements=len(catalogue),
        scenarios=len(scenarios),
        programs=sum(program.body.__module__.startswith(PACKAGES) for program in load_programs().values()),
        models=len(load_fixtures()),
        mutants=len(mutants),
        kills=sum(not kill.survived for kill in kills),
        survivals=sum(kill.survived for kill in kills),
        deviations=len(load_deviations().kills),
        ddp_impl=measure(),
        chapters={
            chapter.name: ChapterCounts(len(chapter.requirements), of_chapter[chapter.name])
            for chapter in catalogue.chapters
        },
    )
