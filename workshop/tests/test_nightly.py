"""The script of the night: what it makes of a run, and when it fails. The run itself is only pretended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.cli.submissions import suite
from conformance.report.submission import check
from conformance.run.environment import capture_environment
from conformance.tests.reports_by_hand import FAIL, PASS, outcome, stored
from conformance.tests.test_signatures import _keys

PROJECT = Path(__file__).parents[2]

#: `run` copies a report that exists already and ends as it would have; everything else is the real command.
COMMAND = """#!/bin/sh
if [ "$1" = run ]; then mkdir -p night; cp tonight/report.json night/; exit {code}; fi
exec "{python}" -m conformance "$@"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the script, an environment that is there already, and last night's report."""
    (tmp_path / "ci").mkdir()
    for script in ("nightly.sh", "store.sh"):
        shutil.copy(PROJECT / "ci" / script, tmp_path / "ci")
    (tmp_path / "ci" / "environment.sh").write_text(f'ROOT="{tmp_path}"\n')
    stored(tmp_path / "last", outcome("gradients/GRAD-01/mlp", PASS), outcome("gradients/GRAD-02/mlp", PASS))
    return tmp_path


def night(project: Path, code: int, *, last: str = "last", **variables: str) -> subprocess.CompletedProcess[str]:
    command = project / "bin" / "ddp-conformance"
    command.parent.mkdir(exist_ok=True)
    command.write_text(COMMAND.format(code=code, python=sys.executable))
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(PROJECT), "NIGHT": "night", "LAST": last, **variables}
    return subprocess.run(
        ["bash", "ci/nightly.sh", "gloo"],
        cwd=project,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_regression_fails_the_night_and_is_written_down(project: Path) -> None:
    stored(project / "tonight", outcome("gradients/GRAD-01/mlp", PASS), outcome("gradients/GRAD-02/mlp", FAIL))
    done = night(project, 0)  # as if what regressed were expected
    assert done.returncode == 1, done.stderr
    assert "gradients/GRAD-02/mlp" in (project / "night" / "diff.txt").read_text()
    assert {"badge.svg", "junit.xml", "summary.md"} < {path.name for path in (project / "night").iterdir()}


def test_a_night_like_the_last_passes_and_so_does_the_first(project: Path) -> None:
    stored(project / "tonight", outcome("gradients/GRAD-01/mlp", PASS), outcome("gradients/GRAD-02/mlp", PASS))
    done = night(project, 0)
    assert (done.returncode, "No verdict changed" in done.stdout) == (0, True), done.stderr
    first = night(project, 0, last="")
    assert (first.returncode, "No report of last night" in first.stdout) == (0, True), first.stderr


def test_what_failed_last_night_as_well_still_fails(project: Path) -> None:
    for folder in ("last", "tonight"):
        stored(project / folder, outcome("gradients/GRAD-01/mlp", FAIL))
    done = night(project, 1)
    assert (done.returncode, "No verdict changed" in done.stdout) == (1, True), done.stderr


def test_a_run_that_did_not_take_place_is_not_compared(project: Path) -> None:
    stored(project / "tonight", outcome("gradients/GRAD-01/mlp", PASS))
    assert night(project, 2).returncode == 2
    assert not (project / "night" / "badge.svg").exists()


@pytest.mark.nightly
def test_a_night_is_stored_where_the_site_finds_it(project: Path) -> None:
    ours, results = suite(), project / "results"
    (scenario,) = (one for one in ours.scenarios if "COPY-14" in one.requirements)
    broken = outcome(scenario, FAIL)
    stored(project / "tonight", broken, catalogue=ours.catalogue, environment=capture_environment())
    done = night(project, 1, last="", RESULTS="results", KEY=str(_keys(project)[0]))
    assert "Accepted: results/ddp_impl/gloo/torch-" in done.stdout, done.stderr
    assert len(list(results.rglob("report.json"))) == 1
    assert check(results, ours) == ()
    again = night(project, 0, last="", RESULTS="results", KEY=str(project / "private.pem"))
    assert (again.returncode, "is there already" in " ".join(again.stderr.split())) == (1, True), again.stderr
    unsigned = night(project, 0, last="", RESULTS="own")
    assert (unsigned.returncode, check(project / "own", ours, unsigned=True)) == (0, ()), unsigned.stderr
