"""A run that is killed: what it had found by then is read, and another one goes on from there."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.cli.run import failed_in
from conformance.errors import ReportError
from conformance.report.folder import begin_report
from conformance.report.journal import JOURNAL, note_outcome
from conformance.report.read import read_report
from conformance.report.resumed import found_before
from conformance.suite import Selection
from conformance.tests.reports_by_hand import FAIL, HARNESS_ERROR, PASS, outcome, run_report, scenario, stored
from conformance.workers.zygote_process import _locked, _remove_orphaned_directories

OLD = outcome("gradients/GRAD-01/old", PASS)
FOUND = [
    outcome(f"gradients/GRAD-01/{name}", verdict)
    for name, verdict in zip("abc", (FAIL, PASS, HARNESS_ERROR), strict=True)
]
BEGUN = run_report(num_selected=4, selected=[*(one.id for one in FOUND), "gradients/GRAD-01/d"], interrupted=True)
SCENARIOS = [scenario(one.id) for one in FOUND]


def test_the_last_report_stays_until_something_has_been_found(tmp_path: Path) -> None:
    stored(tmp_path, OLD)
    assert read_report(tmp_path).scenarios == (OLD,)
    begin_report(tmp_path, BEGUN, FOUND[:1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failures", JOURNAL]
    assert read_report(tmp_path).scenarios == (FOUND[0],)


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_journal_is_read_up_to_the_line_that_is_cut_short(cut: int, tmp_path: Path) -> None:
    begin_report(tmp_path, BEGUN, FOUND[:1])
    for one in FOUND[1:]:
        note_outcome(tmp_path, one)
    journal = tmp_path / JOURNAL
    journal.write_bytes(journal.read_bytes()[: -cut or None])
    report = read_report(tmp_path)
    assert list(report.scenarios) == (FOUND[:2] if cut else FOUND)
    assert (report.is_complete, report.interrupted, report.totals.selected) == (False, True, 4)
    assert failed_in(tmp_path, Selection()).names == tuple(one.id for one in report.failures)
    assert found_before(tmp_path, BEGUN, SCENARIOS) == tuple(FOUND[:2])  # an error of the harness is no verdict


def test_what_was_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    stored(tmp_path / "whole", OLD)
    with pytest.raises(ReportError, match="is complete; nothing is left to resume"):
        found_before(tmp_path / "whole", BEGUN, SCENARIOS)
    (tmp_path / "other").mkdir()
    begin_report(tmp_path / "other", run_report(num_selected=1, backend="nccl"), ())
    with pytest.raises(ReportError, match=r"this run and that in .* differ in backend: nccl and gloo"):
        found_before(tmp_path / "other", BEGUN, SCENARIOS)


@pytest.mark.nightly
def test_a_run_that_is_killed_at_random_moments_comes_to_the_verdicts_of_one_that_is_not(tmp_path: Path) -> None:
    number, moments = int(os.environ.get("KILLS", "3")), random.Random(7)
    chosen = os.environ.get("CHOSEN", "GRAD-01").split()
    command = [sys.executable, "-m", "conformance", "run", *chosen, "--no-native", "--report"]
    subprocess.run([*command, tmp_path / "whole"], check=False, capture_output=True)
    whole, folder, held = read_report(tmp_path / "whole"), tmp_path / "killed", [0]
    for kill in range(number):
        run = subprocess.Popen(
            [*command, folder, *["--resume"] * bool(held[-1])],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        wanted = held[-1] + max(1, moments.randrange(2 * len(whole.scenarios) // number))
        while run.poll() is None and _num_found(folder) < wanted:
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
        if (status := run.wait()) >= 0:
            assert status < 2, "refused"
            break  # it had judged the rest
        report = read_report(folder)
        assert not report.is_complete
        assert len(report.scenarios) >= held[-1]
        held.append(len(report.scenarios))
        print(f"kill {kill + 1}: {held[-1]} of {len(whole.scenarios)}")
    last = subprocess.run([*command, folder, "--resume"], check=False, capture_output=True, text=True)
    assert last.returncode < 2, last.stderr
    resumed = read_report(folder)
    assert [(one.id, one.subject.verdict) for one in resumed.scenarios] == [
        (one.id, one.subject.verdict) for one in whole.scenarios
    ]
    assert resumed.is_complete


def _num_found(folder: Path) -> int:
    journal = folder / JOURNAL
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


def test_private_folders_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    folders = [tmp_path / f"ddp-conformance-{name}" for name in ("dead", "alive", "another")]
    for folder in folders:
        folder.mkdir()
        (folder / "zygote.output").touch()
    (folders[0] / "owner").touch()
    with _locked(folders[1] / "owner"):
        _remove_orphaned_directories(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(folders[1:])
