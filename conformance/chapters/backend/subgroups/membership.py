"""Programs about groups: who is in them, how ranks are counted, and that each is its own."""

import random
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.operations.calls import device_backend
from conformance.programs.rank_context import RankContext

_KNOWN = ("rank and size of groups", "rank and size of their backends", "global ranks of members", "non-members")


@judged(
    "who_is_where", always(*_KNOWN),
    speaks_for={_KNOWN[0]: ("GRP-01",), _KNOWN[1]: ("GRP-01",), _KNOWN[2]: ("GRP-14",), _KNOWN[3]: ("GRP-04",)},
)  # fmt: skip
def who_is_where(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask several groups for their ranks and members, as torch and as the backend see them."""
    size = ctx.world_size
    memberships = [list(range(size)), list(range(1, size)) or [0], [size - 1], [0, size - 1] if size > 1 else [0]]
    groups = [dist.new_group(list(reversed(members))) for members in memberships]
    mine = [(group, members) for group, members in zip(groups, memberships, strict=True) if ctx.rank in members]

    def of_groups() -> str:
        return first_wrong(
            *(unlike("rank and size are", (group.rank(), group.size()), (members.index(ctx.rank), len(members)))
              for group, members in mine)
        )  # fmt: skip

    def of_backends() -> str:
        backends = [(device_backend(group, ctx.device), members) for group, members in mine]
        return first_wrong(
            *(unlike("the backend's rank and size are", (one.rank(), one.size()),
                     (members.index(ctx.rank), len(members))) for one, members in backends)
        )  # fmt: skip

    def translated() -> str:
        clauses = [unlike("members are", dist.get_process_group_ranks(group), members) for group, members in mine]
        for group, members in mine:
            for local, rank in enumerate(members):
                clauses.append(unlike(f"rank {rank} is", dist.get_group_rank(group, rank), local))
                clauses.append(unlike(f"member {local} is", dist.get_global_rank(group, local), rank))
        return first_wrong(*clauses)

    def outside() -> str:
        clauses = []
        for group, members in zip(groups, memberships, strict=True):
            if ctx.rank in members:
                continue
            tensor = torch.full((3,), 5.0, device=ctx.device)
            answer = dist.all_reduce(tensor, group=group, async_op=True)
            clauses.append(unlike("all_reduce of a group that this rank is not in gave", answer, None))
            clauses.append(unlike("and left", tensor, [5.0] * 3))
            clauses.append(unlike("rank in it is", dist.get_rank(group), -1))
        return first_wrong(*clauses)

    return dict(zip(_KNOWN, (of_groups, of_backends, translated, outside), strict=True))


_ROOTS = ("broadcast from roots by global rank", "broadcast from roots by rank in the group")


@judged("roots_of_subgroups", always(*_ROOTS), speaks_for={"broadcast from roots*": ("GRP-02",)})
def roots_of_subgroups(ctx: RankContext) -> Mapping[str, Trial]:
    """Broadcast in a group without rank 0 from each member, named by its global rank and by its rank in the group."""
    members = list(range(1, ctx.world_size))
    group = dist.new_group(list(reversed(members)))

    def roots(name: str) -> str:
        clauses = []
        for local, rank in enumerate(members if ctx.rank in members else []):
            tensor = torch.full((3,), float(ctx.rank), device=ctx.device)
            root: dict[str, Any] = {name: rank if name == "src" else local}
            dist.broadcast(tensor, group=group, **root)
            clauses.append(unlike(f"the broadcast from global rank {rank} gave", tensor, [float(rank)] * 3))
        return first_wrong(*clauses)

    return {_ROOTS[0]: lambda: roots("src"), _ROOTS[1]: lambda: roots("group_src")}


_APART = (
    "all_reduce in two groups of the same members",
    "all_reduce after a group of the same members is destroyed",
    "all_reduce of members with different histories",
    "all_reduce in a group made with long delays",
    "all_reduce and all_gather in nested groups",
    "all_gather, broadcast, barrier or all_reduce as a group's first operation",
)


@judged(
    "groups_apart", always(*_APART),
    speaks_for={
        _APART[0]: ("GRP-06",), _APART[1]: ("GRP-06",), _APART[2]: ("GRP-08",), _APART[3]: ("GRP-12",),
        _APART[4]: ("GRP-10",), _APART[5]: ("GRP-15",),
    },
)  # fmt: skip
def groups_apart(ctx: RankContext) -> Mapping[str, Trial]:
    """Make groups of the same ranks, nested ones, late ones; each must be its own."""
    size = ctx.world_size

    def wrong_sum(group: Any, members: list[int], factor: float = 1.0) -> str:
        if ctx.rank not in members:
            return ""
        tensor = torch.full((5,), factor * (ctx.rank + 1), device=ctx.device)
        dist.all_reduce(tensor, group=group)
        return unlike("the sum of all_reduce is", tensor, [factor * sum(rank + 1 for rank in members)] * 5)

    everybody = list(range(size))

    def twice() -> str:
        first, second = dist.new_group(), dist.new_group()
        one = torch.full((5,), 1.0, device=ctx.device)
        two = torch.full((5,), 10.0, device=ctx.device)
        works: list[Any] = [
            dist.all_reduce(one, group=first, async_op=True), dist.all_reduce(two, group=second, async_op=True),
        ]  # fmt: skip
        for work in reversed(works):
            work.wait()
        return first_wrong(
            unlike("the first group's sum is", one, [1.0 * size] * 5),
            unlike("the second group's sum is", two, [10.0 * size] * 5),
        )

    def destroyed() -> str:
        first, second = dist.new_group(), dist.new_group()
        clauses = [wrong_sum(first, everybody), wrong_sum(second, everybody, 2)]
        dist.destroy_process_group(first)
        return first_wrong(*clauses, wrong_sum(second, everybody, 3), wrong_sum(ctx.process_group, everybody, 4))

    def histories() -> str:
        pairs = [dist.new_group([0, 1]), dist.new_group([size - 1])]
        clauses = [wrong_sum(pairs[0], [0, 1]) for _ in range(3)]
        return first_wrong(*clauses, wrong_sum(dist.new_group(), everybody, 5))

    def delayed() -> str:
        time.sleep(random.Random(ctx.rank).random() * 0.2)
        return wrong_sum(dist.new_group(timeout=timedelta(seconds=60)), everybody)

    def wrong_slots(group: Any, members: list[int]) -> str:
        if ctx.rank not in members:
            return ""
        slots = [torch.zeros(2, device=ctx.device) for _ in members]
        dist.all_gather(slots, torch.full((2,), float(ctx.rank), device=ctx.device), group=group)
        wanted = [[float(rank)] * 2 for rank in members]
        return unlike("the slots of all_gather hold", slots, wanted)

    def nested() -> str:
        members, odd = everybody[1:], everybody[::2]
        nested_groups = [(dist.new_group(ranks), ranks) for ranks in (members, members[:1], odd)]
        outer = nested_groups[0]
        return first_wrong(
            *(wrong_sum(*one) for one in nested_groups), wrong_sum(*outer, 2),
            *(wrong_slots(*one) for one in nested_groups),
        )  # fmt: skip

    def first_operations() -> str:
        clauses = []
        for operation in ("all_gather", "broadcast", "barrier", "all_reduce"):
            group = dist.new_group()
            tensor = torch.full((3,), float(ctx.rank), device=ctx.device)
            if operation == "all_gather":
                slots = [torch.zeros_like(tensor) for _ in everybody]
                dist.all_gather(slots, tensor, group=group)
                clauses.append(
                    unlike("all_gather gave", [float(one[0]) for one in slots], [float(rank) for rank in everybody])
                )
            elif operation == "broadcast":
                dist.broadcast(tensor, group_src=size - 1, group=group)
                clauses.append(unlike(f"broadcast of {size - 1} from rank {size - 1} gave", tensor, [size - 1.0] * 3))
            elif operation == "barrier":
                dist.barrier(group=group)
            else:
                clauses.append(wrong_sum(group, everybody))
            dist.destroy_process_group(group)
        return first_wrong(*clauses)

    trials = (twice, destroyed, histories, delayed, nested, first_operations)
    return dict(zip(_APART, trials, strict=True))


_LATE = ("all_reduce in a group to which the last rank comes late",)
#: Longer than the tries of a connection last that is refused at first.
_LATE_S = 5.0


@judged("late_member", always(*_LATE))
def late_member(ctx: RankContext) -> Mapping[str, Trial]:
    """Make a group to which the last rank comes seconds after the others."""

    def late() -> str:
        if ctx.rank == ctx.world_size - 1:
            time.sleep(_LATE_S)
        group = dist.new_group(timeout=timedelta(seconds=60))
        tensor = torch.full((3,), float(ctx.rank + 1), device=ctx.device)
        dist.all_reduce(tensor, group=group)
        return unlike("the sum of all_reduce is", tensor, [float(sum(range(1, ctx.world_size + 1)))] * 3)

    return {_LATE[0]: late}


_NUM_GROUPS = 48
_MANY = (
    f"all_reduces in flight in {_NUM_GROUPS} groups",
    f"broadcasts in {_NUM_GROUPS} groups, each made for some ranks",
)


@judged("many_groups", always(*_MANY))
def many_groups(ctx: RankContext) -> Mapping[str, Trial]:
    """Make dozens of groups, all alive at once: of everybody, of all but one, and of two; use each."""
    size = ctx.world_size
    sets = [list(range(size)), list(range(1, size)), [0, size - 1], list(range(size - 1))]
    members_of = [sets[number % len(sets)] or [0] for number in range(_NUM_GROUPS)]
    groups = [dist.new_group(members) for members in members_of]
    mine = [number for number, members in enumerate(members_of) if ctx.rank in members]

    def tensor(number: int) -> torch.Tensor:
        return torch.full((3,), 10.0 * number + ctx.rank, device=ctx.device)

    def sums() -> str:
        tensors = {number: tensor(number) for number in mine}
        works: list[Any] = [dist.all_reduce(tensors[number], group=groups[number], async_op=True) for number in mine]
        for work in works:
            work.wait()
        return first_wrong(
            *(unlike(f"the sum in group {number} is", tensors[number],
                     [sum(10.0 * number + rank for rank in members_of[number])] * 3) for number in mine)
        )  # fmt: skip

    def broadcasts() -> str:
        clauses = []
        for number in mine:
            got, root = tensor(number), members_of[number][-1]
            dist.broadcast(got, root, group=groups[number])
            clauses.append(unlike(f"the broadcast in group {number} gave", got, [10.0 * number + root] * 3))
        for number in mine:
            dist.destroy_process_group(groups[number])
        return first_wrong(*clauses)

    return dict(zip(_MANY, (sums, broadcasts), strict=True))


_LOCAL = ("all_reduce in a group that only its members make", "all_reduce in such groups after different histories")


@judged("local_synchronisation", always(*_LOCAL))
def local_synchronisation(ctx: RankContext) -> Mapping[str, Trial]:
    """Make groups with `use_local_synchronization`, which their members alone call."""
    last = ctx.world_size - 1

    def sum_of(members: list[int]) -> str:
        if ctx.rank not in members:
            return ""
        group = dist.new_group(members, use_local_synchronization=True)
        tensor = torch.full((3,), float(ctx.rank + 1), device=ctx.device)
        dist.all_reduce(tensor, group=group)
        return unlike("the sum of all_reduce is", tensor, [float(sum(rank + 1 for rank in members))] * 3)

    def after() -> str:
        return first_wrong(sum_of([0, 1]), sum_of([last]), sum_of(list(range(ctx.world_size))))

    return {_LOCAL[0]: lambda: sum_of([0, last]), _LOCAL[1]: after}
