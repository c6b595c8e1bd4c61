"""Versions of the specification: for each, the ids of its requirements and a digest of every sentence.

A version lies in `versions/NAME.toml`, which `python -m workshop freeze NAME` writes:

    released = ""                  # the date, once it is out; from then on nobody writes the file again

    [requirements]
    GRAD-01 = "9f2c44b01ad3"       # the digest of the sentence

`errata.toml` has the changes since a released version, with the reason:

    [[erratum]]
    version = "1.0"
    id = "GRAD-01"
    kind = "reworded"              # or "removed"
    why = "It said `sum` where every implementation computes the mean."
"""

import hashlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.errors import SpecificationError
from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue

VERSIONS_DIR = Path(__file__).parent / "versions"
ERRATA = Path(__file__).parent / "errata.toml"
KINDS = ("reworded", "removed")

_DIGEST_LENGTH = 12
_ERRATUM_KEYS = {"version", "id", "kind", "why"}


@dataclass(frozen=True, slots=True)
class Version:
    """A frozen list of requirements: each id with the digest of its sentence. A draft has no date of release."""

    name: str
    released: str
    digests: Mapping[str, str]

    def scenarios(self, scenarios: Iterable[Scenario]) -> tuple[Scenario, ...]:
        """Return the scenarios of this version, in their order, without those that test a later requirement, too."""
        return tuple(one for one in scenarios if all(name in self.digests for name in one.requirements))


@dataclass(frozen=True, slots=True)
class Erratum:
    """A change of a requirement after the release of a version that holds it, and why."""

    version: str
    id: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Changes:
    """The ids in which a catalogue differs from a version."""

    reworded: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def by_kind(self) -> Mapping[str, tuple[str, ...]]:
        """The changes that errata must explain, by the kind of erratum."""
        return {"reworded": self.reworded, "removed": self.removed}


def digest_of(statement: str) -> str:
    """Return the digest of a requirement's sentence without its line breaks."""
    return hashlib.sha256(" ".join(statement.split()).encode()).hexdigest()[:_DIGEST_LENGTH]


def freeze(name: str, catalogue: Catalogue) -> Version:
    """Return the draft of a version with all requirements of `catalogue`."""
    return Version(name, "", {one.id: digest_of(one.statement) for one in catalogue})


def version_text(version: Version) -> str:
    """Return the file of a version."""
    rows = [f'{requirement_id} = "{digest}"' for requirement_id, digest in version.digests.items()]
    head = ["# Written by `python -m workshop freeze`.", f'released = "{version.released}"', "", "[requirements]"]
    return "\n".join([*head, *rows]) + "\n"


def known_versions(directory: Path = VERSIONS_DIR) -> tuple[str, ...]:
    """Return the names of all versions, the oldest first."""
    return tuple(sorted((path.stem for path in directory.glob("*.toml")), key=_number))


def _number(name: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in name.split("."))


def since(requirement_id: str, versions: Iterable[Version]) -> str:
    """Return the first of `versions`, the oldest first, that holds a requirement; empty if it is in none yet."""
    return next((version.name for version in versions if requirement_id in version.digests), "")


def since_text(requirement_id: str, versions: Iterable[Version]) -> str:
    """Return `since specification 1.0`, or that no version holds the requirement yet."""
    first = since(requirement_id, versions)
    return f"since specification {first}" if first else "in no version of the specification yet"


def load_version(name: str, directory: Path = VERSIONS_DIR) -> Version:
    """Return a version; raises `SpecificationError` for an unknown name or a malformed file."""
    known = known_versions(directory)
    if name not in known:
        raise SpecificationError(f"unknown version {name!r} of the specification; known: {', '.join(known) or 'none'}")
    data = _read(directory / f"{name}.toml")
    digests = data.get("requirements")
    if set(data) != {"released", "requirements"} or not isinstance(data["released"], str):
        raise SpecificationError(f"{name}.toml: expected `released`, a text, and the table [requirements]")
    if not isinstance(digests, dict) or not digests or not all(isinstance(one, str) for one in digests.values()):
        raise SpecificationError(f"{name}.toml: [requirements] must give a digest for each of at least one id")
    return Version(name, data["released"], digests)


def load_errata(path: Path = ERRATA) -> tuple[Erratum, ...]:
    """Return all errata; raises `SpecificationError`, which names the entry, for a malformed file."""
    data = _read(path)
    entries = data.get("erratum", [])
    if set(data) - {"erratum"} or not isinstance(entries, list):
        raise SpecificationError(f"{path.name}: errata are written [[erratum]], and nothing else is read")
    for number, entry in enumerate(entries, start=1):
        where = f"{path.name}: erratum {number}"
        if set(entry) != _ERRATUM_KEYS or not all(isinstance(one, str) and one for one in entry.values()):
            raise SpecificationError(f"{where}: expected a text for each of {', '.join(sorted(_ERRATUM_KEYS))}")
        if entry["kind"] not in KINDS:
            raise SpecificationError(f"{where}: kind must be one of {', '.join(KINDS)}, got {entry['kind']!r}")
    return tuple(Erratum(**entry) for entry in entries)


def changes_since(version: Version, catalogue: Catalogue) -> Changes:
    """Return how `catalogue` differs from `version`."""
    now = freeze("", catalogue).digests
    return Changes(
        tuple(one for one, digest in version.digests.items() if now.get(one, digest) != digest),
        tuple(one for one in version.digests if one not in now),
        tuple(one for one in now if one not in version.digests),
    )


def unexplained(version: Version, catalogue: Catalogue, errata: Iterable[Erratum]) -> tuple[str, ...]:
    """Return a sentence for each requirement of `version` that changed without an erratum.

    Sentences of a draft may change, but its ids must stay.
    """
    explained = {(one.id, one.kind) for one in errata if one.version == version.name}
    return tuple(
        f"{requirement_id} of specification {version.name} was {kind}, and {ERRATA.name} does not say why"
        for kind, ids in changes_since(version, catalogue).by_kind.items()
        for requirement_id in ids
        if (requirement_id, kind) not in explained and (version.released or kind == "removed")
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecificationError(f"{path.name}: not valid TOML: {error}") from error
