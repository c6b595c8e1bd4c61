"""A relay over gloo that gets its members by handles. It has no bug: mutants are made from it."""

import dataclasses
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from conformance.backends.backend import Backend
from conformance.backends.gloo import GLOO
from conformance.errors import present
from conformance.mutants.relay import Relay
from conformance.recorder.recorded_group import as_process_group


class Reconfigurable(Relay):
    """Hands everything to a gloo that is not connected yet."""

    def connect(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        """Return gloo's group."""
        return as_process_group(present(GLOO.create_unconnected)(store, rank, world_size, timeout), store)

    def rank(self) -> int:
        """Return the rank that gloo has now."""
        return self.inner.rank()

    def size(self) -> int:
        """Return how many ranks gloo has now."""
        return self.inner.size()

    def get_reconfigure_handle(self) -> str:
        """Return gloo's."""
        return str(self.inner.get_reconfigure_handle())

    def reconfigure(self, options: Any) -> Any:
        """Have gloo connect."""
        return self.inner.reconfigure(options)


def reconfigured(kind: type[Reconfigurable]) -> Backend:
    """Return the backend whose groups that get members by handles are of a class: a class decorator."""
    connected = type(kind.__name__, (Relay,), {"__doc__": kind.__doc__})
    return dataclasses.replace(GLOO, name=kind.__name__, create=connected, create_unconnected=kind)


RECONFIGURABLE = reconfigured(Reconfigurable)
