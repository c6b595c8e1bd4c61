"""Private names of torch: all are listed, and one that is missing takes one feature away."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_impl.torch_internals import __main__ as command
from ddp_impl.torch_internals import names

FOLDER = Path(names.__file__).parent
LISTED = {name for listed in names.needed().values() for name in listed}


def imported(tree: ast.AST) -> set[str]:
    """Return the names that are imported from private modules of torch, and private ones from public modules."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    paths = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names if f"{node.module}"[:5] == "torch"}
    return {path for path in paths if any(part.startswith("_") for part in path.split("."))}


def test_every_private_name_that_is_imported_is_listed() -> None:
    for path in FOLDER.glob("*.py"):
        assert imported(ast.parse(path.read_text())) <= LISTED, f"{path.name} imports names that names.py does not list"


def test_all_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command._check() == 0
    assert "MISSING" not in capsys.readouterr().out


def test_a_missing_name_takes_its_feature_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(RuntimeWarning, match=r"has no torch\._dynamo\.no_such, which ddp_impl needs for torch\.compile"):
        absent = names.needed_for(names.COMPILE, "torch._dynamo.no_such")
    assert not isinstance(5, absent)
    for use in (absent, lambda: absent.attribute):
        with pytest.raises(NotImplementedError, match="All else works as ever"):
            use()
    monkeypatch.setattr(command, "needed", lambda: {names.COMPILE: ("torch._dynamo.no_such",)})
    assert command._check() == 1
    assert "MISSING" in (said := capsys.readouterr().out)
    assert "without torch.compile, all else works" in said


@pytest.mark.parametrize("name", ["torch._C._current_graph_task_id", "torch._C._distributed_c10d.GradBucket"])
def test_without_a_name_that_averaging_needs_the_import_says_which(name: str) -> None:
    program = f"import torch; del {name}; import ddp_impl"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"has no {name}: install another version of torch" in done.stderr.splitlines()[-1]
