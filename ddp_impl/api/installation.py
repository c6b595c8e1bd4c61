"""Putting our DistributedDataParallel in the place of torch's, for code that knows only torch's name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

from ddp_impl.api.distributed import DistributedDataParallel
from ddp_impl.api.torch_names import TORCH_DDP

#: Names under which modules had our class before it was installed; None while it is not.
_own_names: set[tuple[str, str]] | None = None


def install() -> None:
    """Replace torch's class by ours wherever it can be imported from; calling it twice changes nothing.

    Modules that imported the class before, under any name, get the new one too.
    Only objects that exist already stay what they are, and references kept elsewhere than in a module's names: a
    module-level tuple of classes, a default argument. Install before importing what keeps such. Undo it with
    `uninstall`.
    """
    global _own_names
    if _own_names is None:
        _own_names = {(module.__name__, name) for module, name in _names_of(DistributedDataParallel)}
    for module, name in _names_of(TORCH_DDP):
        setattr(module, name, DistributedDataParallel)


def uninstall() -> None:
    """Give torch's class its place back, also in modules imported since; without `install` it changes nothing.

    Names that our class had before, taken from `ddp_impl` itself, keep it. A module imported since then has torch's
    class again, whichever way it named it.
    """
    global _own_names
    if _own_names is None:
        return
    for module, name in _names_of(DistributedDataParallel):
        if (module.__name__, name) not in _own_names:
            setattr(module, name, TORCH_DDP)
    _own_names = None


def is_installed() -> bool:
    """Whether torch's name means our class now."""
    return _own_names is not None


def _names_of(wanted: type) -> Iterator[tuple[ModuleType, str]]:
    """Yield every module outside this package that has `wanted` among its names, with the name."""
    for full_name, module in list(sys.modules.items()):
        if full_name == "ddp_impl" or full_name.startswith("ddp_impl.") or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is wanted:
                yield module, name
