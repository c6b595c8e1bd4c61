"""Programs of the smoke ladder that issue one collective each, with data that encode sender and receiver."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.kept_waiting import seconds_of
from conformance.models.traced_blocks import BLOCK_LENGTH, block, summands
from conformance.observation import Facts
from conformance.own_mistake import present
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.scenario import Scenario
from conformance.smoke.programs.arrivals import observe_arrived

#: The others have so long to leave the barrier before the last rank comes to it, if they do not wait for that.
LATE_S = 0.1
#: One element, primes, and more than any backend sends in one piece.
_SIZES = (1, 7, 1_009, 65_537, 1_048_583)
_REDUCED_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


def _empty(ctx: RankContext, num_blocks: int = 1) -> Tensor:
    return torch.full((num_blocks * BLOCK_LENGTH,), -1.0, device=ctx.device)


def _blocks_for_all(ctx: RankContext) -> Tensor:
    """Return this rank's blocks for ranks 0, 1, ... one after the other."""
    size = ctx.world_size
    return torch.cat([block(ctx.rank, destination, size) for destination in range(size)]).to(ctx.device)


def _from_all(scenario: Scenario, destination: int | None) -> list[Tensor]:
    """Return what every rank sends to `destination`, by source; None: to all alike, under the sender's own number."""
    size = scenario.world_size
    return [block(source, source if destination is None else destination, size) for source in range(size)]


@program("smoke_broadcast", invariants=())
def broadcast(ctx: RankContext) -> None:
    """Broadcast from every rank in turn; observes `broadcast from rank <root>`. All ranks run it."""
    for root in range(ctx.world_size):
        tensor = block(root, root, ctx.world_size).to(ctx.device) if ctx.rank == root else _empty(ctx)
        dist.broadcast(tensor, root, group=ctx.process_group)
        observe_arrived(ctx, f"broadcast from rank {root}", tensor)


@broadcast.expects
def _broadcast(scenario: Scenario) -> Mapping[int, Facts]:
    same = {f"broadcast from rank {root}": sent for root, sent in enumerate(_from_all(scenario, None))}
    return dict.fromkeys(range(scenario.world_size), same)


@program("smoke_all_reduce", invariants=())
def all_reduce(ctx: RankContext) -> None:
    """Sum in the dtypes that DDPs communicate; observes `all_reduce SUM of <dtype>`. All ranks run it."""
    for dtype in _REDUCED_DTYPES:
        tensor = summands(ctx.rank, dtype).to(ctx.device)
        dist.all_reduce(tensor, group=ctx.process_group)
        observe_arrived(ctx, f"all_reduce SUM of {_name(dtype)}", tensor)


@all_reduce.expects
def _all_reduce(scenario: Scenario) -> Mapping[int, Facts]:
    sums = {f"all_reduce SUM of {_name(dtype)}": _sum(scenario, dtype) for dtype in _REDUCED_DTYPES}
    return dict.fromkeys(range(scenario.world_size), sums)


@program("smoke_all_reduce_dtype", invariants=())
def all_reduce_dtype(ctx: RankContext) -> None:
    """Sum in the scenario's argument `dtype`; observes `all_reduce SUM of <dtype>`. All ranks run it."""
    dtype = getattr(torch, ctx.arguments["dtype"])
    tensor = summands(ctx.rank, dtype).to(ctx.device)
    dist.all_reduce(tensor, group=ctx.process_group)
    observe_arrived(ctx, f"all_reduce SUM of {_name(dtype)}", tensor)


@all_reduce_dtype.expects
def _all_reduce_dtype(scenario: Scenario) -> Mapping[int, Facts]:
    dtype = getattr(torch, scenario.arguments["dtype"])
    return {rank: {f"all_reduce SUM of {_name(dtype)}": _sum(scenario, dtype)} for rank in range(scenario.world_size)}


@program("smoke_all_reduce_extrema", invariants=())
def all_reduce_extrema(ctx: RankContext) -> None:
    """Reduce with MAX and MIN; observes `all_reduce MAX` and `all_reduce MIN`. All ranks run it."""
    for name, op in (("MAX", dist.ReduceOp.MAX), ("MIN", dist.ReduceOp.MIN)):
        tensor = summands(ctx.rank, torch.int64).to(ctx.device)
        dist.all_reduce(tensor, op=op, group=ctx.process_group)
        observe_arrived(ctx, f"all_reduce {name}", tensor)


@all_reduce_extrema.expects
def _all_reduce_extrema(scenario: Scenario) -> Mapping[int, Facts]:
    every = torch.stack([summands(rank, torch.int64) for rank in range(scenario.world_size)])
    facts = {"all_reduce MAX": every.amax(0), "all_reduce MIN": every.amin(0)}
    return dict.fromkeys(range(scenario.world_size), facts)


@program("smoke_all_reduce_avg", invariants=())
def all_reduce_avg(ctx: RankContext) -> None:
    """Average numbers that divide exactly; observes `all_reduce AVG`. All ranks run it."""
    tensor = (summands(ctx.rank, torch.float32) * ctx.world_size).to(ctx.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=ctx.process_group)
    observe_arrived(ctx, "all_reduce AVG", tensor)


@all_reduce_avg.expects
def _all_reduce_avg(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {"all_reduce AVG": _sum(scenario, torch.float32)} for rank in range(scenario.world_size)}


@program("smoke_all_reduce_sparse", invariants=())
def all_reduce_sparse(ctx: RankContext) -> None:
    """Sum sparse tensors whose rows overlap in row 0; observes `all_reduce SUM of sparse`. All ranks run it."""
    tensor = _sparse(ctx.rank, ctx.world_size).to(ctx.device)
    dist.all_reduce(tensor, group=ctx.process_group)
    observe_arrived(ctx, "all_reduce SUM of sparse", tensor.to_dense())


@all_reduce_sparse.expects
def _all_reduce_sparse(scenario: Scenario) -> Mapping[int, Facts]:
    size = scenario.world_size
    total = torch.stack([_sparse(rank, size).to_dense() for rank in range(size)]).sum(0)
    return {rank: {"all_reduce SUM of sparse": total} for rank in range(size)}


@program("smoke_all_reduce_coalesced", invariants=())
def all_reduce_coalesced(ctx: RankContext) -> None:
    """Sum two tensors of different lengths in one call; observes each sum. All ranks run it."""
    tensors = [summands(ctx.rank, torch.float32, length).to(ctx.device) for length in (3, 5)]
    ctx.process_group.allreduce_coalesced(tensors).wait()
    for position, tensor in enumerate(tensors):
        observe_arrived(ctx, f"tensor {position} of all_reduce_coalesced", tensor)


@all_reduce_coalesced.expects
def _all_reduce_coalesced(scenario: Scenario) -> Mapping[int, Facts]:
    sums = [_sum(scenario, torch.float32, length) for length in (3, 5)]
    facts = {f"tensor {position} of all_reduce_coalesced": total for position, total in enumerate(sums)}
    return dict.fromkeys(range(scenario.world_size), facts)


@program("smoke_all_gather", invariants=())
def all_gather(ctx: RankContext) -> None:
    """Gather a block of every rank into a list; observes `all_gather, slot <rank>`. All ranks run it."""
    mine = block(ctx.rank, ctx.rank, ctx.world_size).to(ctx.device)
    slots = [_empty(ctx) for _ in range(ctx.world_size)]
    dist.all_gather(slots, mine, group=ctx.process_group)
    for rank, slot in enumerate(slots):
        observe_arrived(ctx, f"all_gather, slot {rank}", slot)


@all_gather.expects
def _all_gather(scenario: Scenario) -> Mapping[int, Facts]:
    slots = {f"all_gather, slot {rank}": sent for rank, sent in enumerate(_from_all(scenario, None))}
    return dict.fromkeys(range(scenario.world_size), slots)


@program("smoke_all_gather_into_tensor", invariants=())
def all_gather_into_tensor(ctx: RankContext) -> None:
    """Gather a block of every rank into one tensor; observes `all_gather_into_tensor`. All ranks run it."""
    gathered = _empty(ctx, ctx.world_size)
    mine = block(ctx.rank, ctx.rank, ctx.world_size).to(ctx.device)
    dist.all_gather_into_tensor(gathered, mine, group=ctx.process_group)
    observe_arrived(ctx, "all_gather_into_tensor", gathered)


@all_gather_into_tensor.expects
def _all_gather_into_tensor(scenario: Scenario) -> Mapping[int, Facts]:
    gathered = torch.cat(_from_all(scenario, None))
    return {rank: {"all_gather_into_tensor": gathered} for rank in range(scenario.world_size)}


@program("smoke_reduce_scatter", invariants=())
def reduce_scatter(ctx: RankContext) -> None:
    """Sum every rank's block for each rank there; observes `reduce_scatter_tensor`. All ranks run it."""
    mine = _empty(ctx)
    dist.reduce_scatter_tensor(mine, _blocks_for_all(ctx), group=ctx.process_group)
    observe_arrived(ctx, "reduce_scatter_tensor", mine)


@reduce_scatter.expects
def _reduce_scatter(scenario: Scenario) -> Mapping[int, Facts]:
    return {
        rank: {"reduce_scatter_tensor": torch.stack(_from_all(scenario, rank)).sum(0)}
        for rank in range(scenario.world_size)
    }


@program("smoke_all_to_all", invariants=())
def all_to_all(ctx: RankContext) -> None:
    """Send every rank a block of its own, then parts of uneven length; observes every part received.

    In the uneven exchange rank s sends the first d + 1 numbers of its block for rank d (at most all of them).
    All ranks run it.
    """
    size = ctx.world_size
    received = _empty(ctx, size)
    dist.all_to_all_single(received, _blocks_for_all(ctx), group=ctx.process_group)
    for source, part in enumerate(received.chunk(size)):
        observe_arrived(ctx, f"all_to_all_single, from rank {source}", part)
    lengths = [_uneven_length(destination) for destination in range(size)]
    parts = [part[:length] for part, length in zip(_blocks_for_all(ctx).chunk(size), lengths, strict=True)]
    mine = _uneven_length(ctx.rank)
    uneven = torch.full((mine * size,), -1.0, device=ctx.device)
    dist.all_to_all_single(uneven, torch.cat(parts), [mine] * size, lengths, group=ctx.process_group)
    for source, part in enumerate(uneven.chunk(size)):
        observe_arrived(ctx, f"all_to_all_single with uneven splits, from rank {source}", part)


@all_to_all.expects
def _all_to_all(scenario: Scenario) -> Mapping[int, Facts]:
    facts: dict[int, Facts] = {}
    for rank in range(scenario.world_size):
        sent = _from_all(scenario, rank)
        even = {f"all_to_all_single, from rank {source}": part for source, part in enumerate(sent)}
        uneven = {
            f"all_to_all_single with uneven splits, from rank {source}": part[: _uneven_length(rank)]
            for source, part in enumerate(sent)
        }
        facts[rank] = even | uneven
    return facts


@program("smoke_gather_scatter", invariants=())
def gather_scatter(ctx: RankContext) -> None:
    """Gather to the last rank and scatter from it; observes every slot. All ranks run it."""
    root, size = ctx.world_size - 1, ctx.world_size
    slots = [_empty(ctx) for _ in range(size)] if ctx.rank == root else None
    dist.gather(block(ctx.rank, root, size).to(ctx.device), slots, dst=root, group=ctx.process_group)
    for rank, slot in enumerate(slots or ()):
        observe_arrived(ctx, f"gather, slot {rank}", slot)
    mine = _empty(ctx)
    parts = list(_blocks_for_all(ctx).chunk(size)) if ctx.rank == root else None
    dist.scatter(mine, parts, src=root, group=ctx.process_group)
    observe_arrived(ctx, f"scatter from rank {root}", mine)


@gather_scatter.expects
def _gather_scatter(scenario: Scenario) -> Mapping[int, Facts]:
    size, root = scenario.world_size, scenario.world_size - 1
    facts: dict[int, Facts] = {rank: {f"scatter from rank {root}": block(root, rank, size)} for rank in range(size)}
    slots = {f"gather, slot {rank}": sent for rank, sent in enumerate(_from_all(scenario, root))}
    return facts | {root: {**slots, **facts[root]}}


@program("smoke_send_recv", invariants=())
def send_recv(ctx: RankContext) -> None:
    """Pass a block to the next rank round a ring; observes `received from rank <previous>`. All ranks run it."""
    size = ctx.world_size
    following, previous = (ctx.rank + 1) % size, (ctx.rank - 1) % size
    received = _empty(ctx)
    if size > 1:
        sending = dist.isend(block(ctx.rank, following, size).to(ctx.device), following, group=ctx.process_group)
        receiving = dist.irecv(received, previous, group=ctx.process_group)
        for work in (sending, receiving):
            present(work).wait()
    observe_arrived(ctx, f"received from rank {previous}", received)


@send_recv.expects
def _send_recv(scenario: Scenario) -> Mapping[int, Facts]:
    size = scenario.world_size
    if size == 1:
        return {0: {"received from rank 0": torch.full((BLOCK_LENGTH,), -1.0)}}
    return {
        rank: {f"received from rank {(rank - 1) % size}": block((rank - 1) % size, rank, size)} for rank in range(size)
    }


@program("smoke_all_reduce_sizes", invariants=())
def all_reduce_sizes(ctx: RankContext) -> None:
    """Sum tensors of odd and large sizes; observes how many elements of each are wrong. All ranks run it."""
    for size in _SIZES:
        numbers = (torch.arange(size, dtype=torch.float32) % 251).to(ctx.device)
        tensor = numbers + ctx.rank
        dist.all_reduce(tensor, group=ctx.process_group)
        expected = numbers * ctx.world_size + sum(range(ctx.world_size))
        observe_arrived(ctx, f"wrong elements of {size}", int((tensor != expected).sum()))


@all_reduce_sizes.expects
def _all_reduce_sizes(scenario: Scenario) -> Mapping[int, Facts]:
    none_wrong = {f"wrong elements of {size}": 0 for size in _SIZES}
    return dict.fromkeys(range(scenario.world_size), none_wrong)


@program("smoke_barrier", invariants=())
def barrier(ctx: RankContext) -> None:
    """Enter a barrier, the last rank late; observes whether nobody left before it came. All ranks run it.

    Ranks of one machine share a monotonic clock, and may look how long it kept the others waiting.
    """
    pids = [torch.zeros(1, dtype=torch.int64, device=ctx.device) for _ in range(ctx.world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()], device=ctx.device), group=ctx.process_group)
    if ctx.rank == ctx.world_size - 1:
        for _ in seconds_of([int(pid) for pid in pids[:-1]], LATE_S, pause_s=LATE_S / 10):
            pass
    entered_ns = time.monotonic_ns()
    dist.barrier(group=ctx.process_group)
    left_ns = time.monotonic_ns()
    moments = [torch.zeros(2, dtype=torch.int64, device=ctx.device) for _ in range(ctx.world_size)]
    mine = torch.tensor([entered_ns, left_ns], device=ctx.device)
    dist.all_gather(moments, mine, group=ctx.process_group)
    last_entered_ns = max(int(moment[0]) for moment in moments)
    observe_arrived(ctx, "stayed in the barrier until every rank had entered it", left_ns >= last_entered_ns)


@barrier.expects
def _barrier(scenario: Scenario) -> Mapping[int, Facts]:
    return {
        rank: {"stayed in the barrier until every rank had entered it": True} for rank in range(scenario.world_size)
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sum(scenario: Scenario, dtype: torch.dtype, length: int = BLOCK_LENGTH) -> Tensor:
    return torch.stack([summands(rank, dtype, length) for rank in range(scenario.world_size)]).sum(0, dtype=dtype)


def _sparse(rank: int, world_size: int) -> Tensor:
    """Return `world_size + 1` rows of which rank r has row 0 and row r + 1."""
    rows = torch.stack([summands(rank, torch.float32), summands(rank + 1, torch.float32)])
    shape = (world_size + 1, BLOCK_LENGTH)
    return torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), rows, shape, check_invariants=True)


def _uneven_length(destination: int) -> int:
    return min(destination + 1, BLOCK_LENGTH)
