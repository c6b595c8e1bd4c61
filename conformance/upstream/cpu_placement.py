"""Makes CUDA devices mean the CPU, so that tests written for GPUs run on a machine without one.

Only the ranks of torch's tests use this shim, with every DDP alike. A test that checks the device itself still fails,
with torch's DDP as well, and therefore does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed.device_mesh
from torch import Tensor, nn
from torch.utils._device import _device_constructors

from conformance.errors import certain

_CPU = torch.device("cpu")


def place_on_cpu(rank: int) -> None:
    """Make CUDA devices mean the CPU in this process, until it ends."""
    _redirect_constructors()
    _redirect_moves()
    _redirect_cuda_functions(rank)
    _redirect_streams()
    _redirect_device_mesh()


def is_cuda(device: object) -> bool:
    """Whether `device`, as torch's functions take it, is a CUDA device; an integer is one, too."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(device: Any) -> Any:
    """Return the CPU if `device` is a CUDA device, else `device`."""
    return _CPU if is_cuda(device) else device


def _redirect_constructors() -> None:
    constructors = _device_constructors()
    for name, function in list(vars(torch).items()):
        if callable(function) and getattr(function, "__hash__", None) and function in constructors:
            setattr(torch, name, _with_device_on_cpu(function))


def _with_device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def construct(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return construct


def _redirect_moves() -> None:
    for owner in (Tensor, nn.Module):
        _replace(owner, to=_move_to_cpu(owner.to), cuda=lambda self, *args, **kwargs: self)


def _move_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(self, *(on_cpu(args[0]), *args[1:]) if args else args, **kwargs)

    return to


class OnlyStream:
    """A stand-in for every stream: on the CPU there is one, and each operation ends before the next begins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> OnlyStream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class PastEvent:
    """A stand-in for every event on the only stream: it is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Return at once."""

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


def _redirect_streams() -> None:
    for owner in (torch, torch.cuda):
        _replace(owner, Stream=OnlyStream, Event=PastEvent)
    _replace(torch.cuda, stream=lambda stream: nullcontext(), current_stream=lambda device=None: OnlyStream())
    _replace(torch.accelerator, current_stream=lambda device=None: OnlyStream())


def _redirect_cuda_functions(rank: int) -> None:
    _replace(  # by one function object for each, because torch._dynamo wants to tell them apart
        torch.cuda,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        manual_seed=lambda seed: None,
        current_device=lambda: rank,
    )


def _redirect_device_mesh() -> None:
    original = torch.distributed.device_mesh.init_device_mesh

    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if is_cuda(device_type) else device_type, *args, **kwargs)

    _replace(torch.distributed.device_mesh, init_device_mesh=init_device_mesh)
    _replace(torch.distributed, init_device_mesh=init_device_mesh)


def _replace(owner: object, **attributes: Any) -> None:
    for name, value in attributes.items():
        certain(hasattr(owner, name), f"this torch has no {owner}.{name}")
        setattr(owner, name, value)
