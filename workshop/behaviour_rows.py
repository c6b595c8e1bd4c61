"""The rows of the pages of behaviours and systems: what a complete DDP does, and the requirements that test it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import SpecificationError

BEHAVIOURS_FILE = Path(__file__).with_name("behaviours.toml")

#: The sections of the page: what a complete DDP consists of, and what users of torch's DDP reported.
SECTIONS = {"systems": "What a complete DDP consists of", "reports": "What users ran into"}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One row: what a DDP does, in a user's words, with the discussions it comes from and its requirements.

    A system also says what it is there for. Right numbers show nothing of that: it has requirements of its own.
    """

    section: str
    name: str
    promise: str
    sources: tuple[str, ...]
    requirements: tuple[str, ...]
    purpose: str = ""
    purpose_requirements: tuple[str, ...] = ()


def load_behaviours(file: Path = BEHAVIOURS_FILE) -> tuple[Behaviour, ...]:
    """Return all rows in their order; raises `SpecificationError`, which names the malformed row."""
    rows = tomllib.loads(file.read_text()).get("behaviour", [])
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            sources, requirements = tuple(row.pop("sources")), tuple(row.pop("requirements"))
            shown = tuple(row.pop("purpose_requirements", ()))
            behaviour = Behaviour(**row, sources=sources, requirements=requirements, purpose_requirements=shown)
        except (KeyError, TypeError) as error:
            raise SpecificationError(f"{file.name}, row {number}: {error}") from error
        if behaviour.section not in SECTIONS:
            raise SpecificationError(
                f"{file.name}, row {number}: section is {behaviour.section!r}, expected {' or '.join(SECTIONS)}"
            )
        found.append(behaviour)
    return tuple(found)
