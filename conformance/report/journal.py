"""What a run has found so far, beside the report that it is to become: a run that is killed loses nothing that is here.

The first line is the report without its scenarios, each further one an outcome, as JSON. A last line that is cut short
is none.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from conformance.codec import decode, encode, parse_object
from conformance.errors import ReportError
from conformance.report.plain_file import read_plain, write_plain
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.spec.catalogue import load_catalogue

JOURNAL = "report.journal"


def begin_journal(folder: Path, report: Report, outcomes: Iterable[Outcome]) -> None:
    """Begin the journal of a run that is to become `report`, in place of an earlier one, with some outcomes.

    Raises:
        ReportError: it cannot be written.

    """
    empty = dataclasses.replace(report, scenarios=(), requirements=())
    lines = [json.dumps(encode(one)) for one in (empty, *outcomes)]
    begun = folder / f"{JOURNAL}.new"
    write_plain(begun, "\n".join(lines) + "\n")
    os.replace(begun, folder / JOURNAL)


def note_outcome(folder: Path, outcome: Outcome) -> None:
    """Write the outcome of a scenario to the journal of `folder`; raises `OSError`."""
    with open(os.open(folder / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "a", encoding="utf-8") as file:
        file.write(json.dumps(encode(outcome)) + "\n")


def read_journal(path: Path) -> Report:
    """Return what a run that was killed had found, as the report of one that was interrupted.

    Raises:
        ReportError: the file cannot be read, or a line of it is none of a journal.

    """
    lines = read_plain(path).decode("utf-8", "replace").split("\n")[:-1]
    found: dict[str, Outcome] = {}
    try:
        report = decode(parse_object(lines[0] if lines else "", "a journal"), Report)
        for line in lines[1:]:
            outcome = decode(parse_object(line, "an outcome"), Outcome)
            found[outcome.id] = outcome
    except ValueError as error:
        raise ReportError(f"{path}: {error}") from error
    return report.extended(found.values(), load_catalogue())
