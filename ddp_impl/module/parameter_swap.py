"""Putting other tensors in the place of a module's parameters while it runs: only its table changes, and is put back.

`swapped` puts all of them there at once; `read_through` makes each when somebody reads it, by whatever way.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ddp_impl.torch_internals.tensors import parameter_table, refresh_recurrent, saves_state, set_parameter_table

Replace = Callable[[Tensor], Tensor]


class ParameterSwap:
    """The parameters of `module` that may be replaced: all but those with a name in `kept` or an owner that `keeps`."""

    def __init__(
        self, module: nn.Module, kept: Collection[str] = (), keeps: Callable[[nn.Module], bool] = lambda _: False
    ) -> None:
        """Find them; shared parameters are replaced by one tensor everywhere."""
        self._names_of: dict[nn.Module, list[str]] = {}
        for module_name, owner in module.named_modules():
            if keeps(owner):
                continue
            for own_name, _ in owner.named_parameters(recurse=False, remove_duplicate=False):
                name = f"{module_name}.{own_name}" if module_name else own_name
                if name not in kept:
                    self._names_of.setdefault(owner, []).append(own_name)
        self.active = False

    def has_any_of(self, root: nn.Module) -> bool:
        """Whether `root` or a module in it owns one of the parameters."""
        return any(module in self._names_of for module in root.modules())

    @contextlib.contextmanager
    def swapped(self, replace: Replace) -> Iterator[None]:
        """Show `replace(each)` in place of every parameter, or its stand-in; nested use changes nothing."""
        if self.active:
            yield
            return
        self.active = True
        tables = {owner: parameter_table(owner) for owner in self._names_of}
        before = {owner: self._own(owner, _as_it_is(table)) for owner, table in tables.items()}
        own = {owner: self._own(owner, table) for owner, table in tables.items()}
        replacements = {tensor: replace(tensor) for tensors in own.values() for tensor in tensors.values()}
        try:
            _install({owner: {name: replacements[each] for name, each in own[owner].items()} for owner in own})
            yield
        finally:
            self.active = False
            _install(before)

    @contextlib.contextmanager
    def read_through(self, replace: Replace, root: nn.Module | None = None) -> Iterator[None]:
        """Show `replace(each)` to whoever reads a parameter of `root`, or its stand-in; nested use changes nothing.

        `replace` must return the same tensor for a parameter as long as anybody holds that.
        """
        if self.active:
            yield
            return
        modules = self._names_of if root is None else [each for each in root.modules() if each in self._names_of]
        before = [(owner, parameter_table(owner)) for owner in modules]
        self.active = True
        try:
            for owner, table in before:
                set_parameter_table(owner, _ReadThrough(table, self._own(owner, _as_it_is(table)), replace))
            yield
        finally:
            self.active = False
            for owner, table in before:
                _hand_back(table, parameter_table(owner))
                set_parameter_table(owner, table)
                refresh_recurrent(owner)

    def _own(self, owner: nn.Module, table: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what the names of the owner's parameters stand for in `table`."""
        return {name: table[name] for name in self._names_of[owner] if table.get(name) is not None}


class _ReadThrough(dict[str, Any]):
    """A module's table of parameters that shows others in place of its `own`, but not to `state_dict()`."""

    def __init__(self, table: dict[str, Any], own: Mapping[str, Tensor], replace: Replace) -> None:
        super().__init__(table)
        self._own, self._replace = own, replace
        self._shown: dict[str, weakref.ref[Tensor]] = {}  # a forward frees what it has done with

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        own = self._own.get(name)
        if own is None or own is not value:
            return value
        shown = self._replace(own)
        self._shown[name] = weakref.ref(shown)
        return shown

    def __setitem__(self, name: str, value: Any) -> None:
        # `functional_call` puts back what it was shown.
        shown = self._shown.get(name)
        is_shown = shown is not None and value is not None and value is shown()
        super().__setitem__(name, self._own[name] if is_shown else value)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> Any:
        return {name: self[name] for name in self}.values()

    def items(self) -> Any:
        if saves_state():
            return super().items()
        return {name: self[name] for name in self}.items()

    def __reduce__(self) -> Any:
        return dict, (_as_it_is(self),)  # a copy of the module has the parameters


def _as_it_is(table: dict[str, Any]) -> dict[str, Any]:
    """Return what is in `table`, not what it shows."""
    return {name: dict.__getitem__(table, name) for name in table}


def _hand_back(table: dict[str, Any], used: dict[str, Any]) -> None:
    """Do to `table` what somebody has done to the one that was `used` in its place."""
    now = _as_it_is(used)
    if list(now) != list(table) or any(now[name] is not table[name] for name in table):
        table.clear()
        table.update(now)


def _install(tensors: Mapping[nn.Module, Mapping[str, Tensor]]) -> None:
    for owner, own in tensors.items():
        parameter_table(owner).update(own)
        refresh_recurrent(owner)
