"""`smoke` notices each method of the generated process group that is left out, and says what to do."""

import ast
import importlib.util
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from conformance.cli.starters.starter import Starter
from conformance.smoke.ladder import Status, climb
from conformance.workers.zygote_process import ZygoteProcess

DEADLINE_S = 10.0
#: What torch answers as well where nothing fails, what only a DDP that has failed asks for, and an older name.
NOT_MISSED = ("is_success", "exception", "get_group_store", "abort", "allgather_into_tensor_coalesced")

#: The adapter, at the end of a module that is else the generated one without a method.
EPILOGUE = """

from dataclasses import replace
from acme.adapter import BACKEND as WORKING

BACKEND = replace(WORKING, create=AcmeGroup)
"""


def without(source: str, class_name: str, method: str) -> str:
    """Return the module without one method of one class, its aliases included."""
    tree = ast.parse(source)
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found.body = [node for node in found.body if method not in names_of(node)]
    return ast.unparse(tree)


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if isinstance(node, ast.Assign) else set()


def variants(source: str) -> Iterator[tuple[str, str]]:
    """Yield every method, and the module's source without it."""
    for one in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for method in (name for node in one.body for name in sorted(targets_of(node))):
            if not method.startswith("_") and method not in NOT_MISSED:
                yield f"{one.name.removeprefix('Acme')}.{method}", without(source, one.name, method)


def targets_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {part.id for part in node.targets if isinstance(part, ast.Name)} if isinstance(node, ast.Assign) else set()


@pytest.mark.nightly
def test_smoke_notices_every_method_that_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Starter("backend", "acme").write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "acme"))
    assert importlib.util.find_spec("acme.group") is not None
    changed = list(variants((tmp_path / "acme" / "acme" / "group.py").read_text()))
    for number, (_, text) in enumerate(changed):
        (tmp_path / "acme" / f"acme_variant_{number}.py").write_text(text + EPILOGUE)
    with closing(ZygoteProcess(None, ())) as zygote:
        for number, (method, _) in enumerate(changed):
            *_, last = climb(f"acme_variant_{number}:BACKEND", "torch", deadline_s=DEADLINE_S, zygote=zygote)
            assert last.status is Status.BROKEN, method
            assert last.breakage is not None, method
            assert last.breakage.advice, method
