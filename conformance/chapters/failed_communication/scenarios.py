"""Scenarios of chapter failed_communication: features x the ways in which a collective fails."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.failed_communication.features import FEATURES
from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario

_scenario = in_chapter("failed_communication")

_REQUIREMENTS = {
    "call": "FAIL-01", "wait": "FAIL-01", "gone": "FAIL-01", "future": "FAIL-02", "false": "FAIL-03",
    "told": "FAIL-03", "size": "FAIL-04", "late": "FAIL-05",
}  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for name, feature in FEATURES.items():
        for failure in feature.failures:
            requirement = _REQUIREMENTS[failure]
            scenario = _scenario(
                requirement, f"{name}-{failure}", "failed_collectives", 2, needs=feature.needs, min_collectives=0,
                recorded=False, arguments={"feature": name, "failure": failure},
            )  # fmt: skip
            yield scenario.replace(requirements=(requirement, "FAIL-06", "FAIL-07"))
