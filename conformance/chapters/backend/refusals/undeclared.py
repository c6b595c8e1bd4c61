"""Program `undeclared_call`: calls that need a capability which the backend does not declare."""

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, judged, unlike
from conformance.programs.operations.store_messages import Board
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

#: The group's timeout: where one rank refuses, another may wait for it.
_TIMEOUT = timedelta(seconds=1.5)
_PATIENCE = timedelta(seconds=5)

#: A call in a group of its own: returns what is wrong with what it did; raises if it is refused.
Call = Callable[[RankContext, Any], str]


def _sparse(ctx: RankContext, group: Any) -> str:
    """Sum sparse tensors, each rank's with an element of its own and one of all."""
    places = torch.tensor([[0, ctx.rank + 1]])
    tensor = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (ctx.world_size + 1,)).to(ctx.device)
    dist.all_reduce(tensor, group=group)
    return unlike(
        "the sum of all_reduce is", tensor.to_dense().tolist(), [float(ctx.world_size), *[2.0] * ctx.world_size]
    )


def _tags(ctx: RankContext, group: Any) -> str:
    """Send two messages from rank 0 to rank 1, which asks for them in another order."""
    if ctx.rank == 0:
        works = [
            dist.isend(torch.full((2,), float(tag), device=ctx.device), group=group, group_dst=1, tag=tag)
            for tag in (1, 2)
        ]
        for work in works:
            work.wait()  # type: ignore[union-attr]
    if ctx.rank != 1:
        return ""
    got = {tag: torch.zeros(2, device=ctx.device) for tag in (2, 1)}
    works = [dist.irecv(tensor, group=group, group_src=0, tag=tag) for tag, tensor in got.items()]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return unlike("by tag came", {tag: tensor[0].item() for tag, tensor in got.items()}, {2: 2.0, 1: 1.0})


def _any_source(ctx: RankContext, group: Any) -> str:
    """Send from the last rank to rank 0, which asks for a message of anybody."""
    if ctx.rank == ctx.world_size - 1:
        dist.send(torch.full((2,), 5.0, device=ctx.device), group=group, group_dst=0)
    if ctx.rank != 0:
        return ""
    tensor = torch.zeros(2, device=ctx.device)
    sender = dist.recv(tensor, group=group)
    return unlike("sender and message are", (sender, tensor.tolist()), (ctx.world_size - 1, [5.0, 5.0]))


def _local_synchronization(ctx: RankContext, group: Any) -> str:
    """Make a group of the first two ranks without the others."""
    if ctx.rank > 1:
        return ""
    made = dist.new_group([0, 1], timeout=_TIMEOUT, use_local_synchronization=True)
    tensor = torch.ones(1, device=ctx.device)
    dist.all_reduce(tensor, group=made)
    return unlike("the sum of both is", tensor.item(), 2.0)


def _monitored_barrier(ctx: RankContext, group: Any) -> str:
    """Enter a monitored barrier, but not on the last rank."""
    if ctx.rank == ctx.world_size - 1:
        return ""
    group.monitored_barrier(_TIMEOUT, False)
    return "returned as if all ranks had come"


def _abort(ctx: RankContext, group: Any) -> str:
    if ctx.rank == ctx.world_size - 1:
        return ""
    work = dist.all_reduce(torch.ones(4, device=ctx.device), group=group, async_op=True)
    ends: list[str] = []
    waiter = threading.Thread(target=_wait, args=(work, ends), daemon=True)
    waiter.start()
    group.abort()
    waiter.join(_TIMEOUT.total_seconds() / 3)
    return "" if ends else "raised nothing, and a wait() in the group goes on"


def _wait(work: Any, ends: list[str]) -> None:
    try:
        work.wait()
    except Exception as error:
        ends.append(str(error))
    else:
        ends.append("")


CALLS: Mapping[str, Call] = {
    "sparse": _sparse,
    "tags": _tags,
    "any_source": _any_source,
    "local_synchronization": _local_synchronization,
    "monitored_barrier": _monitored_barrier,
    "abort": _abort,
}


def _names(scenario: Scenario) -> tuple[str, ...]:
    return (str(scenario.arguments["capability"]),)


@judged("undeclared_call", _names)
def undeclared_call(ctx: RankContext) -> Mapping[str, Trial]:
    """Make the call that needs the capability; an error is as good as what it says."""
    (name,) = _names(ctx.scenario)
    call = CALLS[name.removeprefix("call of ")]

    def tried() -> str:
        group: Any = dist.new_group(timeout=_TIMEOUT)
        board = Board("undeclared")
        try:
            return call(ctx, group)
        except Exception as error:
            return "" if str(error) else f"raised {type(error).__name__} without a word"
        finally:
            board.put(f"done/{ctx.rank}")
            board.lacking([f"done/{rank}" for rank in range(ctx.world_size)], _PATIENCE)

    return {name: tried}
