"""Mutants of chapter lifecycle: backends that keep what they should let go, or let go what is needed."""

from __future__ import annotations

import os
import threading
from typing import Any

from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import of_class


@of_class
class keeps_descriptors(Relay):
    """BUG: a destroyed group keeps a descriptor."""

    _kept: list[int] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept.append(os.open("/dev/null", os.O_RDONLY))


@of_class
class keeps_threads(Relay):
    """BUG: a destroyed group keeps a thread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@of_class
class is_shut_down_once(Relay):
    """BUG: to shut a group down twice is an error."""

    shut = False

    def shutdown(self) -> None:
        if self.shut:
            raise RuntimeError("shut down already")
        self.shut = True
        super().shutdown()


@of_class
class ends_the_others(Relay):
    """BUG: a group that is destroyed takes the sums of all others with it."""

    _ended = 0

    def shutdown(self) -> None:
        type(self)._ended += 1
        super().shutdown()

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        if self._ended:
            tensors[0].zero_()
        return self.inner.allreduce(tensors, *options)
