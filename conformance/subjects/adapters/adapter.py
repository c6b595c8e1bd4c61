"""Shared by the adapters of other projects' DDPs.

An adapter makes a DDP callable like every subject, and adds nothing that the DDP does not do. An option that the DDP
lacks is unsupported, unless it has its default.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from conformance.errors import instance
from conformance.programs.rank_context import Unsupported

#: Defaults of options; all others are off.
_DEFAULTS = {"broadcast_buffers": True, "init_sync": True}


def only(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the given options called `names`; ranks raise `Unsupported` for another that is not at its default."""
    for name, value in options.items():
        if name not in names and value is not None and value is not _DEFAULTS.get(name, False):
            raise Unsupported(f"it has no option {name}")
    return {name: options[name] for name in names if name in options}


def group_of(options: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group among `options`, the default group where there is none."""
    return instance(options.get("process_group") or dist.group.WORLD, dist.ProcessGroup)


class InPlace(nn.Module):
    """A module that a DDP has changed in place, with the surface of a wrapper: `module`, forward, `no_sync`."""

    def __init__(self, module: nn.Module, set_sync: Callable[[bool], None] | None = None) -> None:
        super().__init__()
        self.module = module
        self._set_sync = set_sync

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; raises `Unsupported` if the DDP cannot."""
        if self._set_sync is None:
            raise Unsupported("it has no no_sync")
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)
