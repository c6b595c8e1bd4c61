"""Which module imports which, read from the source, and the circles in it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of the module in `path`; `root` is the folder of its top-level package."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> set[str]:
    """Return the dotted names that `path` imports anywhere, also in functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def import_graph(paths: Iterable[Path], root: Path) -> dict[str, set[str]]:
    """Return, for every module among `paths`, those of them that it imports.

    `from package import name` counts as an import of `package.name` where that is a module, else of `package`.
    """
    modules = {module_name(path, root): path for path in paths}
    return {
        name: {target for imported in imported_names(path) if (target := _owner(imported, modules)) and target != name}
        for name, path in modules.items()
    }


def _owner(name: str, modules: Mapping[str, Path]) -> str:
    """Return the module that defines `name`, the most deeply nested one; empty if it is none of `modules`."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle, each sorted (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        path.append(node)
        for target in graph[node]:
            if target not in number:
                visit(target)
            if target in path:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == number[node]:
            circle = path[path.index(node) :]
            del path[path.index(node) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in graph:
        if node not in number:
            visit(node)
    return found
