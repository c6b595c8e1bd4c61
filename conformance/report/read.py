"""Reads `report.json` back: plain JSON in, frozen values out, and an error that names the field otherwise.

Nothing in a report is executed, imported or looked up: a report from a stranger is data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from conformance.decoding import MismatchError, decode, parse_object
from conformance.errors import ReportError
from conformance.report.json_report import SCHEMA_VERSION
from conformance.report.stored_report import StoredReport


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
        data = parse_object(text, "a report")
    except ValueError as error:
        raise ReportError(str(error)) from error
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ReportError(
            f"schema_version {version!r} is not supported; this release of ddp-conformance reads {SCHEMA_VERSION}"
        )
    try:
        report = decode(data, StoredReport)
    except MismatchError as error:
        raise ReportError(str(error)) from error
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
