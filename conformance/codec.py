"""Frozen values as JSON data and back: every field has the type that its dataclass says, or an error names the field.

Nothing that is read is executed, imported or looked up: what a stranger wrote is data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

_JSON_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


class MismatchError(ValueError):
    """A value does not fit its field; `path`, such as `.faults[0].rank`, grows while the error passes up."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def __str__(self) -> str:
        """Return path and message."""
        return f"{self.path.removeprefix('.')}: {self.args[0]}" if self.path else str(self.args[0])

    def below(self, step: str) -> MismatchError:
        """Return the same error with `step` before its path."""
        return MismatchError(self.args[0], step + self.path)


def parse_object(text: str, what: str) -> dict[str, Any]:
    """Return the JSON object in `text`; error messages call it `what`, such as `a report`.

    Raises `ValueError`, with line and column if the text is truncated or no JSON, and if it holds no JSON object.
    """
    try:
        data = json.loads(text, parse_constant=_no_constant, parse_int=_integer, object_pairs_hook=_object)
        if "\\u" in text:  # half of a surrogate pair cannot be printed, and comes as an escape only
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        cut = "; the file ends early" if ends_early else ""
        raise ValueError(f"not valid JSON (line {error.lineno}, column {error.colno}): {error.msg}{cut}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be a JSON object, got {name_of(data)}")
    return data


def name_of(data: Any) -> str:
    """Return JSON's name for the type of `data`."""
    return _JSON_NAMES.get(type(data), type(data).__name__)


@cache
def required_fields(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass that have no default; data of earlier releases may lack fields with one."""
    without = (dataclasses.MISSING, dataclasses.MISSING)
    return tuple(field.name for field in dataclasses.fields(kind) if (field.default, field.default_factory) == without)


def encode(value: Any) -> Any:
    """Return a frozen value as plain JSON data; `decode` gives back an equal one.

    A number that JSON cannot hold becomes its name, such as `nan`: where one may occur, the field is `float | str`.
    """
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"{digits[:20]}... is larger than 64 bits" if len(digits) > 20 else f"{digits} is too large")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has {name!r:.80} twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def decode(data: Any, kind: Any) -> Any:
    """Return parsed JSON as a value of type `kind`: a frozen dataclass, or any type that its fields may have.

    Raises `MismatchError`, and whatever the `__post_init__` of a dataclass raises.
    """
    origin = typing.get_origin(kind)
    if kind is Any:
        return data
    if origin in (types.UnionType, typing.Union):
        return _decode_union(data, typing.get_args(kind))
    if origin is tuple:
        item_kind = typing.get_args(kind)[0]
        _expect(list, data)
        return tuple(_decode_at(f"[{index}]", item, item_kind) for index, item in enumerate(data))
    if origin is Mapping:
        _expect(dict, data)
        return {key: _decode_at(f".{key}", item, typing.get_args(kind)[1]) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_fields(data, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [member.value for member in kind]
        if data not in names:
            raise MismatchError(f"must be one of {', '.join(names)}, got {data!r:.80}")
        return kind(data)
    if kind is float and type(data) is int and abs(data) < 1 << 53:
        return data
    if kind is float and type(data) is float and not math.isfinite(data):
        raise MismatchError(f"must be a finite number, got {data}")
    _expect(kind, data)
    return data


def _decode_fields(data: Any, kind: Any) -> Any:
    _expect(dict, data)
    kinds = _field_kinds(kind)
    if unknown := sorted(set(data) - set(kinds)):
        raise MismatchError("this field is not known", f".{unknown[0]}")
    if missing := [name for name in required_fields(kind) if name not in data]:
        raise MismatchError("this field is missing", f".{missing[0]}")
    return kind(**{name: _decode_at(f".{name}", data[name], kinds[name]) for name in kinds if name in data})


def _decode_union(data: Any, kinds: tuple[Any, ...]) -> Any:
    if data is None and type(None) in kinds:
        return None
    mismatch = MismatchError(f"got {name_of(data)}")
    for kind in kinds:
        if kind is not type(None):
            try:
                return decode(data, kind)
            except MismatchError as error:
                mismatch = error
    raise mismatch


def _decode_at(step: str, data: Any, kind: Any) -> Any:
    try:
        return decode(data, kind)
    except MismatchError as error:
        raise error.below(step) from None


def _expect(kind: type, data: Any) -> None:
    if type(data) is not kind:
        raise MismatchError(f"must be {_JSON_NAMES[kind]}, got {name_of(data)}")


@cache
def _field_kinds(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
