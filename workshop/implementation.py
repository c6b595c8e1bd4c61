"""How large `ddp_impl` is, and what a step costs in calls: numbers that may fall."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ddp_impl
from ddp_impl.tests.test_calls import BOUNDS


@dataclass(frozen=True, slots=True)
class Implementation:
    """`ddp_impl` without its tests: lines, files, fields, and calls of Python functions that it adds to a step.

    `fields`: attributes that classes whose objects change declare, or assign to `self`; `flags`: those that hold True
    or False. `step` and `bucket`: calls of a step without options, and of each bucket; `unused`: of a step with
    `find_unused_parameters`.
    """

    lines: int
    files: int
    fields: int
    flags: int
    step: int
    bucket: int
    unused: int


def measure(root: Path = Path(ddp_impl.__file__).parent) -> Implementation:
    """Read the source below `root`."""
    texts = [path.read_text() for path in root.rglob("*.py") if "tests" not in path.relative_to(root).parts]
    fields = [field for text in texts for field in _fields(ast.parse(text))]
    return Implementation(
        lines=sum(len(text.splitlines()) for text in texts),
        files=len(texts),
        fields=len({(place, name) for place, name, _ in fields}),
        flags=len({(place, name) for place, name, is_flag in fields if is_flag}),
        step=BOUNDS["default"][1],
        bucket=BOUNDS["default"][2],
        unused=BOUNDS["unused"][1],
    )


def _fields(tree: ast.AST) -> Iterator[tuple[ast.ClassDef, str, bool]]:
    """Yield class, name and whether it is a flag, for each time that a field is declared or assigned."""
    for kind in ast.walk(tree):
        if not isinstance(kind, ast.ClassDef) or any("frozen=True" in ast.unparse(one) for one in kind.decorator_list):
            continue
        for node in ast.walk(kind):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            is_flag = isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool)
            is_flag |= isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "bool"
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                        yield kind, one.attr, is_flag
                    elif isinstance(one, ast.Name) and isinstance(node, ast.AnnAssign) and node in kind.body:
                        yield kind, one.id, is_flag
