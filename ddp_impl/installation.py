"""Putting our DistributedDataParallel in the place of torch's, for code that knows only torch's name."""

from __future__ import annotations

import sys

import torch.nn.parallel
import torch.nn.parallel.distributed

from ddp_impl.distributed import DistributedDataParallel

TORCH_DDP = torch.nn.parallel.distributed.DistributedDataParallel


def install() -> None:
    """Replace torch's class by ours wherever it can be imported from; calling it twice changes nothing.

    Modules that imported the class by name before get the new one too, so `isinstance` agrees everywhere. Only objects
    that exist already stay what they are. Undo it with `uninstall`.
    """
    _replace(TORCH_DDP, DistributedDataParallel)


def uninstall() -> None:
    """Give torch's class its place back."""
    _replace(DistributedDataParallel, TORCH_DDP)


def _replace(old: type, new: type) -> None:
    for name, module in list(sys.modules.items()):
        if name == "ddp_impl" or name.startswith("ddp_impl."):
            continue
        for attribute in ("DistributedDataParallel", "DDP"):
            if getattr(module, "__dict__", {}).get(attribute) is old:
                setattr(module, attribute, new)
