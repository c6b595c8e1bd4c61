"""Watches whether a DDP changes modes of the process, random states, or the module that it wraps.

Hygiene compares a rank before and after a scenario; this compares it before and after each construction, forward,
backward and step, where a change affects the training.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from conformance.surroundings.observable import belongings, foreign_random_states, modes, of_module, of_process

_WATCHED = ("forward", "backward", "optimizer")
#: Options that ask for changes of the module.
_CHANGE_MODULES = ("mixed_precision",)


class Interference:
    """A rank's findings in one scenario; a listener of the program's phases."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._phase, self._before = "", _of_phase()

    @property
    def found(self) -> tuple[str, ...]:
        """A phrase for each change, once."""
        return tuple(dict.fromkeys(self._found))

    def start(self) -> None:
        """Forget the scenario before."""
        self._found.clear()
        self._phase = ""

    def entered(self, phase: str, step: int, sync: bool) -> None:
        """Compare modes and random states with the start of the phase that ends."""
        if self._phase in _WATCHED:
            self._compare(self._phase, self._before, _of_phase())
        self._phase = phase
        if phase in _WATCHED:
            self._before = _of_phase()

    @contextlib.contextmanager
    def construction(self, module: nn.Module, options: Mapping[str, Any]) -> Iterator[None]:
        """Compare process and module before and after the block, which wraps `module`; not if it raises."""
        process, parts, owned = of_process(), _seen_of(of_module, module), _seen_of(belongings, module)
        yield
        self._compare("the constructor", process, of_process())
        if not any(options.get(name) for name in _CHANGE_MODULES):
            self._compare("the constructor", parts, _seen_of(of_module, module))
            now = _seen_of(belongings, module)
            self._compare("the constructor", owned, {name: now.get(name, "taken away") for name in owned})

    def _compare(self, where: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for name in before.keys() | after.keys():
            old, new = before.get(name), after.get(name)
            if old != new:
                self._found.append(f"{where} changed {name}: {old} before, {new} after")


def _of_phase() -> Mapping[str, Any]:
    """Return the state that no phase may change; not torch's random state, from which dropout draws."""
    return {**modes(), **foreign_random_states()}


def _seen_of(look: Callable[[nn.Module], Mapping[str, Any]], module: object) -> Mapping[str, Any]:
    """Return `look(module)`; nothing if it is no module, as in scenarios whose DDP must refuse it."""
    return look(module) if isinstance(module, nn.Module) else {}
