"""Putting other tensors in the place of a module's parameters while it runs.

Only the module's own table of parameters is changed and put back; the parameters keep their identity, their gradients
and their hooks, so everything that DDP does with them goes on as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from torch import Tensor, nn

from ddp_impl.torch_internals import parameter_table, refresh_recurrent

Replace = Callable[[nn.Parameter], Tensor]


class ParameterSwap:
    """The parameters of `module` that may be replaced: all but those with a name in `kept` or an owner that `keeps`."""

    def __init__(
        self, module: nn.Module, kept: Collection[str] = (), keeps: Callable[[nn.Module], bool] = lambda _: False
    ) -> None:
        """Find them; shared parameters are replaced by one tensor everywhere."""
        self._slots: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module_name, owner in module.named_modules():
            if keeps(owner):
                continue
            for own_name, parameter in owner.named_parameters(recurse=False):
                name = f"{module_name}.{own_name}" if module_name else own_name
                if name not in kept:
                    self._slots.append((owner, own_name, parameter))
        self._slots_of: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}
        for slot in self._slots:
            self._slots_of.setdefault(slot[0], []).append(slot)
        self.active = False

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that own at least one of the parameters."""
        return list(self._slots_of)

    @contextlib.contextmanager
    def swapped(self, replace: Replace) -> Iterator[None]:
        """Show `replace(parameter)` in place of every parameter while the block runs; nested use changes nothing."""
        if self.active:
            yield
            return
        self.active = True
        replacements = {parameter: replace(parameter) for _, _, parameter in self._slots}
        try:
            _install(self._slots, replacements)
            yield
        finally:
            self.active = False
            _restore(self._slots)

    def show(self, owner: nn.Module, replace: Replace) -> None:
        """Replace the parameters of `owner` alone, until `hide`."""
        slots = self._slots_of[owner]
        _install(slots, {parameter: replace(parameter) for _, _, parameter in slots})

    def hide(self, owner: nn.Module) -> None:
        """Give `owner` its own parameters back."""
        _restore(self._slots_of[owner])


def _install(slots: list[tuple[nn.Module, str, nn.Parameter]], replacements: dict[nn.Parameter, Tensor]) -> None:
    for owner, name, parameter in slots:
        parameter_table(owner)[name] = replacements[parameter]
    _refresh_recurrent(slots)


def _restore(slots: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for owner, name, parameter in slots:
        parameter_table(owner)[name] = parameter
    _refresh_recurrent(slots)


def _refresh_recurrent(slots: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for owner in {owner for owner, _, _ in slots if isinstance(owner, nn.RNNBase)}:
        refresh_recurrent(owner)
