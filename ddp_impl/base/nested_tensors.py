"""The tensors in what modules take and return: found wherever they are, or replaced in ordinary containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain, compress
from operator import is_
from typing import Any

import torch
from torch import Tensor


def find_tensors(value: Any) -> list[Tensor]:
    """Return every tensor in `value`: in containers, mappings, dataclasses, owned RRefs, attributes of other objects.

    Looking into any object's attributes goes beyond torch, whose search stops at types it does not know and then
    reduces nothing (pytorch/pytorch#124666). Each object is visited once, level by level and type by type, so that a
    step of Python's is one of a level, not of an object: a forward may return rows of text beside its tensors.
    """
    if type(value) is Tensor:
        return [value]
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}  # holds the objects, whose ids others could get
    level = [value]
    while level:
        below: list[Any] = []
        kinds = list(dict.fromkeys(map(type, level)))
        for kind in kinds:
            if issubclass(kind, _WITHOUT_TENSORS):
                continue
            items = level if len(kinds) == 1 else list(compress(level, map(partial(is_, kind), map(type, level))))
            if issubclass(kind, Tensor):
                tensors += items
                continue
            unseen = dict(zip(map(id, items), items, strict=True))
            if not seen.keys().isdisjoint(unseen):
                unseen = {key: item for key, item in unseen.items() if key not in seen}
            seen.update(unseen)
            below += _contents(kind, unseen.values())
        level = below
    return tensors


#: Types whose objects hold no tensors that forward returns.
_WITHOUT_TENSORS = (type(None), str, bytes, int, float, complex, type, torch.nn.Module)


def _contents(kind: type, items: Collection[Any]) -> Iterator[Any]:
    """Return what `items`, objects of type `kind`, hold."""
    if issubclass(kind, Mapping):
        return chain.from_iterable(item.values() for item in items)
    if issubclass(kind, (list, tuple, set, frozenset)):
        return chain.from_iterable(items)
    if dataclasses.is_dataclass(kind):
        names = [entry.name for entry in dataclasses.fields(kind)]
        return (getattr(item, name, None) for name in names for item in items)
    if _is_rref(kind):
        return (item.local_value() for item in items if item.is_owner())
    if callable(next(iter(items), None)):
        return iter(())
    slots = [name for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    in_slots = (getattr(item, name) for name in slots for item in items if hasattr(item, name))
    return chain(in_slots, chain.from_iterable(getattr(item, "__dict__", {}).values() for item in items))


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
    return map_tensors(lambda tensor: _moved(tensor, device), value)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    try:
        may_change = tensor.is_pinned()
    except RuntimeError:  # within torch.vmap, where this cannot be asked
        may_change = True
    return tensor.to(device, non_blocking=not may_change)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with every floating-point tensor in its containers in `dtype`; None leaves them as they are."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _is_rref(kind: type) -> bool:
    if not torch.distributed.rpc.is_available():
        return False
    from torch.distributed.rpc import RRef

    return issubclass(kind, RRef)
