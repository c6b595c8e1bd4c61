"""Several versions of torch: the script with interpreters that only pretend, and the page made of reports by hand."""

import os
import shutil
import subprocess
from pathlib import Path

from conformance.tests.reports_by_hand import FAIL, PASS, outcome, run_report
from conformance.verdict import Verdict
from workshop.torch_versions import Ran, versions_page

PROJECT = Path(__file__).parents[2]
#: Python as far as the script can see: there is no torch 9.9.0, and each command that it is given is a line of a log.
PRETENDED = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    "-m pip") echo "$@" >> "{log}"; case "$*" in *torch==9.9.0*) echo "no torch 9.9.0" >&2; exit 1 ;; esac ;;
    "-c "*) ;;
    *) echo "$@" >> "{log}" ;;
esac
"""


def run_script(project: Path, *versions: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script on these versions, profile smoke; return how it ended and the commands that it has run so far."""
    log, python = project / "log", project / "python"
    python.write_text(PRETENDED.format(log=log))
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "VERSIONS": str(project / "kept"), "PROFILES": "smoke"}
    command = ["bash", str(project / "ci" / "torch_versions.sh"), *versions]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, log.read_text().splitlines()


def test_a_version_that_cannot_be_installed_is_left_out_and_none_is_run_twice(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "ci", tmp_path / "ci")
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    done, log = run_script(tmp_path, "9.9.0", "2.13.0")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["torch 9.9.0 cannot be installed: no torch 9.9.0"]
    assert [line for line in log if "smoke" in line] == ["-m conformance smoke --ddp ddp_impl"]
    assert log[-1].startswith("-m workshop versions")
    again, log = run_script(tmp_path, "2.13.0")
    assert again.returncode == 0, again.stderr
    assert sum("torch==2.13.0" in line for line in log) == 1
    assert sum("smoke" in line for line in log) == 1


def ran(version: str, native: Verdict, *, has: bool = True) -> Ran:
    made = run_report(outcome("gradients/GRAD-01/a", PASS, native), outcome("gradients/GRAD-02/a", PASS, FAIL))
    return Ran(version, {"core": made}, {"torch._a": True, "torch._b": has}, f"{version}+cpu")


def test_the_page_says_what_began_to_break_and_what_was_mended() -> None:
    runs = [
        ran("2.9.0", PASS),
        ran("2.10.0", FAIL, has=False),
        ran("2.11.0", PASS),
        Ran("2.12.0", {}, {}),
    ]
    page = versions_page(runs[::-1], {"GRAD-01": {"2.10.0": "another reducer"}}, "2.9.0")
    assert "| GRAD-01 | first broken in 2.10.0 (FAIL) | another reducer |" in page
    assert "| GRAD-01 | first mended in 2.11.0 (PASS) | not known |" in page
    assert "breaks 1 of 2 requirements: 1 of GRAD" in page
    assert "| 2.12.0 | | | | | no run | | |" in page
    assert "| `torch._a` | all |" in page
    assert "| `torch._b` | 2.9.0, 2.11.0 |" in page
    assert page.index("| 2.9.0 |") < page.index("| 2.10.0 |")
