"""The pytest front, as people call it: in a process of its own, from a folder that is not ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.suite import load_scenarios, one_per_requirement

SUBJECTS = "conformance.tests.subjects"


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "conformance.test_chapters"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_session_that_does_not_use_it_never_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_nothing(request):\n"
        "    assert 'conformance.pytest_plugin' in sys.modules\n"
        "    assert request.config.getoption('--ddp') == 'ddp_impl'\n"
        "    strangers = {'torch', 'numpy', 'rich', 'click'} & set(sys.modules)\n"
        "    ours = {name for name in sys.modules if name.startswith('conformance')}\n"
        "    assert (strangers, ours) == (set(), {'conformance', 'conformance.pytest_plugin'})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "test_nothing.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scenarios_run_side_by_side_in_workers_with_ranks_of_their_own(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-n", "2", "-k", "TRAIN-16 and moe", "--ddp", "torch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_failure_is_the_explanation_and_no_traceback(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-k", "TRAIN-16 and moe-world2", "--ddp", f"{SUBJECTS}:Unsynchronised")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "\nFAIL  TRAIN-16  Models of every family" in done.stdout
    assert f"\nReplay  ddp-conformance run training/TRAIN-16/moe-world2 --ddp {SUBJECTS}:Unsynchronised" in done.stdout
    assert "def test_scenario" not in done.stdout


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_an_unusable_subject_is_said_once_and_ends_the_session(tmp_path: Path, workers: list[str]) -> None:
    done = run_pytest(tmp_path, "-k", "TRAIN-16", "--ddp", f"{SUBJECTS}:NOT_A_CLASS", *workers)
    assert done.returncode != 0
    assert "must be a class, got int" in done.stdout
    assert "INTERNALERROR" not in done.stdout
    assert done.stdout.count("ERROR at setup") <= max(1, len(workers))


def test_scenarios_come_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    def ids(*arguments: str) -> list[str]:
        done = run_pytest(tmp_path, "--collect-only", "-q", "-k", "TRAIN-16", *arguments)
        return re.findall(r"test_scenario\[(.*)\]", done.stdout)

    listed = ids()
    shuffled = ids("--ddp-order", "shuffled", "--ddp-seed", "3")
    assert ids("--ddp-order", "reversed") == listed[::-1]
    assert (sorted(shuffled), shuffled != listed) == (sorted(listed), True)


def test_one_scenario_of_each_requirement_runs_on_request_and_the_session_says_so(tmp_path: Path) -> None:
    def collected(*arguments: str) -> tuple[str, list[str]]:
        done = run_pytest(tmp_path, "--collect-only", "-k", "TRAIN-16 or TRAIN-15", *arguments)
        return done.stdout, re.findall(r"test_scenario\[training/(TRAIN-\d\d)/", done.stdout)

    said, chosen = collected("--one-per-requirement")
    assert sorted(chosen) == ["TRAIN-15", "TRAIN-16"]
    scenarios = load_scenarios()
    num_chosen = len(one_per_requirement(scenarios))
    assert f"ddp-conformance: {num_chosen:,} of {len(scenarios):,} scenarios, one per requirement; all of them" in said
    said, everything = collected()
    assert len(everything) > len(chosen)
    assert "one per requirement" not in said
