"""Scenarios of chapter timeouts: waits for ranks that never come end, and those for slow ones do not."""

from collections.abc import Iterator

from conformance.chapters.backend.in_backend import BackendGrid, tensors_by_turns
from conformance.chapters.variants import Variant, dashed
from conformance.programs.operations.description import CALLED
from conformance.scenario import Scenario

_grid = BackendGrid("timeouts")
#: Too long for what ends in time: the timeout, a busy machine, and a second wait.
_DEADLINE_S = 8.0
#: Later than backends wait that forget the timeout, and within it; a busy machine may keep the slow rank for longer.
_LATE_S = 1.3
_IDLE = {"timeout_s": 4.0, "idle_s": 4.2, "late_s": 1.0}
_IDLE_IN = ("all_reduce", "barrier")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    tensors = tensors_by_turns()
    for world_size in (2, 3):
        for operation, what in CALLED.items():
            needs = tuple(filter(None, ("timeouts", what.needs)))
            slug = dashed(operation)
            for requirement, whose, suffix in (
                ("TIME-01" if operation == "all_reduce" else "TIME-05", "the group's timeout", "of-group"),
                ("TIME-02", "the operation's timeout", "own"),
                ("TIME-03", "wait's timeout", "of-wait"),
            ):
                if what.of_pairs and suffix == "own":
                    continue  # their methods take none
                if suffix != "of-group" and world_size > 2 and not what.rooted:
                    continue  # only a root waits for one rank after the other
                also = ("WORK-05", "WORK-07", "WORK-12", "WORK-19") if suffix == "of-group" else ()
                given = {"operation": operation, "whose": whose, **next(tensors)}
                called = Variant(f"{slug}-{suffix}", arguments=given, needs=needs)
                yield from _grid(requirement, "", "nobody_comes", world_size, called, also=also, deadline_s=_DEADLINE_S)
    for operation, what in CALLED.items():
        given = {"operation": operation, **next(tensors)}
        called = Variant(dashed(operation), needs=tuple(filter(None, [what.needs])))
        lasting = {"whose": "the timeout of set_timeout"}
        changed = called | Variant(arguments=given | lasting, needs=("set_timeout",))
        yield from _grid("TIME-07", "", "nobody_comes", 2, changed, deadline_s=_DEADLINE_S)
        slow = called | Variant(arguments=given | {"late_s": _LATE_S})
        yield from _grid("TIME-06", "", "somebody_is_slow", 2, slow)
        if operation in _IDLE_IN:
            idle = Variant("idle", arguments=given | _IDLE)
            yield from _grid("TIME-06", "", "somebody_is_slow", 2, called, idle, deadline_s=_DEADLINE_S)
