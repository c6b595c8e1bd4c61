"""Mutants of chapter optional: backends that are not what they say."""

import itertools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import of_class

_numbers = itertools.count()


@of_class
class promises_coalescing(Relay):
    """BUG: a backend that cannot coalesce says that it can."""

    supports_coalescing = True


@of_class
class numbers_its_name(Relay):
    """BUG: each group gives the backend a name of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._number = next(_numbers)

    def getBackendName(self) -> str:
        return f"relay{self._number}"


@of_class
class has_another_name_alone(Relay):
    """BUG: a group of one rank gives the backend another name."""

    def getBackendName(self) -> str:
        return "relay" if self.size() > 1 else "self"


@of_class
class shows_the_default_timeout(Relay):
    """BUG: its options show half an hour, whatever timeout a group was made with."""

    options = SimpleNamespace(_timeout=timedelta(minutes=30))


@of_class
class hands_out_everybodys_store(Relay):
    """BUG: all groups hand out the one store that ranks have met in."""

    def get_group_store(self) -> Store:
        store = super().get_group_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return store
