"""Reads `report.json` back: plain JSON in, frozen values out, and an error that names the field otherwise.

Nothing in a report is executed, imported or looked up: a report from a stranger is data.
"""

from __future__ import annotations

from pathlib import Path

from conformance.codec import MismatchError, decode, parse_object
from conformance.errors import ReportError
from conformance.own_mistake import instance
from conformance.report.packed import unpacked
from conformance.report.plain_file import read_plain
from conformance.run.report import SCHEMA_VERSION, Report


def read_report(path: Path) -> Report:
    """Return the report in `path`, which is a `report.json` or the folder that holds one.

    Raises:
        ReportError: the file cannot be read, is truncated, is of another schema version, or a field has the wrong type
            (the message names it, such as `scenarios[3].subject.verdict`).

    """
    if path.is_dir():
        path = path / "report.json"
    try:
        text = read_plain(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} is not a report: it is not UTF-8 text") from error
    try:
        return parse_report(text)
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from error


def parse_report(text: str) -> Report:
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
        return instance(decode(unpacked(data), Report), Report)
    except MismatchError as error:
        raise ReportError(str(error)) from error
