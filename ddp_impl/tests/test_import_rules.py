"""Imports go down, never in a circle; one file calls collectives, and one folder names what torch keeps private."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_impl
from conformance.tests.import_graph import circle, import_graph, imported_names, module_name, names_in

ROOT = Path(ddp_impl.__file__).parent
#: The rooms from the bottom up: a module imports its own room and those before it.
ROOMS = ("torch_internals", "base", "wire", "buckets", "autograd", "module", "compile", "reducer", "api")
#: What stands above all rooms.
ABOVE = ("startup", "__init__", "__main__")
#: Modules that stay testable, and readable, without torch; one may import it for annotations.
WITHOUT_TORCH = {"errors", "messages", "arrivals", "plan", "telemetry"}
#: The modules that may name what torch keeps private are called so.
INTERNALS = "ddp_impl.torch_internals."
#: Functions of torch.distributed that ask without communicating.
QUESTIONS = {"get_backend", "is_initialized"}
#: Private names of torch that may be named elsewhere than in `torch_internals`: (file, name) and why.
PRIVATE_NAMES_ELSEWHERE = {
    ("sync_batch_norm", "_check_input_dim"): "inherited from torch's SyncBatchNorm",
    ("sync_batch_norm", "_check_non_zero_input_channels"): "inherited from torch's SyncBatchNorm",
    ("nested_tensors", "_fields"): "the mark of a named tuple, which is Python's",
    ("nested_tensors", "_make"): "how a named tuple is made of its items, which is Python's",
}
#: One noun needs no more lines than this.
MOST_LINES = 700


def modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if "tests" not in path.relative_to(ROOT).parts]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


GRAPH = import_graph(modules(), ROOT)


def test_no_circle_of_imports() -> None:
    assert circle(GRAPH) == []


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    own, order = room(path), ROOMS + ABOVE
    assert own in order, f"{own} is no room: place it in ROOMS"
    for name in GRAPH[module_name(path, ROOT)] - {"ddp_impl"}:
        other = name.split(".")[1]
        assert order.index(other) <= order.index(own), f"{own} imports {name}, and {other} does not lie below it"
    if path.stem in WITHOUT_TORCH:
        assert not any(name.split(".")[0] == "torch" for name in imported_names(path)), f"{path} must not import torch"


def test_arrows_between_rooms_stay_few() -> None:
    arrows = {
        (room(path), name.split(".")[1])
        for path in modules()
        for name in GRAPH[module_name(path, ROOT)]
        if name != "ddp_impl"
    }
    assert len({(one, other) for one, other in arrows if one != other}) <= 40


def test_files_are_short() -> None:
    num_lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert {path: num for path, num in num_lines.items() if num > MOST_LINES} == {}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_collectives_are_called_in_one_file(path: Path) -> None:
    if path.name == "collectives.py" or "compile" in path.parts:
        return
    calls = {
        f"{node.func.value.id}.{node.func.attr}"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    }
    assert {call for call in calls if call.startswith("dist.")} <= {f"dist.{name}" for name in QUESTIONS}


def internals() -> list[Path]:
    return [path for path in modules() if room(path) == "torch_internals"]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that our own code gives to classes, functions, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_name(node.value, "self"):
            yield node.attr


def torch_names() -> set[str]:
    """Return the private attributes of the objects of torch that we handle."""
    module, tensor = nn.Module(), nn.Parameter(torch.zeros(1))
    classes = (nn.RNNBase, torch.distributed.ProcessGroup, torch.fx.GraphModule, torch.fx.Node)
    found = {name for item in (module, tensor, torch, torch.distributed, *classes) for name in dir(item)}
    return {name for name in found if is_private(name)}


def private_names_of_torch(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Yield the private names of torch that a file names: imported, as attributes, or as text given to getattr.

    A private attribute is torch's if our code defines none of that name, or if torch's objects have one, unless it is
    our own object's (`self`).
    """
    for name in names_in(tree):
        if name.split(".")[0] == "torch" and any(is_private(part) for part in name.split(".")):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = is_name(node.value, "self", "cls", "ddp")
            if node.attr not in ours or (node.attr in torch_names() and not own):
                yield node.attr
        elif isinstance(node, ast.Call) and is_name(node.func, "getattr", "hasattr", "setattr"):
            name = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in ours:
                yield name


def test_private_names_of_torch_are_in_one_folder() -> None:
    elsewhere = [path for path in modules() if path not in internals()]
    ours = {name for path in elsewhere for name in defined_names(parsed(path)) if is_private(name)}
    found = {(path.stem, name) for path in elsewhere for name in private_names_of_torch(parsed(path), ours)}
    assert found == set(PRIVATE_NAMES_ELSEWHERE)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._guards import tracing", "torch._guards.tracing"),
        ("import torch._dynamo", "torch._dynamo"),
        ("def f():\n    from torch.distributed.algorithms import _hidden", "torch.distributed.algorithms._hidden"),
        ("torch._foreach_copy_([], [])", "_foreach_copy_"),
        ("torch._C._get()", "_C"),
        ("Variable._execution_engine", "_execution_engine"),
        ("owner._parameters", "_parameters"),
        ("getattr(callback, '_one_graph', False)", "_one_graph"),
    ],
)
def test_private_names_of_torch_are_found(source: str, name: str) -> None:
    found = set(private_names_of_torch(ast.parse(source), ours={"_parameters", "_ours"}))
    assert name in found
    assert not set(private_names_of_torch(ast.parse("self._parameters; other._ours"), {"_parameters", "_ours"}))


def test_no_private_name_is_kept_without_need() -> None:
    named: set[str] = set()
    for path in internals():
        body, name = parsed(path).body, module_name(path, ROOT)
        defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assigned = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]
        defined |= {each for node in assigned for each in defined_names(node) if each != "__all__"}
        public = {each for each in defined if not is_private(each)}
        public.update(getattr(importlib.import_module(name), "__all__", ()))
        named |= {f"{name}.{each}" for each in public}
    used = {name for path in modules() for name in imported_names(path)}
    assert named == {name for name in used if name.startswith(INTERNALS) and name.count(".") == 3}
