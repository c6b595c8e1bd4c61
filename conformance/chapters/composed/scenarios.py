"""Scenarios of chapter composed: trainings from the grammar in which every pair of features occurs."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.composed.grammar import cover
from conformance.scenario import Scenario

#: Which of the many sets of trainings that cover all pairs; nightly runs draw others.
_SEED = 0


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from cover(_SEED)
