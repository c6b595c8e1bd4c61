"""Expected facts on their way from the process that computed them: plain data, whatever they contain.

Expected facts hold tensors, matchers, and matchers hold predicates: lambdas and inner functions, which pickle refuses.
A predicate travels as its code and what it encloses; both processes run the same interpreter on the same files.
Tensors travel beside the rest as a list, because a rank's message has a shorter way for them.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Facts

#: The facts under which a rank reports expected facts: the tensors, and everything else.
TENSORS, REST = "tensors", "rest"


def packed(expected: Mapping[int, Facts]) -> dict[str, Any]:
    """Return the expected facts of all ranks as two facts: a list of tensors, and bytes (uint8) that refer to them."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(dict(expected))
    return {TENSORS: pickler.tensors, REST: torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}


def unpacked(facts: Facts) -> dict[int, Facts]:
    """Return the expected facts that `packed` was given; their tensors are on the CPU."""
    expected: dict[int, Facts] = _Unpickler(io.BytesIO(facts[REST].numpy().tobytes()), facts[TENSORS]).load()
    return expected


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number

    def reducer_override(self, value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:
        if not isinstance(value, FunctionType) or _is_importable(value):
            return NotImplemented
        enclosed = tuple(cell.cell_contents for cell in value.__closure__ or ())
        code = marshal.dumps(value.__code__)
        return _function, (value.__module__, code, value.__name__, value.__defaults__, enclosed)


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        tensor: Tensor = self._tensors[number]
        return tensor


def _is_importable(function: FunctionType) -> bool:
    return getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function


def _function(
    module: str, code: bytes, name: str, defaults: tuple[Any, ...] | None, enclosed: tuple[Any, ...]
) -> FunctionType:
    names = vars(importlib.import_module(module))
    return FunctionType(marshal.loads(code), names, name, defaults, tuple(map(CellType, enclosed)))
