"""Mutants of chapter optional: backends that are not what they say."""

import contextlib
import itertools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from conformance.mutants.reconfigurable import Reconfigurable, reconfigured
from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import WorkDone, of_class

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


@of_class
class calls_no_post_hook(Relay):
    """BUG: post-hooks are taken and never called."""

    def register_post_hook(self, number: int, hook: Any) -> None:
        pass


@of_class
class keeps_removed_hooks(Relay):
    """BUG: a pre-hook that is removed is still called."""

    def unregister_pre_hook(self, number: int) -> None:
        pass


@of_class
class numbers_post_hooks_anew(Relay):
    """BUG: a post-hook gets another number than the pre-hook of its operation."""

    def register_post_hook(self, number: int, hook: Any) -> None:
        def renumbered(given: Any) -> None:
            hook(SimpleNamespace(name=given.name, work=given.work, op_id=given.op_id + 1))

        self.inner.register_post_hook(number, renumbered)


@of_class
class swallows_errors_of_hooks(Relay):
    """BUG: an error that a pre-hook raises is lost, and the operation goes on."""

    def register_pre_hook(self, number: int, hook: Any) -> None:
        def quiet(given: Any) -> None:
            with contextlib.suppress(Exception):
                hook(given)

        self.inner.register_pre_hook(number, quiet)


@reconfigured
class numbers_from_the_end(Reconfigurable):
    """BUG: the last handle of the list becomes rank 0."""

    def reconfigure(self, options: Any) -> Any:
        options.handles = options.handles[::-1]
        return super().reconfigure(options)


@reconfigured
class keeps_its_first_members(Reconfigurable):
    """BUG: a group that has members keeps them, whatever handles it gets."""

    has_members = False

    def reconfigure(self, options: Any) -> Any:
        work = WorkDone() if self.has_members else super().reconfigure(options)
        self.has_members = True
        return work
