"""Stored reports: one that another clone made and signed is taken in; forged ones are refused, and change nothing."""

import dataclasses
import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.cli import main, run
from conformance.cli.submissions import suite
from conformance.errors import ReportError
from conformance.report import submission
from conformance.report.folder import CHECKSUMS, PUBLIC_KEY, SIGNATURE, report_text
from conformance.report.read import read_report
from conformance.report.results import stored_reports
from conformance.report.submission import accept, check
from conformance.run.report import JudgedSubject, Report
from conformance.spec.catalogue import load_catalogue
from conformance.tests.test_signatures import _keys
from conformance.verdict import Verdict
from conformance.workers.zygote_process import ZygoteProcess

PACKAGES = Path(__file__).parents[2]
#: A requirement that torch's DDP breaks, and one that it keeps; one scenario of one rank each.
CHOSEN = ("COMPAT-06", "COPY-14")
PLACE = "torch/gloo/torch-{torch}/{date}-selection"


RUN = ("run", *CHOSEN, "--ddp", "torch", "--no-native", "--quiet", "--report")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> Path:
    """Return a report of torch's DDP, signed by the people who made it."""
    report = tmp_path_factory.mktemp("theirs") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "early_zygote", lambda: nullcontext(zygote))
        done = CliRunner().invoke(main, [*RUN, str(report)])
    assert done.exit_code == 1, done.output
    signed(report, key_of(report.parent))
    return report


def key_of(folder: Path) -> Path:
    return folder / "private.pem" if (folder / "private.pem").exists() else _keys(folder)[0]


def signed(report: Path, key: Path) -> None:
    result = CliRunner().invoke(main, ["sign", str(report), "--key", str(key)])
    assert result.exit_code == 0, result.output


@pytest.fixture
def sent(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "sent")
    return tmp_path / "sent"


def forge(sent: Path, made: Path, change: Callable[[Report], Report], *, key: Path | None = None) -> None:
    report = change(read_report(sent))
    (sent / "report.json").write_text(report_text(report))
    for name in (CHECKSUMS, SIGNATURE, PUBLIC_KEY):
        (sent / name).unlink()
    signed(sent, key or key_of(made.parent))


def recounted(report: Report, **changes: object) -> Report:
    """Return a report whose counts and answers follow from its scenarios."""
    changed = dataclasses.replace(report, **changes)  # type: ignore[arg-type]
    return Report.of(
        changed.scenarios, load_catalogue(), subject=changed.subject, backend=changed.backend,
        num_selected=len(changed.scenarios), environment=changed.environment, duration_s=changed.duration_s,
        selection=changed.selection,
    )  # fmt: skip


def refused(sent: Path, results: Path) -> str:
    """Return why `accept` refuses a report, after showing that it left the stored ones as they were."""
    before = {path: path.stat().st_mtime_ns for path in sorted(results.rglob("*"))}
    result = CliRunner().invoke(main, ["report", "accept", str(sent), "--into", str(results)])
    assert result.exit_code == 2, result.output
    assert {path: path.stat().st_mtime_ns for path in sorted(results.rglob("*"))} == before
    return " ".join(result.stderr.split())


@pytest.mark.nightly
def test_a_report_of_another_clone_is_taken_in(tmp_path: Path) -> None:
    clone, results = tmp_path / "clone", tmp_path / "results"
    for package in ("conformance", "ddp_impl"):
        shutil.copytree(PACKAGES / package, clone / package)
    ended = subprocess.run(
        [sys.executable, "-m", "conformance", *RUN, "report"], cwd=clone, check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(clone)},
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    made = clone / "report"
    signed(made, key_of(clone))
    done = CliRunner().invoke(main, ["report", "accept", str(made), "--into", str(results)])
    assert done.exit_code == 0, done.output
    report = read_report(made)
    place = PLACE.format(torch=report.package_version("torch"), date=report.environment["date"])
    assert sorted(path.relative_to(results).as_posix() for path in results.rglob("*") if path.is_file()) == [
        f"{place}/{name}" for name in ("SHA256SUMS", "SHA256SUMS.pub", "SHA256SUMS.sig", "report.json.gz")
    ]
    (stored,) = stored_reports([results])
    assert stored.report == report
    assert {one.id: one.subject for one in report.requirements} == dict(
        zip(CHOSEN, (Verdict.FAIL, Verdict.PASS), strict=True)
    )
    assert CliRunner().invoke(main, ["report", "check", str(results)]).output == "1 stored report, nothing wrong.\n"
    assert "is there already" in refused(made, results)


def failing(report: Report) -> int:
    (index,) = (number for number, one in enumerate(report.scenarios) if one.subject.verdict.is_failure)
    return index


def with_a_nicer_verdict(report: Report) -> Report:
    index = failing(report)
    one = report.scenarios[index]
    nicer = dataclasses.replace(one, subject=dataclasses.replace(one.subject, verdict=Verdict.PASS), replay=None)
    return recounted(report, scenarios=(*report.scenarios[:index], nicer, *report.scenarios[index + 1 :]))


def with_a_bare_pass(report: Report) -> Report:
    index = failing(report)
    one = report.scenarios[index]
    findings = tuple(each for each in one.subject.findings if each.verdict is Verdict.PASS)[:1]
    bare = dataclasses.replace(one.subject, verdict=Verdict.PASS, findings=findings)
    nicer = dataclasses.replace(one, subject=bare, replay=None)
    return recounted(report, scenarios=(*report.scenarios[:index], nicer, *report.scenarios[index + 1 :]))


def without_what_failed(report: Report) -> Report:
    index = failing(report)
    return recounted(report, scenarios=report.scenarios[:index] + report.scenarios[index + 1 :])


def without_half_a_profile(report: Report) -> Report:
    left = without_what_failed(report)
    ids = tuple(one.id for one in left.scenarios)
    return recounted(left, selection=dataclasses.replace(left.selection, profile="core", ids=ids))


def with_another_sentence(report: Report) -> Report:
    first, *others = report.requirements
    return dataclasses.replace(report, requirements=(dataclasses.replace(first, statement="It MUST train."), *others))


def with_another_seed(report: Report) -> Report:
    first, *others = report.scenarios
    return recounted(report, scenarios=(dataclasses.replace(first, seed=first.seed + 1), *others))


def of_tomorrow(report: Report) -> Report:
    return recounted(report, environment={**report.environment, "date": "2999-01-01"})


def named(name: str) -> Callable[[Report], Report]:
    return lambda report: recounted(report, subject=JudgedSubject(name, "theirs:DDP"))


FORGERIES: dict[str, tuple[Callable[[Report], Report], str]] = {
    "changed verdict": (with_a_nicer_verdict, "do not give its verdict"),
    "pass without evidence": (with_a_bare_pass, "1 scenario(s) say PASS without findings that show it"),
    "removed failing scenario": (without_what_failed, "its selection is not the requirements that it speaks of"),
    "removed from a profile": (without_half_a_profile, "scenario(s) of profile core are missing: "),
    "left out of the list": (
        lambda report: dataclasses.replace(report, requirements=report.requirements[:1]),
        "its list of requirements lacks 1 that its scenarios speak of: COMPAT-06",
    ),
    "another sentence": (with_another_sentence, "has another sentence or level than in this release"),
    "another scenario": (with_another_seed, "1 scenario(s) are not those of this release"),
    "another subject": (
        lambda report: recounted(report, subject=dataclasses.replace(report.subject, name="ddp_impl")),
        "it calls its DDP ddp_impl, which is ddp_impl:DistributedDataParallel, and judged torch.nn.parallel",
    ),
    "another release": (
        lambda report: recounted(
            report, environment={**report.environment, "packages": {"ddp-conformance": "0.0.1", "torch": "2"}}
        ),
        "it was made by ddp-conformance 0.0.1: run again with",
    ),
    "a day to come": (of_tomorrow, "its day, 2999-01-01, is yet to come"),
    "no day": (lambda report: recounted(report, environment={**report.environment, "date": "../x"}), "must be a date"),
    "a shard": (
        lambda report: dataclasses.replace(report, selection=dataclasses.replace(report.selection, shard="1/2")),
        "it holds one shard (1/2) of a run",
    ),
    "path traversal": (named("../../../etc/cron.d/x"), "called '../../../etc/cron.d/x'; a stored report"),
    "the folder above": (named(".."), "the subject is called '..'; a stored report"),
    "an absolute path": (named("/etc"), "the subject is called '/etc'; a stored report"),
    "a long name": (named("x" * 101), "have at most 100"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_report_is_refused_although_it_is_signed(kind: str, sent: Path, made: Path, tmp_path: Path) -> None:
    change, says = FORGERIES[kind]
    forge(sent, made, change)
    results = tmp_path / "results"
    accept(made, results, suite())
    assert says in refused(sent, results)


def test_what_is_left_out_of_a_requirement_is_missed(sent: Path, made: Path, tmp_path: Path) -> None:
    """As `run -k world2` leaves it: also a selection that is called complete lacks scenarios."""
    more = suite()
    twin = dataclasses.replace(
        next(one for one in more.scenarios if "/COPY-14/" in one.id), id="copies/COPY-14/it-would-fail"
    )
    with pytest.raises(ReportError, match=r"1 scenario\(s\) of the requirements .* are missing: .*it-would-fail"):
        accept(sent, tmp_path / "results", dataclasses.replace(more, scenarios=(*more.scenarios, twin)))
    assert list((tmp_path / "results").rglob("*")) == []


@pytest.mark.parametrize(("old", "new"), [('"verdict":"FAIL"', '"verdict":"PASS"'), ('"torch"', '"mine"')])
def test_what_was_changed_after_signing_is_refused(sent: Path, tmp_path: Path, old: str, new: str) -> None:
    file = sent / "report.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert "report.json was changed after SHA256SUMS was written" in refused(sent, tmp_path / "results")


def test_checksums_that_follow_the_change_are_not_those_that_were_signed(sent: Path, tmp_path: Path) -> None:
    from conformance.report.certificate import write_checksums

    (sent / "report.json").write_text((sent / "report.json").read_text() + "\n")
    write_checksums(sent)
    assert "is not by the key beside it, or of other checksums" in refused(sent, tmp_path / "results")


def test_another_key_is_refused_until_a_person_takes_it(sent: Path, made: Path, tmp_path: Path) -> None:
    results, stranger = tmp_path / "results", tmp_path / "stranger"
    accept(made, results, suite())
    stranger.mkdir()
    earlier = "2026-01-31"
    forge(
        sent, made, lambda report: recounted(report, environment={**report.environment, "date": earlier}),
        key=key_of(stranger),
    )  # fmt: skip
    said = refused(sent, results)
    assert "but the stored reports of torch by ed25519 SHA256:" in said
    before = tmp_path / "before"
    shutil.copytree(results, before)
    accept(sent, results, suite(), new_key=True)
    assert check(results, suite()) == ()
    (complaint,) = check(results, suite(), before)
    assert "but the stored reports of torch by" in complaint


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def compressed(file: Path, length: int) -> None:
    """Put a compressed file of that length, once it is decompressed, in the place of `file`."""
    file.unlink()
    file.with_name("report.json.gz").write_bytes(gzip.compress(bytes(length)))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.write_text('{"schema_version": 0}'), "schema_version 0 is not supported"),
        (lambda file: file.write_text("[" * 100_000), "not valid JSON: "),
        (lambda file: os.truncate(file, submission.MOST_BYTES + 1), "has 134,217,729 bytes, and may have 134,217,728"),
        (piped, "it is no plain file"),
        (lambda file: (file.unlink(), file.symlink_to("/etc/passwd")), "cannot read"),
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.rename(f"{file}.gz"), "gzip cannot decompress it"),
        (lambda file: compressed(file, submission.MOST_BYTES + 1), "holds more than 134,217,728 bytes"),
    ],
    ids=["old schema", "deep", "huge", "a pipe", "a link", "none", "not compressed", "huge once decompressed"],
)
def test_what_is_no_report_is_refused(sent: Path, tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(sent / "report.json")
    assert says in refused(sent, tmp_path / "results")


def test_an_unsigned_report_is_ones_own(sent: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    for name in (CHECKSUMS, SIGNATURE, PUBLIC_KEY):
        (sent / name).unlink()
    assert "nobody has signed it: `ddp-conformance sign" in refused(sent, results)
    accept(sent, results, suite(), unsigned=True)
    assert "nobody has signed it" in "".join(check(results, suite()))
    assert check(results, suite(), unsigned=True) == ()
    shutil.copytree(results, before := tmp_path / "before")
    assert check(results, suite(), before) == (), "it was there before, and is no business of a report that is sent now"


def test_a_linked_folder_leads_nowhere(sent: Path, tmp_path: Path) -> None:
    results, outside = tmp_path / "results", tmp_path / "outside"
    results.mkdir()
    outside.mkdir()
    (results / "torch").symlink_to(outside)
    assert "is a symbolic link, which may lead anywhere" in refused(sent, results)
    assert list(outside.iterdir()) == []
    assert "torch is a symbolic link: send the file itself" in check(results, suite())


def test_stored_reports_stay_as_they_are(sent: Path, tmp_path: Path) -> None:
    results, before = tmp_path / "results", tmp_path / "before"
    place = accept(sent, results, suite())
    shutil.copytree(results, before)
    assert check(results, suite(), before) == ()
    stored, plain = place / "report.json.gz", place / "report.json"
    plain.write_bytes(gzip.decompress(stored.read_bytes()))
    stored.unlink()
    assert check(results, suite(), before) == (), "a report may be stored uncompressed, as earlier releases did"
    plain.write_text(plain.read_text() + "\n")
    assert len(check(results, suite(), before)) == 2
    shutil.rmtree(results / "torch")
    (gone,) = check(results, suite(), before)
    assert "it was stored before and is changed or gone" in gone


def test_a_misplaced_report_is_refused_with_its_right_place(sent: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    place = accept(sent, results, suite())
    elsewhere = results / "ddp_impl" / place.relative_to(results / "torch")
    elsewhere.parent.mkdir(parents=True)
    place.rename(elsewhere)
    (results / "note.txt").write_text("all is well")
    said = check(results, suite())
    assert any(f"its place is {place.relative_to(results).as_posix()}: " in one for one in said)
    assert any("note.txt is no file of a stored report" in one for one in said)


@pytest.mark.nightly
@pytest.mark.skipif(not (PACKAGES / "results").is_dir(), reason="installed without its repository")
def test_the_stored_reports_of_this_repository_are_sound() -> None:
    assert check(PACKAGES / "results", suite(), unsigned=True) == ()
