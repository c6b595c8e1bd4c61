"""Frozen values as JSON data and back: every field has the type of its dataclass, or an error names the field.

Reading executes, imports and looks up nothing.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_CONTAINERS = (dict, list)
_SCALARS = frozenset({str, int, bool, type(None)})


class MismatchError(ValueError):
    """A value does not fit its field; the message begins with its path, such as `faults[0].rank`."""


def parse_object(text: str, what: str) -> dict[str, Any]:
    """Return the JSON object in `text`; error messages call it `what`, such as `a report`.

    Raises `ValueError`, with line and column if the text is truncated or no JSON, and if it holds no JSON object.
    """
    try:
        data = json.loads(
            text, parse_constant=_no_constant, parse_int=_integer, parse_float=_number, object_pairs_hook=_object
        )
        if "\\u" in text:  # half of a surrogate pair, which cannot be printed, is always an escape
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        cut = "; the file ends early" if ends_early else ""
        raise ValueError(f"not valid JSON (line {error.lineno}, column {error.colno}): {error.msg}{cut}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(data).__name__}")
    return data


def encode(value: Any) -> Any:
    """Return a frozen value as plain JSON data; `decode` gives back an equal one.

    A number that JSON cannot hold becomes its name, such as `nan`, in a field of type `float | str`.
    """
    if type(value) in _SCALARS:  # as nearly all are
        return value
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(data: Any, kind: type[T]) -> T:
    """Return parsed JSON as a value of the dataclass `kind`; fields with a default may be missing.

    Raises `MismatchError`, also for an error in the `__post_init__` of a dataclass.
    """
    try:
        value = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise MismatchError(": ".join(filter(None, (place.strip(".`"), message)))) from error
    if unknown := _unknown(data, msgspec.to_builtins(value, enc_hook=dict)):
        raise MismatchError(f"{unknown.removeprefix('.')}: this field is not known")
    return value


def _unknown(data: Any, known: Any) -> str:
    """Return the path of a field of `data` that is not among the fields `known`, which msgspec would ignore."""
    if type(data) is dict:
        if strange := data.keys() - known.keys():
            return f".{min(strange)}"
        for name, item in data.items():
            if type(item) in _CONTAINERS and (found := _unknown(item, known[name])):
                return f".{name}{found}"
    elif type(data) is list:
        for index, item in enumerate(data):
            if type(item) in _CONTAINERS and (found := _unknown(item, known[index])):
                return f"[{index}]{found}"
    return ""


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
        raise ValueError(f"{digits[:20]}... is larger than 64 bits" if len(digits) > 20 else f"{digits} is too large")
    return int(digits)


def _number(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits:.20} is no finite number")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has {name!r:.80} twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
