"""Commands in the folder of a stranger: they run nothing of it, follow no link out of it, and answer in one line."""

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from conformance.cli import COMMANDS, main
from conformance.cli.search_path import IMPORTING, NAMING_MODULES, search_working_directory
from conformance.codec import encode, parse_object
from conformance.errors import ConformanceError, ReportError, SubjectError
from conformance.report.folder import add_failures_folder, begin_report, keep_failure, write_report
from conformance.report.merge import merge
from conformance.report.read import parse_report
from conformance.run.sources import hash_of_subject
from conformance.spec.catalogue import load_catalogue
from conformance.tests.reports_by_hand import CRASH, outcome, run_report, stored
from conformance.workers.attached_place import place_of

ROOT = Path(__file__).parents[2]
#: The standard library's, this suite's needs, and what some of it imports where it is there.
SHADOWED = ("tomllib", "rich", "click", "msgspec", "jinja2", "torch", "cryptography", "argparse", "numpy", "triton")
NEVER = [["report", "summary", "."], ["verify", "."], ["sign", ".", "--key", "x"], ["list", "GRAD-01"], ["run", "nil"]]


@pytest.mark.parametrize("arguments", NEVER, ids=lambda arguments: arguments[0])
def test_a_command_runs_no_code_of_the_folder_that_it_is_called_in(arguments: list[str], tmp_path: Path) -> None:
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text("import os; os._exit(66)")
    (tmp_path / "report.json").write_text("{}")
    command = [sys.executable, "-m", "conformance", *arguments]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == (0 if arguments[0] == "list" else 2), ended.stderr
    assert arguments[0] not in ("report", "verify", "sign") or "report.json" in ended.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_folder_is_searched_last_and_for_what_the_user_names(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [one for one in sys.path if one]
    monkeypatch.setattr(sys, "path", [*before])
    if command not in NAMING_MODULES:  # its arguments are modules of the user's
        search_working_directory(command, ["--ddp", "torch"])
        assert sys.path == before
    search_working_directory(command, ["--ddp", "mine:MyDDP"])
    assert sys.path == ([*before, ""] if command in IMPORTING else before)


def test_no_page_is_written_through_a_link_of_the_folder(tmp_path: Path) -> None:
    stored(tmp_path / "theirs", outcome("gradients/GRAD-01/mlp", CRASH))
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    page = tmp_path / "theirs" / "report.html"
    page.symlink_to(mine)
    ended = CliRunner().invoke(main, ["report", "html", str(page.parent), "-o", str(page)])
    assert (ended.exit_code, mine.read_text()) == (2, "mine")
    assert "it is a symbolic link" in ended.stderr


def test_no_run_removes_or_writes_files_behind_a_link_of_the_folder(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    report = stored(theirs, outcome("gradients/GRAD-01/mlp", CRASH))
    shutil.rmtree(theirs / "failures")
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    (theirs / "failures").symlink_to(mine)
    acts: list[Callable[[], object]] = [
        lambda: begin_report(theirs, report, ()),
        lambda: add_failures_folder(theirs),
        lambda: write_report(report, load_catalogue(), theirs),
    ]
    for act in acts:
        with pytest.raises(ReportError, match="failures is a symbolic link"):
            act()
    said = keep_failure(report.scenarios[0], "torch", "gloo", load_catalogue(), theirs)
    assert "failures is a symbolic link" in said
    assert [path.read_text() for path in mine.iterdir()] == ["mine"]


@pytest.mark.parametrize("command", ["summary", "html"])
def test_a_name_that_no_file_can_have_is_answered(command: str) -> None:
    ended = CliRunner().invoke(main, ["report", command, "n" * 300])
    assert (ended.exit_code, isinstance(ended.exception, SystemExit)) == (2, True)


@pytest.mark.parametrize(("name", "value"), [("options", 3), ("options", [1]), ("needs", [{}]), ("arguments", "x")])
def test_what_is_to_be_replayed_has_the_form_of_a_scenario(name: str, value: object) -> None:
    data = encode(run_report(outcome("gradients/GRAD-01/mlp", CRASH)))
    data["scenarios"][0]["replay"][name] = value
    with pytest.raises(ReportError, match=rf"scenarios\[0\]\.replay\.{name}: must be as a scenario has it"):
        parse_report(json.dumps(data))


@pytest.mark.parametrize("target", ["__main__:X", ":X", ".:X", "..a:X"])
def test_a_target_that_is_no_installed_module_has_no_files(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as where Python was called with a script
    with pytest.raises(SubjectError, match="has no files here"):
        hash_of_subject(target)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", ""), ("LOCAL_RANK", "-1"), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "http")]
)
def test_a_launchers_variable_that_is_none_is_named(name: str, value: str) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    with pytest.raises(ConformanceError, match=f"{name} must be"):
        place_of({**variables, name: value})


def test_many_scenarios_and_many_keys_take_as_long_as_they_are_many() -> None:
    def seconds(number: int) -> float:
        halves = [[outcome(f"gradients/GRAD-01/{half}{n}", CRASH) for n in range(number)] for half in "ab"]
        ids = [one.id for half in halves for one in half]
        reports = [run_report(*half, selected=ids) for half in halves]
        text = "{" + ",".join(f'"{n}":0' for n in range(10 * number)) + ',"0":0}'
        gc.collect()
        gc.disable()  # its walks through what other tests have left grow with what is made here
        try:
            began = time.process_time()
            merge(reports)
            with pytest.raises(ValueError, match="an object has '0' twice"):
                parse_object(text, "a report")
            return time.process_time() - began
        finally:
            gc.enable()

    assert seconds(4000) < 20 * seconds(400)  # a hundred times, were it quadratic
