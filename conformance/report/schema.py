"""The JSON Schema of `report.json`, derived from the values that it is read into.

`python -m conformance.report.schema` prints it; `report.schema.json` beside this module is the published copy.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from conformance.codec import required_fields
from conformance.run.report import SCHEMA_VERSION, Report

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def report_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) that every report of this schema version satisfies."""
    definitions: dict[str, Any] = {}
    _schema_of(Report, definitions)
    root = definitions.pop(Report.__name__)
    root["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Report of ddp-conformance",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin = typing.get_origin(kind)
    if kind is Any:
        return {}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema_of(one, definitions) for one in typing.get_args(kind)]}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(typing.get_args(kind)[0], definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema_of(typing.get_args(kind)[1], definitions)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    name = str(kind.__name__)
    if name not in definitions:
        definitions[name] = {}  # reserved, should it contain itself
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        definitions[name] = {
            "description": (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " "),
            "type": "object",
            "properties": {field: _schema_of(hints[field], definitions) for field in names},
            "required": list(required_fields(kind)),
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


if __name__ == "__main__":
    print(json.dumps(report_schema(), indent=1))
