"""The suite: the scenarios of all chapters, and `Selection`.

A chapter is a folder in `conformance/chapters/`. Its `requirements.toml` states what MUST hold; its `scenarios.py`
defines `def scenarios() -> Iterator[Scenario]`, which yields the scenarios that test it. Scenario ids have the form
`<chapter>/<REQUIREMENT-ID>/<slug>`, for example `gradients/GRAD-01/mlp-world2`.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from conformance.errors import ScenarioError, SpecificationError, hint
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue, chapter_packages, load_catalogue
from conformance.spec.cheapest import one_per_requirement
from conformance.spec.kept_scenarios import kept_scenarios


@cache
def load_scenarios() -> tuple[Scenario, ...]:
    """Return the scenarios of every chapter; raises `SpecificationError` at the first malformed id."""
    return kept_scenarios(_made)


def _made() -> tuple[Scenario, ...]:
    catalogue = load_catalogue()
    packages = chapter_packages()
    scenarios: list[Scenario] = []
    for chapter in catalogue.chapters:
        scenarios.extend(importlib.import_module(f"{packages[chapter.name]}.scenarios").scenarios())
    check_scenarios(scenarios, catalogue)
    return tuple(scenarios)


def made_to_order() -> Any:
    """Return the module with scenarios of backends at other world sizes, with more bytes, and of drawn calls."""
    return importlib.import_module("conformance.chapters.backend.made_to_order")


def check_scenarios(scenarios: Iterable[Scenario], catalogue: Catalogue) -> None:
    """Raise `SpecificationError` unless ids are unique, well formed and name requirements that exist."""
    seen: set[str] = set()
    for scenario in scenarios:
        parts = scenario.id.split("/")
        if len(parts) != 3 or not all(parts):
            raise SpecificationError(f"scenario id {scenario.id!r} must read <chapter>/<REQUIREMENT-ID>/<slug>")
        if scenario.id in seen:
            raise SpecificationError(f"two scenarios are called {scenario.id}")
        seen.add(scenario.id)
        catalogue.chapter(parts[0])
        if parts[1] not in scenario.requirements:
            raise SpecificationError(f"{scenario.id}: {parts[1]} is in the id, but not among its requirements")
        for requirement_id in scenario.requirements:
            try:
                catalogue.requirement(requirement_id)
            except SpecificationError as error:
                raise SpecificationError(f"{scenario.id}: {error}") from error


@dataclass(frozen=True, slots=True)
class Selection:
    """Which scenarios to run: a scenario must match any value of every field that is set.

    `names` are the command line's positional arguments: a chapter, a requirement id, a scenario id or a glob of
    scenario ids. `keyword` is a substring of the id, regardless of case. `one_per_requirement` keeps the cheapest
    matching scenario of each requirement.
    """

    names: tuple[str, ...] = ()
    chapters: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()
    keyword: str = ""
    one_per_requirement: bool = False

    def __post_init__(self) -> None:
        """Raise `ScenarioError` for a world size that is none."""
        for world_size in self.world_sizes:
            if world_size < 1:
                raise ScenarioError(f"world size must be >= 1, got {world_size}")

    def apply(self, scenarios: Iterable[Scenario], catalogue: Catalogue, profile: str = "") -> tuple[Scenario, ...]:
        """Return the matching scenarios, of all or of those of a `profile`, in their order.

        Raises `SpecificationError` or `ScenarioError`, with similar names, for an unknown name, and `ScenarioError`
        when nothing matches: an empty run must not pass.
        """
        scenarios = tuple(scenarios)
        for chapter in self.chapters:
            catalogue.chapter(chapter)
        for requirement_id in self.requirements:
            catalogue.requirement(requirement_id)
        for name in self.names:
            if not any(_is_named(name, scenario) for scenario in scenarios):
                raise ScenarioError(_unknown_name(name, scenarios, catalogue, profile))
        chosen = tuple(scenario for scenario in scenarios if self.matches(scenario))
        if not scenarios:
            raise ScenarioError("there is no scenario to select from: the profile has no requirements")
        if not chosen:
            of_profile, option = (f" of profile {profile}", f" --profile {profile}") if profile else ("", "")
            raise ScenarioError(
                f"no scenario{of_profile} matches {self}; `ddp-conformance list --scenarios{option}` prints all "
                f"{len(scenarios)}"
            )
        return one_per_requirement(chosen) if self.one_per_requirement else chosen

    def matches(self, scenario: Scenario) -> bool:
        """Whether `scenario` matches every field that is set."""
        return (
            (not self.names or any(_is_named(name, scenario) for name in self.names))
            and (not self.chapters or scenario.chapter in self.chapters)
            and (not self.requirements or bool(set(self.requirements) & set(scenario.requirements)))
            and (not self.world_sizes or scenario.world_size in self.world_sizes)
            and self.keyword.lower() in scenario.id.lower()
        )

    def __str__(self) -> str:
        parts = [repr(name) for name in self.names]
        parts += [f"--chapter {chapter}" for chapter in self.chapters]
        parts += [f"--requirement {requirement_id}" for requirement_id in self.requirements]
        parts += [f"--world-size {world_size}" for world_size in self.world_sizes]
        parts += [f"-k {self.keyword}"] if self.keyword else []
        parts += ["--one-per-requirement"] if self.one_per_requirement else []
        return " ".join(parts) or "the empty selection"


def _is_named(name: str, scenario: Scenario) -> bool:
    return name == scenario.chapter or name in scenario.requirements or fnmatchcase(scenario.id, name)


def _unknown_name(name: str, scenarios: Iterable[Scenario], catalogue: Catalogue, profile: str) -> str:
    chapters = {chapter.name for chapter in catalogue.chapters}
    if name in chapters or name in catalogue:
        return f"{name} is not in profile {profile}" if profile else f"no scenario tests {name}"
    known = chapters | {requirement.id for requirement in catalogue} | {scenario.id for scenario in scenarios}
    return f"{name!r} is no chapter, requirement, scenario or glob of scenarios{hint(name, known)}"
