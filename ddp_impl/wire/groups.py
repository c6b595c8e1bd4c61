"""What a process group says of itself: also one that was built by hand, which torch.distributed has no record of.

`torch.distributed.get_rank(group)` and its like look the group up among those that `init_process_group` and `new_group`
have made. A bare `ProcessGroup`, or one of `torch.distributed._dist2.new_group`, is none of them.
"""

from __future__ import annotations

import torch.distributed as dist


def rank_in(group: dist.ProcessGroup) -> int:
    """Return this process's rank in `group`; -1 if it is not in it (`GroupMember.NON_GROUP_MEMBER`)."""
    return group.rank() if isinstance(group, dist.ProcessGroup) else -1


def size_of(group: dist.ProcessGroup) -> int:
    """Return the number of ranks of `group`; -1 if this process is not in it."""
    return group.size() if isinstance(group, dist.ProcessGroup) else -1


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the name of the group's backend."""
    try:
        return str(dist.get_backend(group))
    except ValueError:
        return group.name()
