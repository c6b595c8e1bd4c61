"""The script that makes the environment, with interpreters that only pretend: no package is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

#: Python 3.11 as far as the script can see; `-m venv --clear X` makes X, and `-m pip` writes a line to the log.
PRETENDED = """#!/bin/sh
case "$1 $2" in
    "--version ") echo Python 3.11.0 ;;
    "-c "*) exit {too_old} ;;
    "-m venv") mkdir -p "$4/bin"; rm -f "$4/recipe"; cp "$0" "$4/bin/python" ;;
    "-m pip") echo installed >> "{log}"; exit {pip_fails} ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of what the script reads, in a folder of its own."""
    shutil.copytree(PROJECT / "ci", tmp_path / "ci")
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    return tmp_path


def make_environment(
    project: Path, too_old: int = 0, pip_fails: int = 0, within: bool = False
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run the script in an unrelated folder; return how it ended and how often pip has installed so far.

    With `within`, its own environment comes first in PATH, as where another script has called it.
    """
    log, interpreters = project / "log", project / "interpreters"
    interpreters.mkdir(exist_ok=True)
    for name in ("python", "python3", "python3.11", "python3.12", "python3.13"):
        file = interpreters / name
        file.write_text(PRETENDED.format(too_old=too_old, log=log, pip_fails=pip_fails))
        file.chmod(0o755)
    path = f"{interpreters}{os.pathsep}{os.environ['PATH']}"
    if within:
        path = f"{project / '.venv' / 'bin'}{os.pathsep}{path}"
        shutil.copy(project / ".venv" / "bin" / "python", project / ".venv" / "bin" / "python3")
    done = subprocess.run(
        ["bash", str(project / "ci" / "environment.sh")],
        cwd=interpreters, env={**os.environ, "PATH": path, "PYTHON": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done, len(log.read_text().splitlines()) if log.exists() else 0


def test_the_environment_is_made_once_and_again_when_its_recipe_changes(project: Path) -> None:
    done, installed = make_environment(project)
    assert done.returncode == 0, done.stderr
    assert installed == 1
    assert make_environment(project)[1] == 1
    with (project / "ci" / "constraints.txt").open("a") as constraints:
        constraints.write("# changed\n")
    assert make_environment(project)[1] == 2


def test_a_script_that_another_has_called_keeps_the_environment(project: Path) -> None:
    assert make_environment(project)[1] == 1
    done, installed = make_environment(project, within=True)
    assert (done.returncode, installed) == (0, 1), done.stdout + done.stderr


def test_an_environment_that_broke_off_is_made_again(project: Path) -> None:
    done, installed = make_environment(project, pip_fails=1)
    assert (done.returncode, installed) == (1, 1)
    done, installed = make_environment(project)
    assert (done.returncode, installed) == (0, 2)


def test_a_python_that_is_too_old_is_said(project: Path) -> None:
    done, installed = make_environment(project, too_old=1)
    assert (done.returncode, installed) == (1, 0)
    assert "ddp-conformance needs Python 3.11 or newer; found Python 3.11.0." in done.stderr
    assert "PYTHON=/path/to/python3.11 bash" in done.stderr
