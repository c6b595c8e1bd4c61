"""Profiles: the scenarios that a DDP must pass to conform at a level."""

from __future__ import annotations

from collections.abc import Iterable

from conformance.errors import SpecificationError
from conformance.scenario import Scenario
from conformance.spec.catalogue import LEVELS, Catalogue, hint


def in_profile(profile: str, scenarios: Iterable[Scenario], catalogue: Catalogue) -> tuple[Scenario, ...]:
    """Return the scenarios of a profile in their order: those of its level and of every level below it.

    A scenario belongs to the level of the requirement that its id names. Raises `SpecificationError` for a profile that
    does not exist.
    """
    if profile not in LEVELS:
        raise SpecificationError(f"unknown profile {profile!r}{hint(profile, LEVELS)}")
    levels = LEVELS[: LEVELS.index(profile) + 1]
    return tuple(one for one in scenarios if catalogue.requirement(one.id.split("/")[1]).level in levels)
