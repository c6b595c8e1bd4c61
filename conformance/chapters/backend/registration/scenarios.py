"""Scenarios of chapter registration: a backend under names of its own."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.chapters.variants import each
from conformance.scenario import Scenario

_grid = BackendGrid("registration")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    devices = each("devices", ("text", "list"))
    for world_size in (2, 3):
        yield from _grid("REG-01", "named", "registered_names", world_size, devices, also=("REG-02", "REG-05"))
