"""Imports go down, never in a circle, and never from chapter to chapter; implementations are named in few places."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformance
from conformance.spec.catalogue import CHAPTERS_DIR
from conformance.tests.import_graph import circles, import_graph, imported_names, module_name

ROOT = Path(conformance.__file__).parent
# From values over pure judgement to effects and fronts. What stands on one line does not import each other.
ROOMS = (
    ("errors", "codec", "history", "kept_waiting", "own_mistake", "plugins"),
    ("pending",),
    ("scenario", "observation", "sim_device"),
    ("verdict", "spec", "models", "starters"),
    ("suite", "truth", "backends"),
    ("checkers", "recorder"),
    ("programs",),
    ("composed",),
    ("chapters", "subjects"),
    ("workers",),
    ("bench",),
    ("run",),
    ("report", "upstream"),
    ("smoke", "mutants"),
    ("cli", "pytest_plugin"),
    ("test_chapters", "__main__"),
)
TIERS = {room: tier for tier, rooms in enumerate(ROOMS) for room in rooms}
#: What is pure names no implementation, no backend and no process.
PURE = {"spec", "suite", "models", "truth", "checkers", "programs", "chapters"}
EFFECTS = {"backends", "sim_device", "subjects", "recorder", "workers"}
NAMES_DDP_IMPL = {"subjects", "mutants"}


def modules() -> list[Path]:
    found = (path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py")
    packages_for_others = (ROOT / "starters" / "backend", ROOT / "starters" / "subject")
    return [
        path
        for path in found
        if "tests" not in path.relative_to(ROOT).parts
        and not any(path.is_relative_to(folder) for folder in packages_for_others)
    ]


def room_of(name: str) -> str:
    """Return the room of module `name`; a chapter's mutants are in `mutants`, wherever their file lies."""
    parts = name.split(".")
    return "mutants" if parts[1] == "chapters" and "mutants" in parts else parts[1]


def chapter_of(name: str) -> str:
    """Return the folder of `chapters/` that module `name` is in, empty if in none."""
    parts = name.split(".")
    in_folder = parts[1] == "chapters" and len(parts) > 2 and (CHAPTERS_DIR / parts[2]).is_dir()
    return parts[2] if in_folder else ""


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    own_name = module_name(path, ROOT)
    own = room_of(own_name)
    assert own in TIERS, f"{own} has no tier: place it in ROOMS"
    for name in imported_names(path):
        assert name.split(".")[0] != "workshop", f"{own} imports {name}, which is not installed"
        if name.split(".")[0] == "ddp_impl":
            assert own in NAMES_DDP_IMPL, f"{own} names ddp_impl: only {', '.join(sorted(NAMES_DDP_IMPL))} may"
        elif name.startswith("conformance."):
            other = room_of(name)
            assert other == own or TIERS[other] < TIERS[own], f"{own} imports {other}, which does not lie below it"
            assert not (own in PURE and other in EFFECTS), f"{own} imports {other}, which has effects"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_chapter_is_imported_from_outside_its_folder(path: Path) -> None:
    own = module_name(path, ROOT)
    for name in imported_names(path):
        if name.startswith("conformance.") and (chapter := chapter_of(name)):
            assert chapter == chapter_of(own), f"{own} imports {name}: move what both need to conformance/programs/"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph(modules(), ROOT)
    assert len(graph) > 100
    assert sum(map(len, graph.values())) > 500
    assert circles(graph) == []


def test_a_circle_is_found_however_it_is_written(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("from package import b\n")
    (package / "b.py").write_text("def later():\n    from package.c import name\n")
    (package / "c.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    import package.a\n")
    (package / "d.py").write_text("import package.a\n")
    assert circles(import_graph(package.glob("*.py"), package)) == [["package.a", "package.b", "package.c"]]
