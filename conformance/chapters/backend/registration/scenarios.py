"""Scenarios of chapter registration: a backend under names of its own."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid
from conformance.chapters.backend.registration.names import ANEW, SIDE_BY_SIDE, SPELT
from conformance.chapters.variants import Variant, arguments, each
from conformance.scenario import Scenario

_grid = BackendGrid("registration")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    devices = each("devices", ("text", "list"))
    for world_size in (2, 3):
        one_by_one = arguments(trials=[SPELT, ANEW])
        yield from _grid("REG-01", "named", "registered_names", world_size, devices, one_by_one, also=("REG-05",))
        together = arguments(trials=[SIDE_BY_SIDE]) | Variant(needs=("unordered_groups",))
        yield from _grid("REG-02", "two-names", "registered_names", world_size, devices, together)
