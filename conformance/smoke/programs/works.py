"""Programs of the smoke ladder about Works, their futures, and new groups."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
import torch.distributed as dist

from conformance.models.traced_blocks import block, summands
from conformance.observation import Facts
from conformance.own_mistake import present
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.scenario import Scenario
from conformance.smoke.programs.arrivals import observe_arrived

_NUM_IN_FLIGHT = 3


@program("smoke_async", invariants=())
def asynchronous(ctx: RankContext) -> None:
    """Issue three sums at once and wait for the last first; observes the sums and `is_completed`. All ranks run it."""
    tensors = [summands(ctx.rank + number, torch.float32).to(ctx.device) for number in range(_NUM_IN_FLIGHT)]
    works = [dist.all_reduce(tensor, group=ctx.process_group, async_op=True) for tensor in tensors]
    for number in reversed(range(_NUM_IN_FLIGHT)):
        with ctx.phase("work.wait()"):
            work = present(works[number])
            work.wait()
        observe_arrived(ctx, f"all_reduce {number} of {_NUM_IN_FLIGHT} in flight", tensors[number])
        ctx.observe(f"work {number}.is_completed() after wait()", work.is_completed())


@asynchronous.expects
def _asynchronous(scenario: Scenario) -> Mapping[int, Facts]:
    facts: dict[str, object] = {}
    for number in range(_NUM_IN_FLIGHT):
        parts = [summands(rank + number, torch.float32) for rank in range(scenario.world_size)]
        facts[f"all_reduce {number} of {_NUM_IN_FLIGHT} in flight"] = torch.stack(parts).sum(0)
        facts[f"work {number}.is_completed() after wait()"] = True
    return dict.fromkeys(range(scenario.world_size), facts)


@program("smoke_future", invariants=())
def future(ctx: RankContext) -> None:
    """Wait for a sum by its future, and chain a callback to it; observes what both deliver. All ranks run it."""
    tensor = summands(ctx.rank, torch.float32).to(ctx.device)
    work = present(dist.all_reduce(tensor, group=ctx.process_group, async_op=True))
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    with ctx.phase("future.wait()"):
        delivered = work.get_future().wait()
    ctx.observe("work.get_future().wait()[0]", delivered[0])
    with ctx.phase("future.then(...).wait()"):
        ctx.observe("work.get_future().then(double).wait()", doubled.wait())


@future.expects
def _future(scenario: Scenario) -> Mapping[int, Facts]:
    total = torch.stack([summands(rank, torch.float32) for rank in range(scenario.world_size)]).sum(0)
    facts = {"work.get_future().wait()[0]": total, "work.get_future().then(double).wait()": total * 2}
    return dict.fromkeys(range(scenario.world_size), facts)


@program("smoke_new_group", invariants=())
def new_group(ctx: RankContext) -> None:
    """Sum and broadcast in a group of all ranks but rank 0 (of all, where there are no others).

    Observes both on the members; rank 0 observes that it is none. All ranks run it.
    """
    members = _members(ctx.world_size)
    before = {thread.ident for thread in threading.enumerate()}
    group = dist.new_group(members)
    ctx.observe("is a member of the new group", ctx.rank in members)
    if ctx.rank in members:
        tensor = summands(ctx.rank, torch.float32).to(ctx.device)
        dist.all_reduce(tensor, group=group)
        observe_arrived(ctx, "all_reduce in a new group", tensor)
        root = members[-1]
        sent = block(ctx.rank, root, ctx.world_size).to(ctx.device)
        dist.broadcast(sent, root, group=group)
        ctx.observe("broadcast in a new group", sent)
    dist.barrier(group=ctx.process_group)
    dist.destroy_process_group(group)
    left = [thread.name for thread in threading.enumerate() if thread.ident not in before]
    ctx.observe("Python threads that the destroyed group left", left)


@new_group.expects
def _new_group(scenario: Scenario) -> Mapping[int, Facts]:
    members = _members(scenario.world_size)
    root = members[-1]
    facts: dict[int, Facts] = {
        rank: {"is a member of the new group": rank in members, "Python threads that the destroyed group left": []}
        for rank in range(scenario.world_size)
    }
    inside = {
        "all_reduce in a new group": torch.stack([summands(rank, torch.float32) for rank in members]).sum(0),
        "broadcast in a new group": block(root, root, scenario.world_size),
    }
    return facts | {rank: {**facts[rank], **inside} for rank in members}


def _members(world_size: int) -> list[int]:
    return list(range(1, world_size)) or [0]


@program("smoke_name", invariants=())
def name(ctx: RankContext) -> None:
    """Ask the default group for its backend's name; observes whether it has one. All ranks run it."""
    ctx.observe("group.name() names the backend", ctx.process_group.name() not in ("", "undefined"))


@name.expects
def _name(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {"group.name() names the backend": True} for rank in range(scenario.world_size)}


@program("smoke_presence", invariants=())
def presence(ctx: RankContext) -> None:
    """Ask the default group who it is; observes its rank and size. All ranks run it, nobody communicates."""
    ctx.observe("group.rank()", ctx.process_group.rank())
    ctx.observe("group.size()", ctx.process_group.size())


@presence.expects
def _presence(scenario: Scenario) -> Mapping[int, Facts]:
    size = scenario.world_size
    return {rank: {"group.rank()": rank, "group.size()": size} for rank in range(size)}
