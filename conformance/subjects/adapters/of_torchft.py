"""Adapters of torchft's two DDPs, with a manager that never sees a failure.

torchft's own `Manager` starts servers, and looks for live replicas before every step. A stand-in reduces over the
scenario's process group, as the manager does without a failure.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.subjects.adapters.adapter import group_of, only


class _Done:
    def __init__(self, tensor: Tensor) -> None:
        self._future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._future.set_result(tensor)

    def wait(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Tensor]:
        return self._future


class _SteadyManager:
    """The part of `torchft.manager.Manager` that its DDPs use, where the quorum is always the whole group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> _Done:
        """Replace `tensor` by its mean over the group, having waited for it; every rank must call it."""
        dist.all_reduce(tensor, group=self._group)
        tensor.div_(self._group.size())
        return _Done(tensor)


def managed(module: nn.Module, **options: Any) -> nn.Module:
    """Return `torchft.ddp.DistributedDataParallel` around `module`; it always searches for unused parameters."""
    from torchft.ddp import DistributedDataParallel

    names = "broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view"
    taken = only({**options, "find_unused_parameters": False}, "process_group", *names)
    taken.pop("process_group", None)
    return DistributedDataParallel(_SteadyManager(group_of(options)), module, **taken)


def pure(module: nn.Module, **options: Any) -> nn.Module:
    """Return `torchft.ddp.PureDistributedDataParallel` around `module`."""
    from torchft.ddp import PureDistributedDataParallel

    only(options, "process_group")
    return PureDistributedDataParallel(_SteadyManager(group_of(options)), module)
