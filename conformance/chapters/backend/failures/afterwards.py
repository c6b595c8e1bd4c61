"""Program `destroyed_groups`."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, always, judged
from conformance.programs.rank_context import RankContext

_NAMES = ("all_reduce of a destroyed group", "broadcast of a destroyed group")


@judged("destroyed_groups", always(*_NAMES))
def destroyed_groups(ctx: RankContext) -> Mapping[str, Trial]:
    """Call operations of a group that has been destroyed."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1, device=ctx.device), group=group)
    dist.destroy_process_group(group)

    def refused(operation: str) -> str:
        tensor = torch.ones(2, device=ctx.device)
        try:
            if operation == "broadcast":
                dist.broadcast(tensor, group_src=0, group=group)
            else:
                dist.all_reduce(tensor, group=group)
        except Exception:
            return ""
        return f"raised nothing, and left {tensor.tolist()}"

    return {_NAMES[0]: lambda: refused("all_reduce"), _NAMES[1]: lambda: refused("broadcast")}
