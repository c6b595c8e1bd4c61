"""The catalogue: reads `requirements.toml` of every chapter into frozen values.

Unknown keys are errors, so that a typing mistake cannot lose a requirement. The file's format:

    [chapter]
    name = "gradients"             # the folder's name and the first part of every scenario id
    title = "Gradients"
    prefix = "GRAD"                # every id of this chapter is GRAD-01, GRAD-02, ...
    order = 20                     # optional: where the chapter stands in reports

    [[requirement]]
    id = "GRAD-01"
    statement = "After a synchronised backward every rank MUST hold the mean of the ranks' local gradients."
    level = "core"                 # core, full, compiled, parallel, gpu or backend
    source = ["torch DDP docs", "pytorch/pytorch#12345"]
    testable = true                # false needs a `note` that says why no scenario can show it
    note = ""                      # optional, for readers
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.errors import SpecificationError, hint

if TYPE_CHECKING:
    from conformance.scenario import Scenario

CHAPTERS_DIR = Path(__file__).parent.parent / "chapters"
REQUIREMENTS = "requirements.toml"
LEVELS = ("core", "full", "compiled", "parallel", "gpu", "backend")

_ID = re.compile(r"^(?P<prefix>[A-Z][A-Z0-9]*)-(?P<number>[0-9]{2,3})$")
_KEYWORD = re.compile(r"\b(MUST|MUST NOT|SHOULD|MAY)\b")
_CHAPTER_KEYS = {"name": str, "title": str, "prefix": str, "order": int}
_REQUIREMENT_KEYS = {
    "id": str, "statement": str, "level": str, "source": list, "testable": bool, "note": str,
}  # fmt: skip
_OPTIONAL_KEYS = {"order", "testable", "note"}


@dataclass(frozen=True, slots=True)
class Requirement:
    """One sentence that a DDP must keep, with its sources."""

    id: str
    chapter: str
    statement: str
    level: str
    source: tuple[str, ...]
    testable: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class Chapter:
    """The requirements on one subject, in the order of their file."""

    name: str
    title: str
    prefix: str
    requirements: tuple[Requirement, ...]
    order: int = 1000


@dataclass(frozen=True)
class Catalogue:
    """All chapters, in their order; iterating yields every requirement."""

    chapters: tuple[Chapter, ...]

    def __iter__(self) -> Iterator[Requirement]:
        for chapter in self.chapters:
            yield from chapter.requirements

    def __len__(self) -> int:
        return sum(len(chapter.requirements) for chapter in self.chapters)

    def __contains__(self, requirement_id: object) -> bool:
        return requirement_id in self._by_id

    @cached_property
    def _by_id(self) -> Mapping[str, Requirement]:
        return {requirement.id: requirement for requirement in self}

    @property
    def statements(self) -> Mapping[str, str]:
        """The requirements' sentences by their ids."""
        return {requirement.id: requirement.statement for requirement in self}

    def requirement(self, requirement_id: str) -> Requirement:
        """Return the requirement with this id; raises `SpecificationError`, which suggests similar ids."""
        if requirement_id not in self._by_id:
            raise SpecificationError(f"unknown requirement {requirement_id!r}{hint(requirement_id, self._by_id)}")
        return self._by_id[requirement_id]

    def chapter(self, name: str) -> Chapter:
        """Return the chapter called `name`; raises `SpecificationError`, which suggests similar names."""
        chapters = {chapter.name: chapter for chapter in self.chapters}
        if name not in chapters:
            raise SpecificationError(f"unknown chapter {name!r}{hint(name, chapters)}")
        return chapters[name]

    def uncovered(self, scenarios: Iterable[Scenario]) -> tuple[Requirement, ...]:
        """Return the testable requirements that no scenario tests."""
        covered = {requirement_id for scenario in scenarios for requirement_id in scenario.requirements}
        return tuple(requirement for requirement in self if requirement.testable and requirement.id not in covered)


@cache
def load_catalogue() -> Catalogue:
    """Return the catalogue of the suite; raises what `read_catalogue` does."""
    return read_catalogue(CHAPTERS_DIR)


def read_catalogue(directory: Path) -> Catalogue:
    """Read every chapter of `directory`; raises `SpecificationError`, which names file and entry of the first mistake.

    A chapter is a folder with `requirements.toml`, at any depth: chapters on one subject may share a parent folder.
    """
    chapters = [_read_chapter(path) for path in _requirements_files(directory)]
    prefixes: dict[str, str] = {}
    for chapter in chapters:
        if other := prefixes.get(chapter.prefix):
            raise SpecificationError(f"chapters {other} and {chapter.name} share the prefix {chapter.prefix}")
        prefixes[chapter.prefix] = chapter.name
    return Catalogue(tuple(sorted(chapters, key=lambda chapter: (chapter.order, chapter.name))))


def chapter_packages() -> dict[str, str]:
    """Return the Python package of every chapter by the chapter's name, such as `conformance.chapters.join`."""
    folders = [path.parent for path in _requirements_files(CHAPTERS_DIR)]
    return {
        folder.name: ".".join(("conformance", *folder.relative_to(CHAPTERS_DIR.parent).parts)) for folder in folders
    }


def _requirements_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob(REQUIREMENTS), key=lambda path: path.parent.name)


def _read_chapter(path: Path) -> Chapter:
    where = f"{path.parent.name}/{path.name}"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecificationError(f"{where}: not valid TOML: {error}") from error
    if extra := sorted(set(data) - {"chapter", "requirement"}):
        raise SpecificationError(f"{where}: unknown table(s): {', '.join(extra)}")
    head = _checked(f"{where}: [chapter]", data.get("chapter"), _CHAPTER_KEYS)
    if head["name"] != path.parent.name:
        raise SpecificationError(f"{where}: chapter is called {head['name']!r}, but its folder {path.parent.name!r}")
    entries = data.get("requirement", [])
    if not isinstance(entries, list):
        raise SpecificationError(f"{where}: requirements are written [[requirement]], with two brackets")
    requirements: dict[str, Requirement] = {}
    for index, entry in enumerate(entries, start=1):
        requirement = _requirement(f"{where}: requirement {index}", entry, head["name"], head["prefix"])
        if requirement.id in requirements:
            raise SpecificationError(f"{where}: {requirement.id} is defined twice")
        requirements[requirement.id] = requirement
    return Chapter(requirements=tuple(requirements.values()), **head)


def _requirement(where: str, entry: Any, chapter: str, prefix: str) -> Requirement:
    fields = _checked(where, entry, _REQUIREMENT_KEYS)
    where = f"{where} ({fields['id']})"
    match = _ID.match(fields["id"])
    if match is None or match["prefix"] != prefix:
        raise SpecificationError(f"{where}: ids of this chapter look like {prefix}-01")
    if fields["level"] not in LEVELS:
        raise SpecificationError(f"{where}: level must be one of {', '.join(LEVELS)}, got {fields['level']!r}")
    if not _KEYWORD.search(fields["statement"]):
        raise SpecificationError(f"{where}: a statement says MUST, MUST NOT, SHOULD or MAY: {fields['statement']!r}")
    if not fields["source"] or not all(isinstance(item, str) and item for item in fields["source"]):
        raise SpecificationError(f"{where}: source must be a non-empty list of strings, got {fields['source']!r}")
    if not fields.get("testable", True) and not fields.get("note"):
        raise SpecificationError(f"{where}: testable = false needs a note that says why")
    return Requirement(chapter=chapter, **{**fields, "source": tuple(fields["source"])})


def _checked(where: str, entry: Any, keys: Mapping[str, type]) -> dict[str, Any]:
    """Return `entry` if it is a table with exactly these keys, some of them optional, of these types."""
    if not isinstance(entry, dict):
        raise SpecificationError(f"{where}: expected a table, got {type(entry).__name__}")
    if unknown := sorted(set(entry) - set(keys)):
        raise SpecificationError(f"{where}: unknown key(s): {', '.join(unknown)}{hint(unknown[0], keys)}")
    if missing := sorted(set(keys) - set(entry) - _OPTIONAL_KEYS):
        raise SpecificationError(f"{where}: missing key(s): {', '.join(missing)}")
    for key, value in entry.items():
        if type(value) is not keys[key] or (value == "" and key not in _OPTIONAL_KEYS):
            raise SpecificationError(f"{where}: {key} must be a {keys[key].__name__}, got {value!r}")
    return dict(entry)
