"""What a training can observe besides gradients, parameters and buffers: it must be the same with DDP as without.

Names say where a value was observed; values are plain data.
"""

import _random
import ctypes
import random
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

#: A module's public tables of hooks that change its calls.
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_GLOBAL_HOOKS = tuple(
    name for name, value in vars(nn_module).items() if name.startswith("_global_") and isinstance(value, dict)
)


#: The state of NumPy's generator in memory: 624 words, and how many of them are used up.
_MERSENNE_TWISTER_BYTES = 625 * 4
#: Offset and size of the state in Python's generator object.
_OF_PYTHON = object.__basicsize__, _random.Random.__basicsize__ - object.__basicsize__


def of_process() -> dict[str, Any]:
    """Return the process's modes and random states; takes about 50 microseconds."""
    return {
        **modes(),
        "torch's random state": _shown(torch.get_rng_state().numpy().tobytes()),
        **foreign_random_states(),
    }


def foreign_random_states() -> dict[str, Any]:
    """Return the random states from which torch never draws, and a module's forward only if its user wants it.

    Takes about 4 microseconds, since it reads memory: Python and NumPy take 7 and 80 to copy their states.
    """
    offset, size = _OF_PYTHON
    gauss = random._inst.gauss_next  # type: ignore[attr-defined]
    return {
        "Python's random state": _shown(ctypes.string_at(id(random._inst) + offset, size))
        + ("" if gauss is None else f" and {gauss}"),
        "NumPy's random state": _of_numpy(np.random.get_bit_generator()),  # type: ignore[attr-defined]
    }


def _of_numpy(generator: Any) -> str:
    """Return a digest of the generator's state, without the normal number that NumPy keeps for the next call."""
    if isinstance(generator, np.random.MT19937):
        return _shown(ctypes.string_at(generator.ctypes.state_address, _MERSENNE_TWISTER_BYTES))
    return _shown(repr(generator.state).encode())


def modes() -> dict[str, Any]:
    """Return the process's modes, which affect later computations; takes about 15 microseconds."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch._C._is_any_autocast_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "module hook": {name: len(getattr(nn_module, name)) for name in _GLOBAL_HOOKS},
        "warnings filters": len(warnings.filters),
        **_of_accelerator(),
    }


def _of_accelerator() -> dict[str, Any]:
    """Return the accelerator's current device and stream; nothing if it was not used."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.get_device_module(accelerator).is_initialized():
        return {}
    return {
        "current device": torch.accelerator.current_device_index(),
        "current stream": str(torch.accelerator.current_stream()),
    }


def of_module(module: nn.Module) -> dict[str, Any]:
    """Return the mode, type and replaced methods of every part of a module, and the attributes of its tensors.

    A DDP may add hooks and attributes, but must keep those in `belongings`.
    """
    seen: dict[str, Any] = {"keys of state_dict": list(module.state_dict())}
    for name, part in module.named_modules():
        where = name or "the module"
        seen[f"{where}: training"] = part.training
        seen[f"{where}: type"] = type(part).__qualname__
        seen[f"{where}: replaced methods"] = sorted(
            attribute for attribute in vars(part) if callable(getattr(type(part), attribute, None))
        )
    for name, parameter in module.named_parameters():
        seen |= {f"{name}: {what}": value for what, value in _of_tensor(parameter)}
        if parameter.grad is not None:
            seen |= {f"gradient of {name}: {what}": value for what, value in _of_tensor(parameter.grad)}
    for name, buffer in module.named_buffers():
        seen |= {f"{name}: {what}": value for what, value in _of_tensor(buffer)}
    return seen


def belongings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes and hooks of every part and parameter, which are the user's before a DDP wraps the module.

    The value of a public number, text or bool is returned, of anything else "there".
    """
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        where = name or "the module"
        for attribute, value in vars(part).items():
            plain = isinstance(value, bool | int | float | str) and not attribute.startswith("_")
            if attribute != "training":  # a mode
                found[f"{where}: attribute {attribute}"] = value if plain else "there"
        found |= {f"{where}: hook {key} of {table}": "there" for table in _HOOKS for key in vars(part).get(table, ())}
    for name, parameter in module.named_parameters():
        found |= {f"{name}: attribute {attribute}": "there" for attribute in parameter.__dict__}
        found |= {f"{name}: tensor hook {key}": "there" for key in parameter._backward_hooks or ()}
    return found


def of_output(output: Any) -> dict[str, Any]:
    """Return the type of every part of an output, in order, and the attributes of its tensors."""
    seen: dict[str, Any] = {}
    for where, part in _parts("output", output):
        seen[f"{where}: type"] = type(part).__qualname__
        if isinstance(part, Tensor):
            seen |= {f"{where}: {what}": value for what, value in _of_tensor(part)}
    return seen


def of_input(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of an input tensor, and its version."""
    return {f"input: {what}": value for what, value in (*_of_tensor(tensor), ("version", tensor._version))}


def _of_tensor(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    yield "requires_grad", tensor.requires_grad
    yield "is_leaf", tensor.is_leaf
    yield "dtype", str(tensor.dtype)
    if is_lazy(tensor):  # it has no shape, and raises
        return
    yield "shape", list(tensor.shape)
    yield "layout", str(tensor.layout)
    yield "inference", tensor.is_inference()
    if tensor.layout is torch.strided and tensor.numel():  # strides of nothing mean nothing
        yield "strides", list(tensor.stride())


def _parts(where: str, value: Any, within: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    yield where, value
    if any(value is each for each in within):
        return
    within = (*within, value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(f"{where}[{key!r}]", item, within)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _parts(f"{where}[{index}]", item, within)
    elif hasattr(value, "__dataclass_fields__"):
        for name in filter(partial(hasattr, value), value.__dataclass_fields__):
            yield from _parts(f"{where}.{name}", getattr(value, name), within)


def _shown(state: bytes) -> str:
    return f"{hash(state) & (2**64 - 1):016x}"
