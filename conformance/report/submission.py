"""Stored reports: what `results/` holds, where in it a report lies, and which report is taken in.

results/SUBJECT/BACKEND/torch-VERSION/DATE-PROFILE/report.json.gz
results/SUBJECT/BACKEND/torch-VERSION/DATE-PROFILE/SHA256SUMS, SHA256SUMS.sig, SHA256SUMS.pub

PROFILE is `selection` where the run had none. The checksums are those of the folder that `ddp-conformance sign` signed,
of the report before it is compressed; of its files only the report is kept. A report from a stranger is data: it is
read and compared, nothing of it is run.
"""

import contextlib
import datetime
import gzip
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from conformance.checkers.explanation import some
from conformance.errors import ReportError
from conformance.report.certificate import problems_of_counts, problems_of_scenarios
from conformance.report.folder import CHECKSUMS, PUBLIC_KEY, REPORT, SIGNATURE
from conformance.report.plain_file import read_plain
from conformance.report.read import parse_report
from conformance.report.signature import signer
from conformance.run.environment import package_version
from conformance.run.outcome import evidence_of
from conformance.run.report import Report, summarise
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue
from conformance.spec.profile import in_profile
from conformance.spec.quick import QUICK
from conformance.spec.version import known_versions, load_version
from conformance.subjects.subject import KNOWN
from conformance.verdict import Verdict

COMPRESSED = f"{REPORT}.gz"
SIGNED = (CHECKSUMS, SIGNATURE, PUBLIC_KEY)
#: The files of a stored report, which earlier releases did not compress.
FILES = (COMPRESSED, REPORT, *SIGNED)
#: Several times a report of all scenarios; a reviewer's machine reads no more of a stranger's.
MOST_BYTES = 128 * 2**20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
_DEPTH = len(("subject", "backend", "torch", "date", "file"))
_NOTES = ("README.md",)
_UNSIGNED = "nobody has signed it: `ddp-conformance sign REPORT --key FILE`, then send it again"


@dataclass(frozen=True, slots=True)
class Suite:
    """The requirements and scenarios of this release: what a new report is compared with."""

    catalogue: Catalogue
    scenarios: tuple[Scenario, ...]


@dataclass(frozen=True, slots=True)
class Submission:
    """A report whose signature fits; `signed_by` is the fingerprint of the key, empty where nobody has signed."""

    report: Report
    signed_by: str

    @property
    def place(self) -> PurePosixPath:
        """The folder below `results/`; raises `ReportError` for a name that cannot be a folder's."""
        return _place(self.report)


def read_submission(folder: Path) -> Submission:
    """Return the report in `folder`; raises `ReportError` if it cannot be read or is not what its key signed."""
    content = read_plain(folder / REPORT, follow=False, most_bytes=MOST_BYTES)
    try:
        report = parse_report(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ReportError("the report is not UTF-8 text") from error
    if not any((folder / name).exists() for name in SIGNED):
        return Submission(report, "")
    sums = read_plain(folder / CHECKSUMS, follow=False, most_bytes=MOST_BYTES).decode("utf-8", "replace").splitlines()
    if f"{hashlib.sha256(content).hexdigest()}  {REPORT}" not in sums:
        raise ReportError(f"{REPORT} was changed after {CHECKSUMS} was written: send the files as the run left them")
    return Submission(report, signer(folder, None))


def accept(folder: Path, results: Path, suite: Suite, *, unsigned: bool = False, new_key: bool = False) -> Path:
    """Check the report in `folder`, copy it to its place below `results`, and return this place.

    Nothing is written below `results` but the whole, checked report, by one renaming. `unsigned` takes what nobody has
    signed, `new_key` a key that the subject's stored reports do not have.

    Raises:
        ReportError: says everything that is wrong with the report.

    """
    with _copied(folder, results) as copy:
        submission = read_submission(copy)
        wrong = list(objections(submission.report, suite))
        if not submission.signed_by and not unsigned:
            wrong.append(_UNSIGNED)
        if not new_key:
            wrong += _problems_of_key(submission, results)
        target = results / submission.place
        if target.exists():
            wrong.append(f"{target} is there already, and stored results are never replaced: run on another day")
        if linked := [path for path in target.parents if path.is_relative_to(results) and path.is_symlink()]:
            wrong.append(f"{linked[0]} is a symbolic link, which may lead anywhere: make it a folder")
        if wrong:
            raise ReportError(f"{folder} is not accepted: " + "; ".join(wrong))
        try:
            (copy / COMPRESSED).write_bytes(gzip.compress((copy / REPORT).read_bytes(), mtime=0))
            (copy / REPORT).unlink()
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(copy, target)
        except OSError as error:
            raise ReportError(f"cannot write {target}: {error.strerror}; nothing was stored") from error
    return target


def objections(report: Report, suite: Suite) -> tuple[str, ...]:
    """Return why a new report is not taken in, one sentence each; that something failed is no objection."""
    return (
        *_problems_of_run(report),
        *_problems_of_list(report, suite),
        *_problems_of_requirements(report, suite.catalogue),
        *problems_of_counts(report),
        *_problems_of_evidence(report),
    )


def check(results: Path, suite: Suite, since: Path | None = None, *, unsigned: bool = False) -> tuple[str, ...]:
    """Return what is wrong with the reports below `results`, a sentence each.

    Every report must be where it belongs, signed (unless `unsigned`), and agree with itself. With `since`, the folder
    as it was before, what was stored must still be there, unchanged, signed or not, and a report that is new must be
    one that `accept` takes: older ones may speak of scenarios that this release no longer has.
    """
    wrong = list(_strange_files(results))
    for folder in _folders(results):
        place = folder.relative_to(results).as_posix()
        wrong += [f"{place}: {one}" for one in _problems_of_place(folder, place, suite, since, unsigned=unsigned)]
    for old in [] if since is None else _folders(since):
        place = old.relative_to(since or old).as_posix()
        if _contents(old) != _contents(results / place):
            wrong.append(f"{place}: it was stored before and is changed or gone; stored results stay as they are")
    return tuple(wrong)


def _problems_of_place(folder: Path, place: str, suite: Suite, since: Path | None, *, unsigned: bool) -> Iterator[str]:
    try:
        submission = read_submission(folder)
        belongs = submission.place.as_posix()
    except ReportError as error:
        yield str(error)
        return
    if belongs != place:
        yield f"its place is {belongs}: `ddp-conformance report accept` puts a report there"
    was_there = since is not None and (since / place).exists()
    if not submission.signed_by and not unsigned and not was_there:
        yield _UNSIGNED
    if since is None or was_there:
        yield from problems_of_counts(submission.report)
        return
    yield from objections(submission.report, suite)
    yield from _problems_of_key(submission, since)


def _place(report: Report) -> PurePosixPath:
    date = _date(report).isoformat()
    torch = report.package_version("torch")
    if not torch or torch == "absent":
        raise ReportError("the report does not say which torch it ran on; run again with this release")
    names = {
        "subject": report.subject.name,
        "backend": report.backend,
        "version of torch": f"torch-{torch}",
        "profile": f"{date}-{report.selection.profile or 'selection'}",
    }
    for what, name in names.items():
        if not _NAME.fullmatch(name.replace(":", "-")):
            raise ReportError(
                f"the {what} is called {name[:200]!r}; a stored report lies in folders of these names, which begin with"
                " a letter, a digit or _, and have at most 100 of these and of . + - : in all"
            )
    return PurePosixPath(*(name.replace(":", "-") for name in names.values()))


def _date(report: Report) -> datetime.date:
    told = report.environment.get("date")
    try:
        return datetime.date.fromisoformat(str(told))
    except ValueError as error:
        raise ReportError(f"the day of the run must be a date such as 2026-11-25, got {told!r}") from error


def _problems_of_run(report: Report) -> Iterator[str]:
    if not report.is_complete:
        yield f"the run was not completed: {report.num_not_run} of its scenarios have no verdict"
    if report.selection.shard:
        yield f"it holds one shard ({report.selection.shard}) of a run: `ddp-conformance report merge` joins them"
    made_by, installed = report.package_version("ddp-conformance"), package_version("ddp-conformance")
    if made_by != installed:
        yield f"it was made by ddp-conformance {made_by or 'unknown'}: run again with {installed}"
    if _date(report) > datetime.datetime.now(datetime.UTC).date():
        yield f"its day, {_date(report).isoformat()}, is yet to come"
    known = KNOWN.get(report.subject.name)
    if known is not None and report.subject.target != known.target:
        yield f"it calls its DDP {known.name}, which is {known.target}, and judged {report.subject.target}"


def _problems_of_list(report: Report, suite: Suite) -> Iterator[str]:
    """Yield what is wrong with the list: a profile is run as a whole, and a requirement with all its scenarios."""
    profile, version = report.selection.profile, report.specification
    if profile and profile not in (*(one.level for one in suite.catalogue), QUICK):
        yield f"profile {profile!r} does not exist"
        return
    if version and version not in known_versions():
        yield f"version {version!r} of the specification does not exist; known: {', '.join(known_versions())}"
        return
    if profile:
        wanted, of = in_profile(profile, suite.scenarios, suite.catalogue), f"profile {profile}"
    else:
        asked = {one.leading_requirement for one in report.scenarios}
        wanted = tuple(one for one in suite.scenarios if one.id.split("/")[1] in asked)
        of = "the requirements that it speaks of"
    if version:
        wanted = load_version(version).scenarios(wanted)
    yield from problems_of_scenarios(report, wanted, of)


def _problems_of_requirements(report: Report, catalogue: Catalogue) -> Iterator[str]:
    evidence = evidence_of(report.scenarios)
    ours = {each.id: summarise(each, evidence[each.id]) for each in catalogue if each.id in evidence}
    theirs = {one.id: one for one in report.requirements}
    if missing := [name for name in ours if name not in theirs]:
        yield f"its list of requirements lacks {len(missing)} that its scenarios speak of: {some(missing)}"
    if strangers := [name for name in theirs if name not in ours]:
        yield f"its list holds {len(strangers)} requirement(s) of which no scenario speaks: {some(strangers)}"
    for name in ours.keys() & theirs.keys():
        if _words(ours[name]) != _words(theirs[name]):
            yield f"{name} has another sentence or level than in this release: run again with this release"


def _words(one: object) -> tuple[str, ...]:
    return tuple(getattr(one, name) for name in ("chapter", "level", "statement"))


def _problems_of_evidence(report: Report) -> Iterator[str]:
    """Yield which PASS lacks the findings of a run: that something was exercised, and what was compared."""
    bare = [
        one.id
        for one in report.scenarios
        for result in one.results
        if result.verdict is Verdict.PASS
        and ("exercised" not in (names := [each.checker for each in result.findings]) or len(set(names)) < 2)
    ]
    if bare := list(dict.fromkeys(bare)):
        yield f"{len(bare)} scenario(s) say PASS without findings that show it: {some(bare)}"


def _problems_of_key(submission: Submission, results: Path) -> Iterator[str]:
    """Yield that another key than this one has signed the reports of the subject that `results` holds."""
    folders = _folders(results / submission.place.parts[0])
    keys = {key for folder in folders if (folder / PUBLIC_KEY).exists() if (key := signer(folder, None))}
    if submission.signed_by and keys and submission.signed_by not in keys:
        yield (
            f"it is signed by {submission.signed_by}, but the stored reports of {submission.report.subject.name} by"
            f" {', '.join(sorted(keys))}: sign with that key, or ask the maintainers to take the new one (--new-key)"
        )


def _folders(results: Path) -> Sequence[Path]:
    return sorted({file.parent for name in (REPORT, COMPRESSED) for file in results.rglob(name)})


def _contents(folder: Path) -> dict[str, bytes]:
    """Return what a stored report says, by file: to compress it is no change."""
    return {
        name: read_plain(folder / name, follow=False)
        for name in (REPORT, *SIGNED)
        if (folder / name).is_file() or (name == REPORT and (folder / COMPRESSED).is_file())
    }


def _strange_files(results: Path) -> Iterator[str]:
    for path in sorted(results.rglob("*")):
        parts = path.relative_to(results).parts
        name = path.relative_to(results).as_posix()
        if path.is_symlink():
            yield f"{name} is a symbolic link: send the file itself"
        elif not path.is_dir() and name not in _NOTES and (len(parts) != _DEPTH or parts[-1] not in FILES):
            yield f"{name} is no file of a stored report, which are {', '.join(FILES)} of SUBJECT/BACKEND/torch/DATE"
        elif len(parts) == _DEPTH - 1 and not any((path / one).is_file() for one in (REPORT, COMPRESSED)):
            yield f"{name} holds no {COMPRESSED}"


@contextlib.contextmanager
def _copied(folder: Path, results: Path) -> Iterator[Path]:
    """Yield a folder beside the places of `results` with a copy of the files of a submission; it goes in the end."""
    folder = folder.parent if folder.name == REPORT else folder
    contents = {
        name: read_plain(folder / name, follow=False, most_bytes=MOST_BYTES)
        for name in (REPORT, *SIGNED)
        if name == REPORT or os.path.lexists(folder / name)
    }
    try:
        results.mkdir(parents=True, exist_ok=True)
        copy = Path(tempfile.mkdtemp(prefix=".accepting-", dir=results))
    except OSError as error:
        raise ReportError(f"cannot write to {results}: {error.strerror}; nothing was stored") from error
    try:
        copy.chmod(0o755)  # mkdtemp's folders are their maker's alone
        for name, content in contents.items():
            (copy / name).write_bytes(content)
        yield copy
    except OSError as error:
        raise ReportError(f"cannot write to {results}: {error.strerror}; nothing was stored") from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)
