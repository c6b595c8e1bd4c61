"""A run is stored by one command, signed, and the pages of the site show it."""

import os
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from conformance.report.results import stored_reports
from conformance.suite import load_scenarios
from workshop import ROOT
from workshop.behaviour_rows import load_behaviours
from workshop.behaviours import page_of

#: The one requirement of a row of the page of behaviours; torch's DDP breaks it.
ASKED = "GRAD-18"


def done(*command: str | Path, **variables: str | Path) -> str:
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.nightly
def test_a_real_run_is_stored_and_shown(tmp_path: Path) -> None:
    key, report, results = tmp_path / "key.pem", tmp_path / "report", tmp_path / "results"
    key.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    done("ddp-conformance", "run", ASKED, "--quiet", "--report", report)
    said = done("bash", "ci/store.sh", report, KEY=key, RESULTS=results)
    assert said.startswith("Signed by "), "the environment is there already"
    assert f"Accepted: {results}/ddp_impl/gloo/torch-" in said
    assert done("ddp-conformance", "report", "check", results) == "1 stored report, nothing wrong.\n"

    (row,) = [row for row in load_behaviours() if row.requirements == (ASKED,)]
    page = page_of(stored_reports([results]), load_scenarios())
    (shown,) = [line for line in page.splitlines() if line.startswith(f"| {row.name} |")]
    assert shown.endswith(f"| {ASKED} | PASS | FAIL 2 of 2 |")
