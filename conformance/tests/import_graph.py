"""Which module imports which, read from the source, and the circles in it."""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of the module in `path`; `root` is the folder of its top-level package."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Return the dotted names that `path` imports anywhere, also in functions and for types alone."""
    return frozenset(names_in(ast.parse(path.read_text())))


def names_in(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
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


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first again at the end; none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
