"""A backend whose pool starts a thread whenever it has more to do than before, as pools do; they end with the group."""

import dataclasses
import threading
from typing import Any

import torch.distributed as dist

from conformance.backends.gloo import GLOO
from conformance.mutants.relay import Relay


class LazyPool(Relay):
    """Starts one more thread for each all_reduce."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ends = threading.Event()

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        threading.Thread(target=self._ends.wait, name="worker of the pool", daemon=True).start()
        return self.inner.allreduce(tensors, *options)

    def shutdown(self) -> None:
        self._ends.set()
        super().shutdown()


LAZY_POOL = dataclasses.replace(GLOO, name="lazy_pool", create=LazyPool)
