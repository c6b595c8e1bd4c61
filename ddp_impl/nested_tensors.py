"""The tensors in what modules take and return: found wherever they are, or replaced in ordinary containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`: containers, mappings, dataclasses, owned RRefs, and attributes of other objects.

    Looking into any object's attributes goes beyond torch, whose search stops at types it does not know and then
    reduces nothing (pytorch/pytorch#124666). Each object is visited once.
    """
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
            continue
        if item is None or isinstance(item, (str, bytes, int, float, complex, type, torch.nn.Module)):
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(reversed(list(item)))
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, entry.name, None) for entry in reversed(dataclasses.fields(item)))
        elif _is_rref(item):
            if item.is_owner():
                stack.append(item.local_value())
        elif not callable(item):
            attributes = dict(getattr(item, "__dict__", {}))
            for name in getattr(type(item), "__slots__", ()):
                if isinstance(name, str) and hasattr(item, name):
                    attributes[name] = getattr(item, name)
            stack.extend(reversed(list(attributes.values())))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function(tensor)` for every tensor in its lists, tuples, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)._make(map_tensors(function, item) for item in value)  # type: ignore[attr-defined]
    if isinstance(value, tuple) or type(value) is list:
        return type(value)(map_tensors(function, item) for item in value)
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not (is_record or isinstance(value, (list, dict))):
        return value
    # It may have attributes, and its constructor may take anything: it is copied, and its contents replaced.
    replaced: Any = copy.copy(value)
    if isinstance(value, list):
        replaced[:] = [map_tensors(function, item) for item in value]
    elif isinstance(value, dict):
        for key, item in value.items():
            replaced[key] = map_tensors(function, item)
    else:
        for field in dataclasses.fields(value):  # a frozen one, too; and `replace` would run its __init__ again
            object.__setattr__(replaced, field.name, map_tensors(function, getattr(value, field.name, None)))
    return replaced


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in its containers on `device`; those in host memory may be overwritten then.

    Of pinned memory a copy that does not block would read later what the user has written there meanwhile.
    """
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=not tensor.is_pinned()), value)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with every floating-point tensor in its containers in `dtype`; None leaves them as they are."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _is_rref(item: object) -> bool:
    if not torch.distributed.rpc.is_available():
        return False
    from torch.distributed.rpc import RRef

    return isinstance(item, RRef)
