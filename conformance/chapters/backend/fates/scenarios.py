"""Scenarios of chapter fates: every operation, called either way, with each fate of a peer."""

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.chapters.backend.fates.lost_peers import FAR_TIMEOUT_S, FATES
from conformance.chapters.backend.in_backend import BackendGrid, tensors_by_turns
from conformance.chapters.variants import dashed, fields
from conformance.programs.operations.description import CALLED
from conformance.scenario import Fault, Scenario

_grid = BackendGrid("fates")

_OF_FATES = {"late": "FATE-01", "killed": "FATE-02", "stopped": "FATE-03", "raising": "FATE-04", "leaving": "FATE-05"}
#: What ends within the group's timeout, if the backend has any.
_LOST = ("killed", "stopped", "raising", "leaving")
#: Who waits for a late rank by looking again and again may give up after a second or two.
_LATE_S = 3.0
#: Too long for what ends in time, with a rank that is late by seconds on a busy machine.
_DEADLINE_S = 15.0


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    tensors = tensors_by_turns()
    for calling, world_size in (("sync", 2), ("async", 4)):
        for operation in CALLED:
            for fate in FATES:
                yield from _of(operation, fate, calling, world_size, next(tensors))
    for operation in CALLED:
        for calling in ("sync", "async"):
            # Of three ranks one receives from the dead rank, and sends to another.
            size = 3 if operation == "send_recv" else 2
            yield from _of(operation, "killed", calling, size, next(tensors), at_once=True)
    for world_size in (2, 3):
        last = world_size - 1
        killed = fields(faults=(Fault("kill", last, at="killed"),), deadline_s=_DEADLINE_S)
        yield from _grid(
            "FATE-08", "new-group", "group_of_the_dead", world_size, killed, needs=("timeouts",),
            arguments={"doomed": [last]},
        )  # fmt: skip
        yield from _grid("FATE-10", "abort", "abort_of_waiters", world_size, needs=("abort",), deadline_s=_DEADLINE_S)
    for slug, name_all in (("one", False), ("all", True)):
        yield from _grid(
            "FATE-09", slug, "barrier_of_the_missing", 4, needs=("monitored_barrier",),
            arguments={"name_all": name_all}, deadline_s=_DEADLINE_S,
        )  # fmt: skip


def _of(
    operation: str, fate: str, calling: str, world_size: int, tensors: Mapping[str, Any], *, at_once: bool = False
) -> Iterator[Scenario]:
    last = world_size - 1
    needs = ("timeouts" if fate in _LOST else "", "notices_death" if at_once else "", CALLED[operation].needs)
    given: dict[str, Any] = {"operation": operation, "fate": fate, "calling": calling, **tensors}
    if fate == "killed":
        given["doomed"] = [last]
    if fate == "late" and calling == "sync":
        given["late_s"] = _LATE_S
    if at_once:
        given["at_once"] = True
    yield from _grid(
        "FATE-11" if at_once else _OF_FATES[fate],
        f"{dashed(operation)}-{calling}",
        "lost_peer",
        world_size,
        arguments=given,
        needs=tuple(filter(None, needs)),
        also=() if fate == "late" else ("FATE-06", "FATE-07"),
        faults=(Fault(FATES[fate], last, at=fate),) if FATES[fate] else (),
        deadline_s=_DEADLINE_S + (FAR_TIMEOUT_S if at_once else 0.0),
    )
