"""Detects changes of dictionaries and functions by their words in memory, without touching the objects.

Access through Python changes an object's reference count, and in a forked process the kernel then copies its page:
3,000 functions cost a new rank 13 ms, and their words 1 ms (CPython 3.11). `tells_changes` is false where an
interpreter keeps no version of dictionaries, as from CPython 3.14 on.
"""

import gc
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = 8
#: The range of addresses.
_LOWEST, _HIGHEST = 2**12, 2**56


class _Everything:
    """All memory of this process as a numpy array, of which only mapped parts may be read."""

    __array_interface__: Mapping[str, Any] = {
        "data": (_LOWEST, True), "shape": ((_HIGHEST - _LOWEST) // _WORD,), "typestr": "<u8", "version": 3,
    }  # fmt: skip


class Words:
    """The words of some groups of objects as they were when this was made."""

    def __init__(self, groups: Sequence[tuple[Mapping[str, Any], Sequence[FunctionType]]]) -> None:
        watched = [_watched(mapping, functions) for mapping, functions in groups]
        # Keeps the objects alive, so that no other object gets their address.
        self._alive = watched, [_parts(one) for _, functions in groups for one in functions]
        addresses = [[address for value in values for address in _words_of(value)] for values in watched]
        self._places = (np.array(list(itertools.chain.from_iterable(addresses)), dtype=np.int64) - _LOWEST) // _WORD
        self._groups = np.repeat(np.arange(len(addresses)), [len(each) for each in addresses])
        self._before = self._read()

    def changed(self) -> list[int]:
        """Return the sorted numbers of groups that changed, even if the change was undone."""
        now = self._read()
        return [] if np.array_equal(now, self._before) else np.unique(self._groups[now != self._before]).tolist()

    def _read(self) -> NDArray[np.uint64]:
        return _MEMORY[self._places]


@cache
def tells_changes() -> bool:
    """Whether words show every change here: of a value in a dictionary, and of a function's code."""
    if not _CODE or np.intp(0).itemsize != _WORD:
        return False
    values: dict[str, object] = {"one": object(), "other": object()}
    before = Words([(values, ()), ({}, ())])
    values["one"] = object()
    return before.changed() == [0]


def _dictionary(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's `__dict__`, or the dictionary behind the view of a class."""
    if not isinstance(mapping, MappingProxyType):
        return mapping  # type: ignore[return-value]
    (dictionary,) = gc.get_referents(mapping)
    return dictionary


def _watched(mapping: Mapping[str, Any], functions: Iterable[FunctionType]) -> list[object]:
    functions = list(functions)
    return [_dictionary(mapping), *functions, *(one.__kwdefaults__ for one in functions if one.__kwdefaults__)]


def _parts(function: Any) -> tuple[object, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _words_of(value: object) -> list[int]:
    """Return the addresses of a dictionary's words, or of a function's code and defaults."""
    words = range(2, dict.__basicsize__ // _WORD) if isinstance(value, dict) else _CODE
    return [id(value) + word * _WORD for word in words]


def _where_code_is() -> tuple[int, ...]:
    """Return which words of a function are its code and its defaults; none if they cannot be found."""

    def probe(one: object = object(), *, other: object = object()) -> None: ...

    words = _MEMORY[(id(probe) - _LOWEST) // _WORD :][: FunctionType.__basicsize__ // _WORD].tolist()
    found = tuple(words.index(id(part)) for part in _parts(probe) if id(part) in words)
    return found if len(found) == 3 else ()


_MEMORY = np.asarray(_Everything())
_CODE = _where_code_is()
