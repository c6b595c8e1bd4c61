"""Detects replaced functions on which verdicts rely.

A subject that replaces `dist.all_reduce`, `nn.Linear.forward`, `SGD.step` or a function of the harness, and does not
restore it, would change the verdict of every later scenario. Ranks with a replaced function are replaced.
"""

from __future__ import annotations

import builtins
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch

from conformance.surroundings.memory import Words, tells_changes

#: Modules of which no scenario may replace a function that they have.
_MODULES = (
    "builtins", "contextlib", "copy", "numpy.random", "os", "random", "time", "torch", "torch._utils", "torch.autograd",
    "torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.utils", "torch.linalg", "torch.nn",
    "torch.nn.functional", "torch.nn.parallel", "torch.nn.parallel.distributed", "torch.utils.checkpoint",
)  # fmt: skip
#: Modules, and with a dot their submodules, of which no scenario may replace a function or method that they define.
_OWN_CODE = (
    "torch._tensor", "torch.autograd.", "torch.distributed.algorithms.", "torch.distributed.distributed_c10d",
    "torch.nn.init", "torch.nn.modules.", "torch.nn.parallel.distributed", "torch.nn.parameter", "torch.nn.utils.",
    "torch.optim.", "conformance.models.", "conformance.programs.", "conformance.recorder.",
    "conformance.surroundings.", "conformance.workers.",
)  # fmt: skip
#: C++ classes that Python code can change.
_NATIVE_CLASSES = ("ProcessGroup", "Work")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_DYNAMO = os.path.join(_TORCH, "_dynamo", "")


def make_first_uses() -> None:
    """Make torch's changes at first use now.

    It wraps the `step` of an optimizer class at its first instance, imports a module at the first `record_function`,
    and registers kernels at the first `vmap`.
    """
    with torch.autograd.profiler.record_function("first use"):
        pass
    matrix = torch.nn.Parameter(torch.zeros(1, 1))  # one optimizer takes matrices only
    torch.func.vmap(torch.abs)(matrix.detach())
    optimizers: list[Any] = torch.optim.Optimizer.__subclasses__()
    for optimizer in optimizers:
        if optimizer.__module__.startswith("torch.optim."):
            optimizer([matrix])


@cache
def inherited() -> ReliedFunctions:
    """Return the functions of the process at the first call, in the zygote, so that ranks need not collect them."""
    return ReliedFunctions()


def inherited_now() -> ReliedFunctions:
    """Return the current functions, after an import that may have replaced some."""
    if inherited().changes():
        look_anew()
    return inherited()


def look_anew() -> None:
    """Make `inherited` return the current functions."""
    inherited.cache_clear()
    inherited()


class ReliedFunctions:
    """The functions as this process has them when this is made; `changes` compares."""

    def __init__(self) -> None:
        self._spaces = tuple(_Space(*space) for space in _spaces())
        self._words = Words([(space.now, space.functions) for space in self._spaces]) if tells_changes() else None

    def changes(self) -> tuple[str, ...]:
        """Return a phrase for every replaced function.

        Where words changed for another reason, such as a counter or a wrapper of torch.compile, names are compared.
        """
        doubtful = self._spaces if self._words is None else [self._spaces[number] for number in self._words.changed()]
        return tuple(f"function replaced: {space.name}.{name}" for space in doubtful for name in space.changed())


class _Space:
    def __init__(self, name: str, space: Mapping[str, Any], own: bool) -> None:
        self.name = name
        self.now = space
        found = {
            key: value
            for key, value in space.items()
            if _is_code(value) and (not own or getattr(value, "__module__", "") == name)
        }
        self.names = tuple(found)
        self._values = tuple(found.values())
        self.functions = [value for value in self._values if isinstance(value, FunctionType)]
        self._codes = list(map(_code, self.functions))
        self._all_names = frozenset(space)

    def changed(self) -> Iterator[str]:
        """Yield the names of replaced functions, except for wrappers of torch.compile."""
        for name, value in zip(self.names, self._values, strict=True):
            now = self.now.get(name)
            if now is not value and not _wrapped_by_dynamo(now, value):
                yield name
        for function, code in zip(self.functions, self._codes, strict=True):
            if not _same(_code(function), code):
                yield function.__name__
        is_module = "__file__" in self._all_names
        for name in self.now.keys() - self._all_names:
            # A method that a class did not have hides that of its base; a module's new name hides a built-in one.
            now = self.now[name]
            if _is_code(now) and (hasattr(builtins, name) if is_module else not _inherits_through_dynamo(now)):
                yield name


def _code(function: FunctionType) -> tuple[object, ...]:
    keywords = function.__kwdefaults__ or {}
    return function.__code__, *(function.__defaults__ or ()), *keywords, *keywords.values()


def _same(now: Sequence[object], before: Sequence[object]) -> bool:
    """Whether both are the same objects; equality would not do, and tensors cannot be compared."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _is_code(value: object) -> bool:
    return callable(value) or type(value) in (property, staticmethod, classmethod)


def _wrapped_by_dynamo(now: Any, before: Any) -> bool:
    """Whether torch.compile has wrapped a function, as it does at first use."""
    code = getattr(now, "__code__", None)
    return (
        code is not None
        and code.co_filename.startswith(_DYNAMO)
        and getattr(now, "_torchdynamo_orig_callable", before) is before
    )


def _inherits_through_dynamo(now: Any) -> bool:
    """Whether torch.compile has wrapped an inherited method of torch."""
    wrapped = getattr(now, "_torchdynamo_orig_callable", None)
    code = getattr(wrapped, "__code__", None)
    return _wrapped_by_dynamo(now, wrapped) and code is not None and code.co_filename.startswith(_TORCH)


def _spaces() -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield the namespaces by name, and whether only their own definitions count."""
    prefixes = tuple(name for name in _OWN_CODE if name.endswith("."))
    for name, module in list(sys.modules.items()):
        is_own = name in _OWN_CODE or name.startswith(prefixes)
        if name in _MODULES:
            yield name, vars(module), False
        elif is_own:
            yield name, vars(module), True
        if is_own:
            for attribute, value in vars(module).items():
                if issubclass(type(value), type) and value.__module__ == name:
                    yield f"{name}.{attribute}", vars(value), False
    yield "torch.Tensor", vars(torch.Tensor), False
    native = sys.modules["torch._C._distributed_c10d"]
    for attribute in _NATIVE_CLASSES:
        yield attribute, vars(getattr(native, attribute)), False
