"""The definition of DDP by passages, and which requirements each of them defines."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import SpecificationError
from conformance.spec.catalogue import Catalogue, Requirement

_HEADING = re.compile(r"^ *# -- (?P<name>[^:\n]+?)(?:: (?P<text>[^\n]*?))? -+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of the definition: name and words of its heading, its code, and the chapters and ids that it defines."""

    name: str
    says: str
    code: str
    defines: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """The anchor of its heading on the page of the definition."""
        return re.sub(r"[^\w\- ]", "", self.name.lower()).replace(" ", "-")


def read_passages(definition: Path, table: Path, catalogue: Catalogue) -> tuple[Passage, ...]:
    """Return the passages of `definition` in their order, the one before the first heading left out.

    Raises:
        SpecificationError: the table names a passage, a chapter or an id that there is not, or lacks a passage.

    """
    text = definition.read_text(encoding="utf-8")
    defines = tomllib.loads(table.read_text(encoding="utf-8"))
    headings = list(_HEADING.finditer(text))
    names = [heading["name"] for heading in headings]
    if wrong := sorted({*names} ^ {*defines}):
        raise SpecificationError(f"{table.name} and the headings of {definition.name} differ in: {', '.join(wrong)}")
    known = {*(chapter.name for chapter in catalogue.chapters), *(one.id for one in catalogue)}
    if strange := sorted({each for one in defines.values() for each in one} - known):
        raise SpecificationError(f"{table.name} names what is no chapter and no requirement: {', '.join(strange)}")
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    return tuple(
        Passage(heading["name"], heading["text"] or "", text[heading.end() : end].strip("\n"), tuple(defines[name]))
        for name, heading, end in zip(names, headings, ends, strict=True)
    )


def defining(one: Requirement, passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """Return the passages that define a requirement: those that name it or, if none does, those of its chapter."""
    own = tuple(passage for passage in passages if one.id in passage.defines)
    return own or tuple(passage for passage in passages if one.chapter in passage.defines)


def definition_page(definition: Path, passages: Sequence[Passage]) -> str:
    """Return the page of the definition in Markdown, with a heading for each passage."""
    text = definition.read_text(encoding="utf-8")
    first = _HEADING.search(text)
    head = text[: first.start()] if first else text
    parts = ["# The definition of DDP", "", "The plainest DDP: what every other one is compared with.", ""]
    parts += ["```python", head.rstrip(), "```"]
    for one in passages:
        parts += ["", f"## {one.name}", "", *([f"{one.says}.", ""] if one.says else []), "```python", one.code, "```"]
    return "\n".join(parts) + "\n"
