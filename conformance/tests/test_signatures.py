"""Who vouches for a certificate: signatures, hashes of files, verdicts that are run again, and forgeries."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from conformance.cli import main
from conformance.cli.verify import profiles
from conformance.errors import ReportError, SubjectError
from conformance.report.certificate import write_checksums
from conformance.report.folder import CHECKSUMS, PUBLIC_KEY, SIGNATURE, write_report
from conformance.report.signature import sign, signer
from conformance.run import runner
from conformance.run.environment import capture_environment
from conformance.run.report import Assignment, JudgedSubject, Report
from conformance.run.sources import hash_of_package, hash_of_subject, hash_of_suite
from conformance.spec.catalogue import load_catalogue
from conformance.tests.reports_by_hand import FAIL, PASS, outcome, run_report
from conformance.tests.test_certification import certificate

SUBJECT = "conformance.tests.subjects:Unsynchronised"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _keys(tmp_path_factory.mktemp("keys"))


def _keys(folder: Path) -> tuple[Path, Path]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, private, public = Ed25519PrivateKey.generate(), folder / "private.pem", folder / "public.pem"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def test_a_signature_is_of_these_checksums_and_by_this_key(
    tmp_path: Path, keys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    certificate(tmp_path)
    assert signer(tmp_path, None) == ""
    with pytest.raises(ReportError, match="is not signed, but a signature by"):
        signer(tmp_path, keys[1])
    name = sign(tmp_path, keys[0])
    assert name.startswith("ed25519 SHA256:")
    assert signer(tmp_path, None) == signer(tmp_path, keys[1]) == name
    stranger = _keys(tmp_path_factory.mktemp("stranger"))
    with pytest.raises(ReportError, match=rf"is signed by {name.replace('+', '.')}, not by"):
        signer(tmp_path, stranger[1])
    sums = tmp_path / CHECKSUMS
    sums.write_text(sums.read_text().replace("a", "b", 1))
    with pytest.raises(ReportError, match="or of other checksums"):
        signer(tmp_path, None)


def test_a_signature_without_its_key_and_a_key_without_its_signature_are_none(
    tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    certificate(tmp_path)
    sign(tmp_path, keys[0])
    for name in (SIGNATURE, PUBLIC_KEY):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(ReportError, match=f"cannot read .*{name}"):
            signer(tmp_path, None)
        (tmp_path / name).write_bytes(kept)


@pytest.mark.parametrize(
    ("text", "says"), [("", "is no private key in PEM"), ("-----BEGIN", "is no private key in PEM")]
)
def test_what_is_no_key_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(ReportError, match=says):
        sign(tmp_path, tmp_path / "key")


def test_signatures_are_an_extra(tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ReportError, match=r"pip install 'ddp-conformance\[signatures\]'"):
        sign(tmp_path, keys[0])


def test_openssl_checks_the_same(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    certificate(tmp_path)
    sign(tmp_path, keys[0])
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", PUBLIC_KEY, "-in", CHECKSUMS]
    try:
        done = subprocess.run([*command, "-sigfile", SIGNATURE], cwd=tmp_path, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert done.returncode == 0, done.stderr


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (lambda folder: os.mkfifo(folder / "failures" / "x.json"), "failures/x.json is no plain file"),
    "a link": (lambda folder: (folder / "failures" / "x.txt").symlink_to("/etc/passwd"), "is a symbolic link"),
    "a linked folder": (lambda folder: (folder / "more").symlink_to("/etc"), "more is a symbolic link"),
    "a folder": (lambda folder: (folder / "more").mkdir(), "more is a folder"),
    "a file": (lambda folder: (folder / "note.txt").write_text("all is well"), "note.txt is no file of a report"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_folder_with_what_no_run_writes_is_neither_certified_nor_valid(tmp_path: Path, kind: str) -> None:
    certificate(tmp_path)
    add, says = STRANGE[kind]
    add(tmp_path)
    result = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert (result.exit_code, says in " ".join(result.stderr.split())) == (2, True), result.stderr
    with pytest.raises(ReportError, match="cannot be certified"):
        write_checksums(tmp_path)


@pytest.mark.parametrize("name", ["report.json", CHECKSUMS])
def test_a_pipe_holds_up_no_reader(tmp_path: Path, name: str) -> None:
    certificate(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    for command in (["verify"], ["report", "markdown"]):
        if command == ["verify"] or name == "report.json":
            result = CliRunner().invoke(main, [*command, str(tmp_path)])
            assert (result.exit_code, "no plain file" in " ".join(result.stderr.split())) == (2, True), result.stderr


def test_the_hash_is_of_every_file_and_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "hashed_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit")
    (package / "inner" / "data.bin").write_bytes(b"1")
    first = hash_of_subject("hashed_package.inner.module:Class")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert hash_of_package("hashed_package") == first
    (package / "inner" / "data.bin").write_bytes(b"2")
    assert hash_of_package("hashed_package") != first
    (tmp_path / "hashed_module.py").write_text("raise SystemExit")
    assert hash_of_package("hashed_module") != first
    with pytest.raises(SubjectError, match="no_such_package has no files here"):
        hash_of_package("no_such_package")


# --------------------------------------------------------------------------------------------------------- forgeries


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a certificate that nobody has run: a DDP that never communicates conforms at profile core."""
    return _certificate_of(tmp_path_factory.mktemp("forged"), SUBJECT, SUBJECT)


def _certificate_of(folder: Path, name: str, target: str) -> Path:
    """Write a certificate by which every scenario of profile core passes, and return its folder."""
    scenarios = profiles()["core"]
    environment = {
        **capture_environment(), "device_type": "cpu",
        "sources": {"suite": hash_of_suite(), "subject": hash_of_subject(target)},
    }  # fmt: skip
    catalogue = load_catalogue()
    report = Report.of(
        [outcome(scenario, PASS) for scenario in scenarios], catalogue, subject=JudgedSubject(name, target),
        backend="gloo", num_selected=len(scenarios), certified=True, environment=environment, duration_s=1.0,
        selection=Assignment("core", "", tuple(one.id for one in scenarios)),
    )  # fmt: skip
    write_report(report, catalogue, folder)
    write_checksums(folder)
    return folder


def _verify(*arguments: object) -> tuple[Result, str]:
    result = CliRunner().invoke(main, ["verify", *map(str, arguments)])
    return result, " ".join(result.output.split())


def test_a_forged_certificate_is_reported_as_unsigned_and_refused_with_a_key(
    forged: Path, keys: tuple[Path, Path]
) -> None:
    result, output = _verify(forged)
    assert (result.exit_code, "Checked: checksums only, unsigned." in output) == (0, True), output
    assert "Valid" not in output
    result, output = _verify(forged, "--key", keys[1])
    assert (result.exit_code, "is not signed" in output) == (2, True), output


@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_forged_certificate_does_not_survive_a_run(
    forged: Path, monkeypatch: pytest.MonkeyPatch, *, really: bool
) -> None:
    result, output = _verify(forged, "--rerun", 2, "--seed", 1)
    assert (result.exit_code, f"--ddp {SUBJECT} --backend gloo" in output) == (2, True), output
    result, output = _verify(forged, "--rerun", 2, "--seed", 1, "--ddp", "torch")
    assert (result.exit_code, f"the report is about {SUBJECT}" in output) == (2, True), output
    if not really:  # what the scenarios come to is known
        monkeypatch.setattr(runner, "run", lambda scenarios, *_: run_report(*(outcome(one, FAIL) for one in scenarios)))
    result, output = _verify(forged, "--rerun", 4, "--seed", 1, "--ddp", SUBJECT)
    assert (result.exit_code, "the certificate does not hold here" in output) == (2, True), output
    assert "was PASS and is FAIL" in output


def test_verdicts_that_are_the_same_again_are_said_with_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = _certificate_of(tmp_path, "ddp_impl", "ddp_impl:DistributedDataParallel")
    monkeypatch.setattr(runner, "run", lambda scenarios, *_: run_report(*(outcome(one, PASS) for one in scenarios)))
    result, output = _verify(report, "--rerun", 3, "--seed", 5)
    assert (result.exit_code, "Run again here (--seed 5): 3 scenarios, the same verdicts." in output) == (0, True)
