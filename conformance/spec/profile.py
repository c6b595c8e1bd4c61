"""Profiles: the scenarios that a DDP must pass at a level."""

from collections.abc import Iterable

from conformance.errors import SpecificationError, hint
from conformance.scenario import Scenario
from conformance.spec.catalogue import LEVELS, Catalogue
from conformance.spec.quick import QUICK, load_kills, quick


def levels_of(profile: str) -> tuple[str, ...]:
    """Return the levels of a profile's requirements; raises `SpecificationError` for an unknown profile.

    Profile full includes core; every other profile is its own level.
    """
    if profile not in LEVELS:
        raise SpecificationError(f"unknown profile {profile!r}{hint(profile, (*LEVELS, QUICK))}")
    return ("core", "full") if profile == "full" else (profile,)


#: The level of requirements about backends.
WITHOUT_DDP = "backend"


def about_ddps(scenarios: Iterable[Scenario], catalogue: Catalogue) -> tuple[Scenario, ...]:
    """Return the scenarios that judge a DDP, in their order: the default selection."""
    return tuple(one for one in scenarios if catalogue.requirement(one.id.split("/")[1]).level != WITHOUT_DDP)


def in_profile(profile: str, scenarios: Iterable[Scenario], catalogue: Catalogue) -> tuple[Scenario, ...]:
    """Return the scenarios of a profile in their order; raises as `levels_of` does.

    A scenario belongs to the level of the requirement that its id names. Profile quick is a part of full.
    """
    if profile == QUICK:
        return quick(in_profile("full", scenarios, catalogue), catalogue, load_kills())
    levels = levels_of(profile)
    return tuple(one for one in scenarios if catalogue.requirement(one.id.split("/")[1]).level in levels)
