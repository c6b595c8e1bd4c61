"""A process group that torch.distributed has no record of, around the backend of one that it has."""

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from conformance.programs.rank_context import RankContext


def bare_group(ctx: RankContext, group: dist.ProcessGroup, store: Store | None = None) -> dist.ProcessGroup:
    """Return the ranks and the backend of `group` in a bare `ProcessGroup` with this store, or with none. Local.

    Unsupported where a backend's groups are process groups written in Python, which hold no backend.
    """
    made: dist.ProcessGroup = getattr(group, "inner", group)  # of a recorded group
    if type(made) is not dist.ProcessGroup:
        ctx.unsupported(f"a group of this backend is a {type(made).__name__} and holds no backend of its own")
    arguments: list[Any] = [*([] if store is None else [store]), group.rank(), group.size()]
    bare = dist.ProcessGroup(*arguments)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    bare._set_default_backend(kind)
    bare._register_backend(ctx.device, kind, group._get_backend(ctx.device))
    return bare
