"""The GitHub Action's step, run here: what it writes, when it fails, and that action.yml hands it every input."""

import os
import re
import subprocess
import sys
from pathlib import Path

from conformance.tests.reports_by_hand import FAIL, PASS, outcome, stored

PROJECT = Path(__file__).parents[2]


def step(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    files = {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    return subprocess.run(
        ["bash", str(PROJECT / "ci" / "action.sh")], cwd=folder, env={**os.environ, **files, "PATH": path, **inputs},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_shards_with_a_regression_come_to_a_comment_that_says_so(tmp_path: Path) -> None:
    ids = ("gradients/GRAD-01/mlp", "gradients/GRAD-02/mlp")
    stored(tmp_path / "last", *(outcome(one, PASS) for one in ids))
    for number, verdict in enumerate((PASS, FAIL)):
        stored(tmp_path / f"shard{number}", outcome(ids[number], verdict), selected=ids, num_selected=1)
    done = step(tmp_path, MERGE="shard0 shard1", LAST="last")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "output").read_text() == "status=1\n"
    comment = (tmp_path / "report" / "comment.md").read_text()
    assert comment.startswith("### ❌ ddp-conformance: 1 of 2 failed")
    assert "<summary>Since the last report, of the 2 scenarios of both&#58; 1 regressed</summary>" in comment
    assert "regressed: 1\n  PASS -> FAIL  gradients/GRAD-02/mlp  it was FAIL" in comment
    assert (tmp_path / "summary.md").read_text() == comment
    assert comment.index("1. regressed") < comment.index("<details>")
    assert comment.index("<summary>Since the last report") < comment.index("<summary>FAIL")
    assert {"report.html", "junit.xml"} < {path.name for path in (tmp_path / "report").iterdir()}


def test_outside_a_workflow_the_exit_code_tells(tmp_path: Path) -> None:
    ids = ("gradients/GRAD-01/mlp", "gradients/GRAD-02/mlp")
    for name, one, verdict in (("first", ids[0], PASS), ("good", ids[1], PASS), ("bad", ids[1], FAIL)):
        stored(tmp_path / name, outcome(one, verdict), selected=ids, num_selected=1)
    for merge, status in (("first good", 0), ("first bad", 1)):
        done = step(tmp_path, MERGE=merge, GITHUB_OUTPUT="")
        assert done.returncode == status, done.stdout + done.stderr


def test_the_action_hands_every_variable_to_its_step() -> None:
    used = set(re.findall(r"\$\{([A-Z]+)", (PROJECT / "ci" / "action.sh").read_text())) - {"GITHUB"}
    given = set(re.findall(r"^        ([A-Z]+): \$\{\{ inputs", (PROJECT / "action.yml").read_text(), re.MULTILINE))
    assert used <= given
    inputs = set(re.findall(r"^  (\w+): \{ description", (PROJECT / "action.yml").read_text(), re.MULTILINE))
    read = set(re.findall(r"inputs\.(\w+)", (PROJECT / "action.yml").read_text()))
    assert inputs - {"status"} == read
