"""Scenarios of chapter failed_communication: features x the ways in which a collective fails."""

from collections.abc import Iterator

from conformance.chapters.failed_communication.features import FEATURES
from conformance.chapters.grid import Grid
from conformance.chapters.variants import arguments, fields
from conformance.scenario import Scenario

_grid = Grid("failed_communication", fields(min_collectives=0, recorded=False))

_REQUIREMENTS = {
    "call": "FAIL-01",
    "wait": "FAIL-01",
    "gone": "FAIL-01",
    "future": "FAIL-02",
    "false": "FAIL-03",
    "told": "FAIL-03",
    "size": "FAIL-04",
    "late": "FAIL-05",
}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for name, feature in FEATURES.items():
        for failure in feature.failures:
            failed = arguments(f"{name}-{failure}", feature=name, failure=failure)
            also = ("FAIL-06", "FAIL-07")
            requirement = _REQUIREMENTS[failure]
            yield from _grid(requirement, "", "failed_collectives", 2, failed, needs=feature.needs, also=also)
