"""Programs about objects: collectives of pickled ones, which need nothing but what every backend has."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from conformance.programs.judged import Trial, always, first_wrong, judged, tried, unlike
from conformance.programs.rank_context import RankContext

#: Nothing, a little, and up to a MiB; of other lengths on other ranks.
_LENGTHS = (0, 1, 1000, 2**20)
#: Of the objects that one list holds: it is less than a page, and many.
_LENGTHS_OF_LISTS = ((30, 3000), (10, 100_000))


def _object(rank: int, length: int) -> Any:
    return {"of": rank, "text": "x" * (length + 7 * rank if length else 0), "list": [rank] * min(length, 50)}


def _wrong(what: str, got: Any, expected: Any) -> str:
    if got == expected:
        return ""
    whose = got.get("of") if isinstance(got, dict) else None
    if whose == expected["of"]:
        return f"{what} was damaged on its way from rank {whose}: it has a text of {len(expected['text']):,} characters"
    instead = f"another object: of rank {whose}" if whose is not None else f"{type(got).__name__}"
    return f"{what} is {instead}, expected that of rank {expected['of']}"


_EVERYBODY = (
    "all_gather_object", "all_gather_object in a group without rank 0",
    "broadcast_object_list from every rank", "broadcast_object_list in a group without rank 0",
)  # fmt: skip


@judged(
    "objects_of_all", always(*_EVERYBODY),
    speaks_for={_EVERYBODY[0]: ("OBJ-01",), _EVERYBODY[2]: ("OBJ-02",), "*in a group*": ("OBJ-06",)},
)  # fmt: skip
def objects_of_all(ctx: RankContext) -> Mapping[str, Trial]:
    """Gather and broadcast objects of many lengths, on all ranks and as a group's first call."""
    everybody = list(range(ctx.world_size))

    def gathered(trial: str, group: Any, members: list[int]) -> str:
        clauses = []
        for length in _LENGTHS if ctx.rank in members else ():
            found: list[Any] = [None] * len(members)
            with ctx.phase(f"{trial}, for texts of {length:,} characters"):
                dist.all_gather_object(found, _object(ctx.rank, length), group=group)
            clauses += [
                _wrong(f"slot {place}", found[place], _object(rank, length)) for place, rank in enumerate(members)
            ]
        return first_wrong(*clauses)

    def sent(trial: str, group: Any, members: list[int]) -> str:
        clauses = []
        for root in members if ctx.rank in members else ():
            for lengths in _LENGTHS_OF_LISTS:
                found = [_object(ctx.rank, length) for length in lengths]
                with ctx.phase(f"{trial}, at root {root}"):
                    dist.broadcast_object_list(found, src=root, group=group)
                clauses += [
                    _wrong(f"object {place} from root {root}", one, _object(root, length))
                    for place, (one, length) in enumerate(zip(found, lengths, strict=True))
                ]
        return first_wrong(*clauses)

    def everywhere(trial: str, call: Callable[..., str]) -> str:
        return call(trial, ctx.process_group, everybody)

    def in_group(trial: str, call: Callable[..., str]) -> str:
        with ctx.phase(f"{trial}, in new_group"):
            group = dist.new_group(everybody[1:])
        return tried(ctx, trial, everybody[1:], partial(call, trial, group, everybody[1:]))

    return {
        trial: partial(where, trial, call)
        for trial, where, call in zip(
            _EVERYBODY, (everywhere, in_group) * 2, (gathered, gathered, sent, sent), strict=True
        )
    }


_ROOTED = ("gather_object to every rank", "scatter_object_list from every rank")


@judged("objects_of_roots", always(*_ROOTED))
def objects_of_roots(ctx: RankContext) -> Mapping[str, Trial]:
    """Gather objects to each rank and scatter them from each; only the root has a list."""
    size = ctx.world_size

    def gathered() -> str:
        clauses = []
        for root in range(size):
            found: list[Any] | None = [None] * size if ctx.rank == root else None
            with ctx.phase(f"{_ROOTED[0]}, at root {root}"):
                dist.gather_object(_object(ctx.rank, 100), found, dst=root, group=ctx.process_group)
            clauses += [
                _wrong(f"slot {rank} of root {root}", one, _object(rank, 100)) for rank, one in enumerate(found or ())
            ]
        return first_wrong(*clauses)

    def scattered() -> str:
        clauses = []
        for root in range(size):
            found: list[Any] = [None]
            given = [_object(10 * root + rank, 100) for rank in range(size)] if ctx.rank == root else None
            with ctx.phase(f"{_ROOTED[1]}, at root {root}"):
                dist.scatter_object_list(found, given, src=root, group=ctx.process_group)
            clauses.append(_wrong(f"the object from root {root}", found[0], _object(10 * root + ctx.rank, 100)))
        return first_wrong(*clauses)

    return {_ROOTED[0]: gathered, _ROOTED[1]: scattered}


_SENT = ("send_object_list to the next rank",)


@judged("objects_sent", always(*_SENT))
def objects_sent(ctx: RankContext) -> Mapping[str, Trial]:
    """Pass objects along a chain of ranks."""

    def chain() -> str:
        found: list[Any] = [None, None]
        clauses = []
        if ctx.rank > 0:
            with ctx.phase(f"{_SENT[0]}, in recv_object_list from rank {ctx.rank - 1}"):
                source = dist.recv_object_list(found, src=ctx.rank - 1, group=ctx.process_group)
            clauses = [unlike("the sender is", source, ctx.rank - 1)]
            clauses += [_wrong(f"object {place}", one, _object(ctx.rank - 1, 50)) for place, one in enumerate(found)]
        if ctx.rank < ctx.world_size - 1:
            with ctx.phase(f"{_SENT[0]}, in send_object_list to rank {ctx.rank + 1}"):
                dist.send_object_list([_object(ctx.rank, 50)] * 2, dst=ctx.rank + 1, group=ctx.process_group)
        return first_wrong(*clauses)

    return {_SENT[0]: chain}
