"""A part of `conformance` imports earlier parts only; implementations are named in few places."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import conformance

ROOT = Path(conformance.__file__).parent
# From values over pure judgement to effects and fronts. What stands on one line does not import each other.
PARTS = (
    ("errors", "decoding"),
    ("scenario", "history", "plugins"),
    ("observation", "verdict", "spec", "fixtures", "behaviours", "starters"),
    ("explanation", "expectations", "order"),
    ("oracles", "rank_context"),
    ("checkers",),
    ("programs",),
    ("chapters", "judge"),
    ("report",),
    ("backends", "subjects"),
    ("mutants", "recorder"),
    ("fixtures.broken_backends", "fixtures.mpi_backend"),
    ("mutants.backends",),
    ("workers", "certification"),
    ("scenario_runner", "upstream"),
    ("runner", "exploration", "smoke", "bench", "doctor", "detection"),
    ("cli", "pytest_plugin"),
    ("test_chapters", "__main__"),
)
TIERS = {part: tier for tier, parts in enumerate(PARTS) for part in parts}
NAMES_DDP_IMPL = {"subjects", "mutants"}


def modules() -> list[Path]:
    found = (path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py")
    packages_for_others = (ROOT / "starters" / "backend", ROOT / "starters" / "subject", ROOT / "fixtures" / "scripts")
    return [
        path
        for path in found
        if "tests" not in path.parts and not any(path.is_relative_to(folder) for folder in packages_for_others)
    ]


def part_of(name: str) -> str:
    """Return the part that `conformance.<name>` belongs to."""
    names = name.split(".")
    deeper = ".".join(names[:2])
    return deeper if deeper in TIERS else names[0]


def imports(path: Path) -> set[str]:
    """Return what `path` imports, inside of functions as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "conformance":
            found |= {f"conformance.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    own = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert own in TIERS, f"{own} has no tier: place it in PARTS"
    for name in imports(path):
        if name.split(".")[0] == "ddp_impl":
            assert own in NAMES_DDP_IMPL, f"{own} names ddp_impl: only {', '.join(sorted(NAMES_DDP_IMPL))} may"
        elif name.startswith("conformance."):
            other = part_of(name.removeprefix("conformance."))
            assert other == own or TIERS[other] < TIERS[own], f"{own} imports {other}, which does not lie below it"
