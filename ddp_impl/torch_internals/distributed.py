"""What groups and backends do not tell, and what torch.distributed registers under names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import (
    BuiltinCommHookType,
    DebugLevel,
    GradBucket,
    Store,
    _register_process_group,
    _unregister_process_group,
    get_debug_level,
)
from torch.distributed.distributed_c10d import default_pg_timeout

from ddp_impl.torch_internals.names import required

__all__ = [
    "BuiltinCommHookType",
    "DebugLevel",
    "GradBucket",
    "GroupBackend",
    "Store",
    "get_debug_level",
]


#: Lets functional collectives find a group under a name. torch itself gives each group one name, for good.
register_group_name: Callable[[Any, dist.ProcessGroup], None] = _register_process_group
#: Lets a name stand for no group any more.
unregister_group_name: Callable[[Any], None] = _unregister_process_group


def reduces_on_host(group: dist.ProcessGroup) -> bool:
    """Return whether a group communicates tensors on the CPU, as one does that was made for every kind of device."""
    return torch.device("cpu") in group._device_types


def counter_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[], int] | None:
    """Return what tells how many collectives a group has begun with tensors on `device`; None where nothing does."""
    try:
        count: Callable[[], int] = group._get_backend(device)._get_sequence_number_for_group  # type: ignore[attr-defined]
        count()
    except (RuntimeError, AttributeError):  # a backend of the user's own, or one without numbers
        return None
    return torch.compiler.disable(count)  # Dynamo, which may trace the hook that calls it, warns of C++ functions


def num_gloo_threads(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many threads the gloo backend of a group has; 0 where it does not tell."""
    return int(getattr(getattr(group._get_backend(device), "options", None), "_threads", 0))


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a group's backend waits for other ranks; torch's default where it does not tell."""
    timeout: timedelta = getattr(getattr(group._get_backend(device), "options", None), "_timeout", default_pg_timeout)
    return timeout


def overlapped_optimizer(optim: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch's optimizer that steps inside a backward, by means of a comm hook; for `_register_fused_optim`."""
    name = "torch.distributed.algorithms._optimizer_overlap._as_overlapped_optim"
    return required("_register_fused_optim", name)(optim, parameters, *args, **kwargs)
