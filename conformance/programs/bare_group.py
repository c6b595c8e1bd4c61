"""A process group that torch.distributed has no record of, around the backend of one that it has."""

from __future__ import annotations

import torch
import torch.distributed as dist


def bare_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the ranks and the backend of `group` in a bare `ProcessGroup`, which has no store. Local."""
    bare = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    kind = dist.ProcessGroup.BackendType.CUSTOM
    bare._set_default_backend(kind)
    bare._register_backend(device, kind, group._get_backend(device))
    return bare
