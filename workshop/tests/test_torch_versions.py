"""Several versions of torch: the script with interpreters that only pretend, and the page made of reports by hand."""

import json
import os
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from conformance.run.doctor import MIN_TORCH
from conformance.tests.reports_by_hand import FAIL, PASS, outcome, run_report
from conformance.verdict import Verdict
from workshop.torch_versions import PAGE, STORED, Judged, OnVersion, read, store, versions_page

PROJECT = Path(__file__).parents[2]
#: Python as far as the script can see: there is no torch 9.9.0, and each command that it is given is a line of a log.
PRETENDED = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    "-m pip") echo "$@" >> "{log}"; case "$*" in *torch==9.9.0*) echo "no torch 9.9.0" >&2; exit 1 ;; esac ;;
    "-c "*) ;;
    "-m conformance") echo "$@" >> "{log}"; case "$*" in
        *"--profile quick"*--resume*) ;;
        *"--profile quick"*) mkdir -p "$6" && touch "$6/report.json"; exit 130 ;;
    esac ;;
    *) echo "$@" >> "{log}" ;;
esac
"""


def run_script(
    project: Path, *versions: str, profiles: str = "smoke"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script on these versions; return how it ended and the commands that it has run so far."""
    log, python = project / "log", project / "python"
    python.write_text(PRETENDED.format(log=log))
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "VERSIONS": str(project / "kept"), "PROFILES": profiles}
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


def test_a_run_that_was_interrupted_is_gone_on_with(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "ci", tmp_path / "ci")
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    for expected, resumed in ((130, False), (0, True), (0, True)):
        done, log = run_script(tmp_path, "2.13.0", profiles="quick")
        judged = [line for line in log if "--profile quick" in line]
        assert (done.returncode, judged[-1].endswith("--resume"), len(judged)) == (expected, resumed, 1 + resumed)


def ran(version: str, native: Verdict, *, has: bool = True) -> OnVersion:
    made = run_report(outcome("gradients/GRAD-01/a", PASS, native), outcome("gradients/GRAD-02/a", PASS, FAIL))
    return OnVersion(version, {"core": Judged.of(made)}, ("torch._a", "torch._b")[: 1 + has])


def test_the_page_says_what_began_to_break_and_what_was_mended(tmp_path: Path) -> None:
    for each in (
        OnVersion("2.12.0"),
        ran("2.11.0", PASS),
        ran("2.10.0@3.13", FAIL),
        ran("2.10.0", FAIL, has=False),
        ran("2.9.0", PASS),
    ):
        store(each, tmp_path)
    page = versions_page(read(tmp_path), {"GRAD-01": {"2.10.0": "another reducer"}}, "2.9.0")
    assert "| GRAD-01 | first broken in 2.10.0 (FAIL) | another reducer |" in page
    assert "| GRAD-01 | first mended in 2.11.0 (PASS) | not known |" in page
    assert "On 2.9.0, 2.10.0, 2.11.0 it breaks 1 of 2 requirements each time: 1 of GRAD." in page
    assert "| 2.12.0 | | | | | no run | | | |" in page
    assert "| `torch._a` | all |" in page
    assert "| `torch._b` | 2.9.0, 2.11.0 |" in page
    assert page.index("| 2.9.0 |") < page.index("| 2.10.0 |")
    assert page.count("| 2.10.0 | ") == 2, "on two versions of Python"


def test_the_page_says_where_torch_began_to_have_what_a_requirement_is_about(tmp_path: Path) -> None:
    verdicts = {"2.10.0": Verdict.UNSUPPORTED, "2.11.0": FAIL, "2.12.0": PASS, "2.13.0": Verdict.UNSUPPORTED}
    for version, verdict in verdicts.items():
        store(ran(version, verdict), tmp_path)
    page = versions_page(read(tmp_path), {"GRAD": {"2.11.0": "a new option", "2.12.0": "another reducer"}}, "2.9.0")
    rows = [line for line in page.splitlines() if line.startswith("| GRAD-01 |")]
    assert rows == [
        "| GRAD-01 | first judged in 2.11.0 (FAIL) | a new option |",
        "| GRAD-01 | first mended in 2.12.0 (PASS) | another reducer |",
        "| GRAD-01 | not judged in 2.13.0 (UNSUPPORTED) | not known |",
    ]
    assert "it breaks 1 of 1 requirements each time" in page


def test_a_later_run_of_less_takes_nothing_away(tmp_path: Path) -> None:
    first = ran("2.10.0", FAIL)
    store(first, tmp_path)
    store(ran("2.11.0", PASS), tmp_path)
    quick = replace(first.judged["core"], day="2030-01-01")
    store(OnVersion("2.10.0", {"quick": quick}), tmp_path)
    assert read(tmp_path)[0] == replace(first, judged={"quick": quick, **first.judged})
    store(OnVersion("2.10.0", {"core": quick}), tmp_path)
    assert read(tmp_path)[0].judged == {"quick": quick, "core": quick}
    store(OnVersion("2.10.0", {"core": replace(quick, scenarios=1)}), tmp_path)
    assert read(tmp_path)[0].judged == {"quick": quick, "core": quick}, "a run that was ended replaces no whole one"
    assert [one.version for one in read(tmp_path)] == ["2.10.0", "2.11.0"]


def test_what_the_script_left_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "2.11.0"
    folder.mkdir()
    (folder / "names.txt").write_text(
        "torch 2.11.0+cpu Python 3.11.7\nthere   torch._a  averaging\nMISSING torch._b  x\n"
    )
    (folder / "smoke.txt").write_text(
        "ok          broadcast      text\ngloo's      all_to_all   text\n\nEvery rung holds.\n"
    )
    (folder / "smoke.status").write_text("0")
    tests = [{"subject": {"outcome": "passed"}, "torch": {"outcome": one}} for one in ("passed", "failed")]
    environment = {"packages": {"torch": "2.11.0+cpu"}, "python": "3.11.7", "date": "2026-01-01"}
    (folder / "upstream.json").write_text(json.dumps({"environment": environment, "tests": tests}))
    (folder / "upstream.status").write_text("0")
    headline = "4 of 5 mutants killed, 1 survived, 0 not active; 4 of 5 expected kills seen."
    (folder / "mutants.txt").write_text(f"mutant  made from\n{headline}\n")
    (folder / "mutants.status").write_text("1")
    found = OnVersion.of(folder)
    assert (found.version, found.names) == ("2.11.0", ("torch._a",))
    smoke, upstream = found.judged["smoke"], found.judged["upstream"]
    assert (smoke.build, smoke.python, smoke.scenarios) == ("2.11.0+cpu", "3.11.7", 2)
    assert smoke.counts == {"ddp_impl": {"ok": 1, "gloo's": 1}}
    assert (found.judged["mutants"].scenarios, found.judged["mutants"].counts) == (
        5, {"gloo": {"mutants noticed": 4, "survived": 1}}
    )  # fmt: skip
    assert upstream.counts == {"ddp_impl": {"passed": 2}, "torch's DDP": {"passed": 1, "failed": 1}}


def test_every_change_that_the_page_shows_is_explained() -> None:
    assert "| not known |" not in (PROJECT / PAGE).read_text(encoding="utf-8")


def test_the_five_latest_minor_versions_are_the_support_window() -> None:
    found = read(PROJECT / STORED)
    newest = Version(found[-1].version)
    oldest = f"{newest.major}.{newest.minor - 4}"
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {".".join(one.version.split(".")[:2]) for one in found} == {
        f"2.{minor}" for minor in range(newest.minor - 4, newest.minor + 1)
    }
    assert project["dependencies"] == [f"torch>={oldest}"]
    assert ".".join(map(str, MIN_TORCH)) == oldest
    assert f"torch {oldest} to {newest.major}.{newest.minor} are supported" in (PROJECT / "README.md").read_text(
        encoding="utf-8"
    )
