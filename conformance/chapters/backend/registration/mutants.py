"""Mutants of chapter registration: backends that take themselves for the only one of their kind."""

from typing import Any

import torch.distributed as dist

from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import of_class

_made: dict[Any, Any] = {}


@of_class
class knows_one_name(Relay):
    """BUG: a group can be made only as long as no other backend has been registered."""

    def __init__(self, *args: Any) -> None:
        names = _made.setdefault("names", len(dist.Backend.backend_list))
        if len(dist.Backend.backend_list) > names:
            raise RuntimeError(f"unknown name {dist.Backend.backend_list[-1]}")
        super().__init__(*args)


@of_class
class shares_its_connections(Relay):
    """BUG: groups of the same size share their connections, once two have been made."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        super().__init__(store, rank, world_size, timeout)
        earlier = _made.setdefault(("shared", world_size), [])
        if len(earlier) > 1:
            self.inner = earlier[-1]
        earlier.append(self.inner)


@of_class
class ends_the_group_before(Relay):
    """BUG: a new group takes what the group made before had reserved."""

    ended = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        earlier = _made.get("latest")
        if earlier is not None and earlier.size() == self.size():
            earlier.ended = True
        _made["latest"] = self

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        if self.ended:
            tensors[0].zero_()
        return self.inner.allreduce(tensors, *options)
