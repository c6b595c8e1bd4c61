"""`torch.sim`: the functions of a device's module for torch, its users and the harness."""

import contextlib
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from conformance.backends.sim_device.build import load

NAME = "sim"


@cache
def install(*, late: bool = False, seed: int = 1) -> Any:
    """Register `torch.device("sim")` and `torch.sim` in this process, and return the compiled device.

    With `late`, memory and results are poison until a wait. `seed` chooses the roundings; 0: as the CPU.
    """
    device = load()
    device.configure(late, seed)
    backend_registration.rename_privateuse1_backend(NAME)
    module = _torch_module(device)
    torch._register_device_module(NAME, module)
    backend_registration.generate_methods_for_privateuse1_backend()
    return device


def _torch_module(device: Any) -> ModuleType:
    module = ModuleType(f"torch.{NAME}")

    def index_of(which: Any) -> int:
        index = which if isinstance(which, int) else torch.device(which).index if which is not None else None
        return device.current_device() if index is None else index

    @contextlib.contextmanager
    def on_device(which: Any) -> Iterator[None]:
        before = device.current_device()
        device.set_device(index_of(which))
        try:
            yield
        finally:
            device.set_device(before)

    @contextlib.contextmanager
    def on_stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before_device, before = device.current_device(), torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)  # which makes the stream's device the current one
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            device.set_device(before_device)

    attributes: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": device.device_count,
        "current_device": device.current_device,
        "set_device": lambda which: device.set_device(index_of(which)),
        "get_device_name": lambda which=None: "a simulated device",
        "synchronize": lambda which=None: torch.accelerator.synchronize(index_of(which)),
        "current_stream": lambda which=None: torch.accelerator.current_stream(index_of(which)),
        "set_stream": torch.accelerator.set_stream,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "device": on_device,
        "stream": on_stream,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda which=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, which=None: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "memory_allocated": lambda which=None: torch.accelerator.memory_allocated(index_of(which)),
        "max_memory_allocated": lambda which=None: torch.accelerator.max_memory_allocated(index_of(which)),
        "reset_peak_memory_stats": lambda which=None: torch.accelerator.reset_peak_memory_stats(index_of(which)),
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda: True,
        "take_syncs": device.take_syncs,
        "start_trace": device.start_trace,
        "take_trace": device.take_trace,
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
