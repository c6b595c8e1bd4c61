"""A process group in Python that hands everything to gloo: what a backend that is wrong in one method is made from."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from conformance.backends.gloo import GLOO
from conformance.recorder.recorded_group import as_process_group

_RELAYED = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single", "gather",
    "scatter", "_reduce_scatter_base", "reduce_scatter_single", "alltoall_base", "all_to_all_single", "send", "recv",
    "barrier",
)  # fmt: skip


class Relay(dist.ProcessGroup):
    """A process group in Python that hands everything to gloo."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self.inner = as_process_group(GLOO.create(store, rank, world_size, timeout), store)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name by which torch asks."""
        return "relay"


def _relay(method: str) -> Callable[..., Any]:
    def issue(self: Relay, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, method)(*args, **kwargs)

    return issue


for _method in _RELAYED:
    if hasattr(dist.ProcessGroup, _method):  # torch >= 2.12 has new names for some
        setattr(Relay, _method, _relay(_method))
