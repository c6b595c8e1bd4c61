"""Expected facts as plain data, on their way from the process that computed them.

Expected facts hold tensors and matchers, and matchers hold predicates: functions of a module. No code travels: a
predicate is a name in this package, which both processes have. The reader imports, calls and builds nothing else,
whoever wrote the data.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Callable, Mapping
from enum import Enum
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Facts

#: The two facts of a rank that hold expected facts: the tensors, and data that refer to them.
TENSORS, REST = "tensors", "rest"

_OURS = "conformance"
_COLLECTIONS: Mapping[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size,
}  # fmt: skip
_MAPPINGS: Mapping[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "mappingproxy": MappingProxyType}
_NAMED_BY_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def packed(expected: Mapping[int, Facts]) -> dict[str, Any]:
    """Return the expected facts of all ranks as two facts: a list of tensors, and JSON data that refer to them.

    Raises `TypeError` for a value that is neither data nor defined in this package.
    """
    packer = _Packer()
    rest = packer.pack(dict(expected))
    return {TENSORS: packer.tensors, REST: rest}


def unpacked(facts: Facts) -> dict[int, Facts]:
    """Return the expected facts that `packed` was given; their tensors are on the CPU.

    Raises `ValueError`, `TypeError`, `LookupError` or `AttributeError` for data that `packed` does not write.
    """
    return _unpack(facts[REST], facts[TENSORS])


class _Packer:
    """Writes a value as None, a bool, a number, a text, or a list that begins with the name of its kind."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            number = self._numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            return ["tensor", number]
        if kind.__name__ in _COLLECTIONS:
            return [kind.__name__, *map(self.pack, value)]
        if kind.__name__ in _MAPPINGS:
            return [kind.__name__, *([self.pack(key), self.pack(item)] for key, item in value.items())]
        if isinstance(value, _NAMED_BY_TORCH):
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, Enum):
            return ["enum", *_place(kind), value.name]
        if isinstance(value, type) or (isinstance(value, FunctionType) and "<" not in value.__qualname__):
            return ["named", *_place(value)]
        if dataclasses.is_dataclass(value):
            fields = [self.pack(getattr(value, field.name)) for field in dataclasses.fields(value)]
            return ["record", *_place(kind), *fields]
        raise TypeError(f"an expected fact cannot hold a {kind.__module__}.{kind.__qualname__}")


def _unpack(data: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(data, list):
        return data
    kind, *rest = data
    if kind == "tensor":
        return tensors[rest[0]]
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind]([_unpack(item, tensors) for item in rest])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_unpack(key, tensors): _unpack(item, tensors) for key, item in rest})
    if kind == "torch":
        named = getattr(torch, rest[0])
        if not isinstance(named, _NAMED_BY_TORCH):
            raise TypeError(f"torch.{rest[0]} is no dtype, layout or memory format")
        return named
    found = _named(*rest[:2])
    if kind == "named":
        return found
    if kind == "enum" and issubclass(found, Enum):
        return found[rest[2]]
    if kind == "record" and dataclasses.is_dataclass(found):
        record = object.__new__(found)  # type: ignore[arg-type]
        for field, value in zip(dataclasses.fields(found), rest[2:], strict=True):
            object.__setattr__(record, field.name, _unpack(value, tensors))
        return record
    raise ValueError(f"unknown kind of data {kind!r}")


def _place(value: Any) -> tuple[str, str]:
    """Return module and qualified name of a class or function, by which the other process finds it."""
    module, name = value.__module__, value.__qualname__
    if _named(module, name) is not value:
        raise TypeError(f"{module}.{name} is another object than this one")
    return module, name


def _named(module: str, name: str) -> Any:
    if module.partition(".")[0] != _OURS:
        raise TypeError(f"only what {_OURS} defines can be in expected facts, not {module}")
    return operator.attrgetter(name)(importlib.import_module(module))
