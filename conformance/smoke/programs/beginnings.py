"""Programs of the smoke ladder about what no requirement asks by itself: a group's names, sparse sums, its end."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.rank_context import RankContext
from conformance.waiting.kept_waiting import process_seconds

#: Threads of a destroyed group have so long to end, where the machine lets the process have that time.
_PATIENCE_S = 0.5


@judged("smoke_presence", always("rank and size of the group"))
def presence(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask the default group who it is; nobody communicates."""
    group = ctx.process_group
    return {
        "rank and size of the group": lambda: first_wrong(
            unlike("group.rank() is", group.rank(), ctx.rank), unlike("group.size() is", group.size(), ctx.world_size)
        )
    }


@judged("smoke_name", always("name of the group's backend", "name of the group"))
def name(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask the default group for its backend's name, and for its own."""
    group: Any = ctx.process_group

    def of_backend() -> str:
        found = group.name()
        return f"group.name() is {found!r}" if found in ("", "undefined") else ""

    def of_group() -> str:
        return unlike("group.group_name is", repr(group.group_name), repr(_world.pg_names[group]))

    return {"name of the group's backend": of_backend, "name of the group": of_group}


@judged("smoke_sparse", always("sum of sparse tensors"))
def sparse(ctx: RankContext) -> Mapping[str, Trial]:
    """Sum tensors of which each rank has row 0 and a row of its own."""

    def summed() -> str:
        rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        shape = (ctx.world_size + 1, 2)
        sent = torch.sparse_coo_tensor(torch.tensor([[0, ctx.rank + 1]]), rows, shape, check_invariants=True)
        tensor = sent.to(ctx.device)
        dist.all_reduce(tensor, group=ctx.process_group)
        expected = [[float(ctx.world_size), 2.0 * ctx.world_size], *[[3.0, 4.0]] * ctx.world_size]
        return unlike("the sum is", tensor.to_dense().tolist(), expected)

    return {"sum of sparse tensors": summed}


@judged("smoke_end", always("threads of a destroyed group"))
def end(ctx: RankContext) -> Mapping[str, Trial]:
    """Destroy two groups; look for Python threads that the second leaves while the caller still holds it."""

    def destroyed() -> Any:
        group: Any = dist.new_group()
        dist.all_reduce(torch.ones(1, device=ctx.device), group=group)
        dist.destroy_process_group(group)
        return group

    def left() -> str:
        held = [destroyed()]  # what the process keeps once, such as a pool that groups share, is there now
        before = set(threading.enumerate())
        held.append(destroyed())
        for _ in process_seconds(_PATIENCE_S, pause_s=0.01):
            names = [thread.name for thread in threading.enumerate() if thread not in before]
            if not names:
                return ""
        return f"{len(names)} left: {', '.join(names)}"

    return {"threads of a destroyed group": left}
