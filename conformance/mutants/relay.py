"""A process group in Python that hands everything to gloo: what a backend that is wrong in one method is made from."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from conformance.backends.gloo import GLOO
from conformance.recorder.recorded_group import as_process_group

RELAYED = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "_allgather_base",
    "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "gather", "gather_single",
    "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "send", "recv",
    "recv_anysource", "barrier", "monitored_barrier", "register_pre_hook", "register_post_hook", "unregister_pre_hook",
    "unregister_post_hook",
)  # fmt: skip


class Relay(dist.ProcessGroup):
    """A process group in Python that hands everything to gloo."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self.inner = self.connect(store, rank, world_size, timeout)
        self._name = self._description = ""

    def connect(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        """Return gloo's group."""
        return as_process_group(GLOO.create(store, rank, world_size, timeout), store)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name by which torch asks."""
        return "relay"

    # Without these torch can neither name a group in Python, as functional collectives ask for it, nor destroy it.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keep the name that torch gives."""
        self._name = name
        self.inner._set_group_name(name)

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Keep the description that torch gives."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description."""
        return self._description

    def _get_sequence_number_for_group(self) -> int:
        number: int = self.inner._get_sequence_number_for_group()
        return number

    def get_group_store(self) -> Store:
        """Return the store by which the ranks found each other."""
        return self.inner.get_group_store()

    def set_timeout(self, timeout: timedelta) -> None:
        """Hand it to gloo, which looks at it in every later call."""
        self.inner.set_timeout(timeout)

    def shutdown(self) -> None:
        """Shut gloo's group down."""
        self.inner.shutdown()


def _relay(method: str) -> Callable[..., Any]:
    def issue(self: Relay, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, method)(*args, **kwargs)

    return issue


for _method in RELAYED:
    if hasattr(dist.ProcessGroup, _method):  # newer versions of torch have new names, and hooks
        setattr(Relay, _method, _relay(_method))
