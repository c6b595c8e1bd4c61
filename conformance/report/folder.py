"""The report folder: `report.json` for machines, a page for people, and one scenario file per failure for replay.

report/report.json               everything that the run found (`schema_version` says how it is laid out)
report/report.journal            what a run has found so far
report/report.html               the same as a page
report/failures/<scenario>.json  the scenario, for `ddp-conformance replay`
report/failures/<scenario>.txt   why it failed, as the terminal shows it
report/histories.json.gz         what ranks issued and said, after `run --keep-histories`
report/SHA256SUMS                checksums of all of it, after a certified run
report/SHA256SUMS.sig, .pub      a signature of the checksums, after `ddp-conformance sign`
"""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.codec import encode
from conformance.errors import ReportError
from conformance.report.console import printable
from conformance.report.failure import failure_path, failure_text, replay_command
from conformance.report.journal import JOURNAL, begin_journal, note_outcome
from conformance.report.plain_file import write_plain
from conformance.run.outcome import Outcome
from conformance.run.report import Report
from conformance.spec.catalogue import Catalogue

HISTORIES = "histories.json.gz"
REPORT = "report.json"
CHECKSUMS, SIGNATURE, PUBLIC_KEY = "SHA256SUMS", "SHA256SUMS.sig", "SHA256SUMS.pub"
#: So much of a file says whether it is a report.
_BEGINNING_BYTES = 200
#: Becomes `report.json`.
_STARTED = "report.partial"
#: What a report may hold beside its failures, and what a run writes anew.
OWN_FILES = (REPORT, JOURNAL, f"{JOURNAL}.new", _STARTED, "report.html", CHECKSUMS, HISTORIES, SIGNATURE, PUBLIC_KEY)


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Create the report folder if need be, and keep other runs from writing into it in the meantime.

    Raises:
        ReportError: another run writes there, or the folder cannot be created.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ReportError(
            f"another run writes its report to {folder}; nothing was run. Choose another folder with --report"
        ) from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


def check_writable(folder: Path) -> None:
    """Create the report folder and show that it can be written, before a run is spent on it; removes nothing.

    Raises:
        ReportError: the folder cannot be created, is a file, cannot be written, or holds files in the places of a
            report's that no run wrote.

    """
    try:
        _make_failures_folder(folder)
        report = folder / "report.json"
        of_a_run = is_report(report) if report.exists() else (folder / JOURNAL).exists()
        theirs = [] if of_a_run else [path for path in [*_own_files(folder), *_failures(folder)] if path.exists()]
        if theirs:
            raise ReportError(
                f"{folder} holds {len(theirs)} file(s), such as {theirs[0].relative_to(folder)}, and no report of a"
                " run: a run would remove them. Choose another folder with --report, or move them"
            )
        with tempfile.TemporaryFile(dir=folder), tempfile.TemporaryFile(dir=folder / "failures"):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from error


def begin_report(folder: Path, report: Report, outcomes: Iterable[Outcome]) -> None:
    """Begin the journal of a run, and remove what an earlier one left: nothing old can pass for a result of this run.

    `report` is what it is to become, `outcomes` what is known by now. Raises what `check_writable` does, before
    anything is removed.
    """
    check_writable(folder)
    begin_journal(folder, report, outcomes)
    try:
        for path in [*_own_files(folder), *_failures(folder)]:
            if path.name != JOURNAL:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from error


def is_report(path: Path) -> bool:
    """Whether a run wrote this file, or meant to: it begins as a report of this or another release does."""
    try:
        with path.open("rb") as file:
            return begins_as_report(file.read(_BEGINNING_BYTES).decode("utf-8", "replace"))
    except OSError:
        return False


def begins_as_report(text: str) -> bool:
    """Whether this is a report's text, as far as its beginning says."""
    return '"schema_version"' in text[:_BEGINNING_BYTES]


def _own_files(folder: Path) -> list[Path]:
    return [folder / name for name in OWN_FILES]


def _failures(folder: Path) -> list[Path]:
    return [path for path in (folder / "failures").iterdir() if path.suffix in (".json", ".txt")]


def _make_failures_folder(folder: Path) -> None:
    """Create the folder of failures; raises `ReportError` for a symbolic link, behind which files would be removed."""
    failures = folder / "failures"
    if failures.is_symlink():
        raise ReportError(f"cannot write to {failures}: failures is a symbolic link, which may lead anywhere")
    failures.mkdir(parents=True, exist_ok=True)


def _not_writable(folder: Path, error: OSError, what: str = "reports") -> ReportError:
    return ReportError(
        f"cannot write {what} to {folder}: {error.strerror}; nothing was run. Choose another folder with --report"
    )


def add_failures_folder(folder: Path) -> None:
    """Create `folder` for failures beside those that it holds already; raises `ReportError` if it cannot be written."""
    try:
        _make_failures_folder(folder)
        with tempfile.TemporaryFile(dir=folder / "failures"):
            pass
    except OSError as error:
        raise _not_writable(folder, error, "failures") from error


def write_report(report: Report, catalogue: Catalogue, folder: Path) -> Path:
    """Write the report into `folder` and return the path of `report.json`; raises `ReportError`."""
    try:
        _make_failures_folder(folder)
        for outcome in report.failures:
            write_failure(outcome, report.subject.typed, report.backend, catalogue, folder)
        path = folder / "report.json"
        partial = folder / _STARTED
        write_plain(partial, report_text(report))
        os.replace(partial, path)  # a reader never sees half a report
        (folder / JOURNAL).unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"cannot write the report to {folder}: {error.strerror}") from error
    return path


def write_failure(outcome: Outcome, subject: str, backend: str, catalogue: Catalogue, folder: Path) -> None:
    """Write the scenario of a failure into a report's `folder`, and beside it why it failed; raises `OSError`."""
    _write_failure(outcome, _why(outcome, subject, backend, catalogue, folder), folder)


def keep_failure(outcome: Outcome, subject: str, backend: str, catalogue: Catalogue, folder: Path) -> str:
    """Write a failure while the run goes on, and return why it failed, or also why that could not be written.

    A folder that somebody removed, or a disk that is full for a while, costs no verdict: `write_report` writes all
    failures again.
    """
    text = _why(outcome, subject, backend, catalogue, folder)
    try:
        _make_failures_folder(folder)
        _write_failure(outcome, text, folder)
    except (OSError, ReportError) as error:
        return f"{text}\nThis could not be written to {folder}: {error}."
    return text


def keep_last(known: Sequence[Outcome], begun: Report, catalogue: Catalogue, folder: Path, *, is_first: bool) -> None:
    """Write down the last of what is `known`; a disk that is full for a while costs no verdict."""
    if is_first:  # the DDP can be tried: the last report has served
        begin_report(folder, begun, known)
    else:
        with contextlib.suppress(OSError):
            note_outcome(folder, known[-1])
    for one in known if is_first else known[-1:]:
        if one.is_failure:
            keep_failure(one, begun.subject.typed, begun.backend, catalogue, folder)


def _why(outcome: Outcome, subject: str, backend: str, catalogue: Catalogue, folder: Path) -> str:
    return failure_text(outcome, backend, catalogue, replay_command(outcome.id, subject, backend, folder))


def _write_failure(outcome: Outcome, text: str, folder: Path) -> None:
    path = failure_path(folder, outcome.id)
    write_plain(path, json.dumps(outcome.replay, indent=2) + "\n")
    write_plain(path.with_suffix(".txt"), printable(text, lines=True) + "\n")


def write_page(text: str, folder: Path) -> Path:
    """Write the report's page into `folder` and return its path; raises `ReportError`."""
    write_plain(folder / "report.html", text)
    return folder / "report.html"


def strange_files(folder: Path) -> tuple[str, ...]:
    """Return a phrase for everything in a report's folder that no run puts there: links, pipes, other files."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found.append(f"{name} is a symbolic link")
        elif path.is_dir():
            if name != "failures":
                found.append(f"{name} is a folder")
        elif not path.is_file():
            found.append(f"{name} is no plain file")
        elif name not in OWN_FILES and not (path.parent.name == "failures" and path.suffix in (".json", ".txt")):
            found.append(f"{name} is no file of a report")
    return tuple(found)


def report_text(report: Report) -> str:
    """Return the text of `report.json`, a line for each scenario; `parse_report` gives back an equal report."""
    data = encode(report)
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in data.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
