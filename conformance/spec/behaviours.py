"""What a complete DDP does, row by row, and which requirements hold it to that."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import SpecificationError

BEHAVIOURS_FILE = Path(__file__).with_suffix(".toml")

#: Where behaviours come from: what a complete DDP consists of, and what users of torch's DDP reported.
SECTIONS = {"systems": "What a complete DDP consists of", "reports": "What users ran into"}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One row: what DDP does, in the words of a user, with the discussions that it comes from."""

    section: str
    name: str
    promise: str
    sources: tuple[str, ...]
    requirements: tuple[str, ...]


def load_behaviours(file: Path = BEHAVIOURS_FILE) -> tuple[Behaviour, ...]:
    """Return all rows in their order; raises `SpecificationError` naming the row that is not as it must be."""
    rows = tomllib.loads(file.read_text()).get("behaviour", [])
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            sources, requirements = tuple(row.pop("sources")), tuple(row.pop("requirements"))
            behaviour = Behaviour(**row, sources=sources, requirements=requirements)
        except (KeyError, TypeError) as error:
            raise SpecificationError(f"{file.name}, row {number}: {error}") from error
        if behaviour.section not in SECTIONS:
            raise SpecificationError(
                f"{file.name}, row {number}: section is {behaviour.section!r}, expected {' or '.join(SECTIONS)}"
            )
        found.append(behaviour)
    return tuple(found)
