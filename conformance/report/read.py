"""Reads `report.json` back: plain JSON in, frozen values out, and an error that names the field otherwise.

Nothing in a report is executed, imported or looked up: a report from a stranger is data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from conformance.errors import ReportError
from conformance.report.json_report import SCHEMA_VERSION
from conformance.report.stored_report import StoredReport

_JSON_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


class _MismatchError(ValueError):
    """A value is not what its field demands; `path` grows on the way up."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path

    def below(self, step: str) -> _MismatchError:
        return _MismatchError(str(self), step + self.path)


def read_report(path: Path) -> StoredReport:
    """Return the report in `path`, which is a `report.json` or the folder that holds one.

    Raises:
        ReportError: the file cannot be read, is truncated, is of another schema version, or a field has the wrong type
            (the message names it, such as `scenarios[3].subject.verdict`).

    """
    if path.is_dir():
        path = path / "report.json"
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} is not a report: it is not UTF-8 text") from error
    try:
        return parse_report(text)
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from error


def parse_report(text: str) -> StoredReport:
    """Return the report in `text`; raises `ReportError` as `read_report` does."""
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        cut = "; the file ends early" if ends_early else ""
        raise ReportError(f"not valid JSON (line {error.lineno}, column {error.colno}): {error.msg}{cut}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ReportError(f"a report must be a JSON object, got {_name(data)}")
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ReportError(
            f"schema_version {version!r} is not supported; this release of ddp-conformance reads {SCHEMA_VERSION}"
        )
    try:
        report = _decode(data, StoredReport)
    except _MismatchError as error:
        raise ReportError(f"{error.path.removeprefix('.') or 'the report'}: {error}") from error
    assert isinstance(report, StoredReport)
    return report


def report_to_data(value: Any) -> Any:
    """Return a stored value as JSON data; `read_report` gives back an equal value."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: report_to_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: report_to_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [report_to_data(item) for item in value]
    return value


def required_fields(kind: Any) -> list[str]:
    """Return the fields of a dataclass without a default; one with a default is not in reports older than itself."""
    without = (dataclasses.MISSING, dataclasses.MISSING)
    return [field.name for field in dataclasses.fields(kind) if (field.default, field.default_factory) == without]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _decode(data: Any, kind: Any) -> Any:
    """Return `data` as a value of type `kind`; raises `_MismatchError`."""
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
            raise _MismatchError(f"must be one of {', '.join(names)}, got {data!r:.80}")
        return kind(data)
    if kind is float and type(data) is int:
        data = float(data) if abs(data) < 1 << 53 else data
    if kind is float and type(data) is float and not math.isfinite(data):
        raise _MismatchError(f"must be a finite number, got {data}")
    _expect(kind, data)
    return data


def _decode_fields(data: Any, kind: Any) -> Any:
    _expect(dict, data)
    kinds = _field_kinds(kind)
    if unknown := sorted(set(data) - set(kinds)):
        raise _MismatchError("this field is not known", f".{unknown[0]}")
    if missing := [name for name in required_fields(kind) if name not in data]:
        raise _MismatchError("this field is missing", f".{missing[0]}")
    return kind(**{name: _decode_at(f".{name}", data[name], kinds[name]) for name in kinds if name in data})


def _decode_union(data: Any, kinds: tuple[Any, ...]) -> Any:
    if data is None and type(None) in kinds:
        return None
    mismatch = _MismatchError(f"got {_name(data)}")
    for kind in kinds:
        if kind is not type(None):
            try:
                return _decode(data, kind)
            except _MismatchError as error:
                mismatch = error
    raise mismatch


def _decode_at(step: str, data: Any, kind: Any) -> Any:
    try:
        return _decode(data, kind)
    except _MismatchError as error:
        raise error.below(step) from None


def _expect(kind: type, data: Any) -> None:
    if type(data) is not kind:
        raise _MismatchError(f"must be {_JSON_NAMES[kind]}, got {_name(data)}")


def _name(data: Any) -> str:
    return _JSON_NAMES.get(type(data), type(data).__name__)


@cache
def _field_kinds(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
