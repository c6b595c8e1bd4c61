"""How a chapter names and makes its scenarios."""

from __future__ import annotations

from typing import Any, Protocol

from conformance.scenario import Scenario


class ScenarioOf(Protocol):
    """Makes scenarios of one chapter."""

    def __call__(self, requirement: str, slug: str, program: str, world_size: int, **rest: Any) -> Scenario:
        """Return the scenario `<chapter>/<requirement>/<slug>-world<world_size>`; `rest` are its other fields."""


def in_chapter(chapter: str) -> ScenarioOf:
    """Return a function that makes scenarios of `chapter`."""

    def scenario(requirement: str, slug: str, program: str, world_size: int, **rest: Any) -> Scenario:
        # With a world size of 1, a DDP may communicate nothing.
        rest.setdefault("min_collectives", 0 if world_size == 1 else 1)
        return Scenario(
            id=f"{chapter}/{requirement}/{slug}-world{world_size}", requirements=(requirement,), program=program,
            world_size=world_size, **rest,
        )  # fmt: skip

    return scenario
