"""Imports go down, never in a circle, and never from chapter to chapter; implementations are named in few places."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import conformance
from conformance.spec.catalogue import CHAPTERS_DIR
from conformance.tests.import_graph import circle, import_graph, imported_names, module_name

ROOT = Path(conformance.__file__).parent
# From values over pure judgement to effects and fronts. What stands on one line does not import each other.
ROOMS = (
    ("errors", "codec", "plugins"),
    ("waiting",),
    ("scenario", "observation"),
    ("verdict", "spec", "models"),
    ("suite", "truth", "backends"),
    ("checkers", "recorder", "surroundings"),
    ("programs",),
    ("composed",),
    ("chapters", "subjects"),
    ("workers",),
    ("bench", "parity"),
    ("run",),
    ("report", "upstream"),
    ("smoke", "mutants"),
    ("cli",),
    ("test_chapters", "__main__"),
    ("pytest_plugin",),
)
TIERS = {room: tier for tier, rooms in enumerate(ROOMS) for room in rooms}
#: What is pure names no implementation, no backend and no process.
PURE = {"spec", "suite", "models", "truth", "checkers", "programs", "chapters"}
EFFECTS = {"backends", "subjects", "recorder", "surroundings", "workers"}
NAMES_DDP_IMPL = {"subjects", "mutants"}


def modules() -> list[Path]:
    found = (path for path in sorted(ROOT.rglob("*.py")) if path not in (ROOT / "__init__.py", ROOT / "conftest.py"))
    packages_for_others = tuple(ROOT / "cli" / "starters" / kind for kind in ("backend", "subject"))
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
    parts = name.split(".")
    in_folder = parts[1] == "chapters" and len(parts) > 2 and (CHAPTERS_DIR / parts[2]).is_dir()
    return parts[2] if in_folder else ""


def imports() -> Iterator[tuple[str, str]]:
    for path in modules():
        own = module_name(path, ROOT)
        yield from ((own, name) for name in imported_names(path))


def complaint(own: str, name: str) -> str:
    """Return why module `own` must not import `name`; empty if it may."""
    room, package = room_of(own), name.split(".")[0]
    if room not in TIERS:
        return f"{room} has no tier: place it in ROOMS"
    if package == "workshop":
        return f"{own} imports {name}, which is not installed"
    if package == "ddp_impl" and room not in NAMES_DDP_IMPL:
        return f"{own} names ddp_impl: only {', '.join(sorted(NAMES_DDP_IMPL))} may"
    if not name.startswith("conformance."):
        return ""
    other = room_of(name)
    if other != room and TIERS[other] >= TIERS[room]:
        return f"{own} imports {name}, and {other} does not lie below {room}"
    if room in PURE and other in EFFECTS:
        return f"{own} imports {name}, which has effects"
    if (chapter := chapter_of(name)) and chapter != chapter_of(own):
        return f"{own} imports {name}: move what both need to conformance/programs/"
    return ""


def test_imports_go_down() -> None:
    assert [said for own, name in imports() if (said := complaint(own, name))] == []


def test_what_may_not_be_imported_is_told() -> None:
    for own, name, said in (
        ("conformance.programs.train", "conformance.run.judge", "run does not lie below programs"),
        ("conformance.truth.baton", "conformance.workers.pool", "workers does not lie below truth"),
        ("conformance.checkers.fate", "conformance.backends.gloo", "which has effects"),
        ("conformance.run.judge", "ddp_impl.reducer.reducer", "only mutants, subjects may"),
        ("conformance.chapters.join.contexts", "conformance.chapters.unused.idle_ranks", "move what both need"),
        ("conformance.cli.run", "workshop.renew", "which is not installed"),
        ("conformance.no_room.x", "os", "has no tier"),
    ):
        assert said in complaint(own, name)
    assert complaint("conformance.chapters.join.mutants", "ddp_impl.reducer.reducer") == ""


#: A room more, or an arrow between two, is a concept more that a reader must keep in mind.
MOST_ROOMS, MOST_ARROWS = 31, 165


def test_the_rooms_and_the_arrows_between_them_stay_few() -> None:
    arrows = {(room_of(own), room_of(name)) for own, name in imports() if name.startswith("conformance.")}
    between = {(one, other) for one, other in arrows if one != other}
    assert len(TIERS) <= MOST_ROOMS
    assert len(between) <= MOST_ARROWS, len(between)


#: How long to wait is decided in one place, where the numbers can be compared.
MOST_LIMITS = 15


def numbers_of_seconds(path: Path) -> list[str]:
    return [
        target.id
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_S")
    ]


def test_how_long_to_wait_is_written_in_one_module() -> None:
    limits = ROOT / "waiting" / "limits.py"
    assert 10 < len(numbers_of_seconds(limits)) <= MOST_LIMITS
    others = [path for path in modules() if path.parent.name in ("waiting", "workers", "run") and path != limits]
    found = {path.name: names for path in others if (names := numbers_of_seconds(path))}
    assert found == {"faults.py": ["SLOW_S"]}  # what a fault does


#: One noun needs no more lines than this; a chapter's mutants are a list.
MOST_LINES = 700


def test_files_are_short() -> None:
    num_lines = {
        path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines())
        for path in modules()
        if path.name != "mutants.py"
    }
    assert {path: num for path, num in num_lines.items() if num > MOST_LINES} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph(modules(), ROOT)
    assert len(graph) > 100
    assert sum(map(len, graph.values())) > 500
    assert circle(graph) == []


def test_a_circle_is_found_however_it_is_written(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("from package import b\n")
    (package / "b.py").write_text("def later():\n    from package.c import name\n")
    (package / "c.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    import package.a\n")
    (package / "d.py").write_text("import package.a\n")
    assert set(circle(import_graph(package.glob("*.py"), package))) == {"package.a", "package.b", "package.c"}
