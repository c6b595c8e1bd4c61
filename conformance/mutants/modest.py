"""A backend made from gloo that declares little, and that can be aborted: gloo declares what it can and cannot abort.

Requirements about what is *not* declared, and about abort, can be tried on it. It has no bug: mutants are made from it.
"""

import dataclasses
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from conformance.backends.gloo import GLOO
from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import WorkAround

_LOOKS_EVERY_S = 0.01


class Modest(Relay):
    """Hands everything to gloo; abort() ends every wait() for a collective that all backends owe."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world_size, timeout)
        self.aborted = threading.Event()

    def abort(self) -> None:
        """End all waits; returns at once."""
        self.aborted.set()


class Abortable(WorkAround):
    """gloo's Work, or an error once the group is aborted."""

    def __init__(self, inner: Any, aborted: threading.Event) -> None:
        super().__init__(inner)
        self.aborted = aborted

    def wait(self, *timeout: Any) -> bool:
        """Look now and then whether the group is aborted; gloo's Work also completes when its timeout is over."""
        limited = bool(timeout) and timeout[0] > timedelta()
        while not (limited or self.inner.is_completed()):
            if self.aborted.wait(_LOOKS_EVERY_S):
                raise RuntimeError("the group was aborted while this operation waited")
        return super().wait(*timeout)


def _abortable(method: str) -> Callable[..., Any]:
    def issue(self: Modest, *args: Any) -> Any:
        return Abortable(getattr(self.inner, method)(*args), self.aborted)

    return issue


for _method in ("allreduce", "broadcast", "allgather", "barrier"):
    setattr(Modest, _method, _abortable(_method))

MODEST = dataclasses.replace(GLOO, name="modest", capabilities=frozenset({"abort", "timeouts"}), create=Modest)
