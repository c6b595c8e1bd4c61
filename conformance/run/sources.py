"""Which files a run rested on: hashes of the suite and of the subject's own package, made without importing either."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from conformance.errors import SubjectError

SUITE = "conformance"


def hash_of_suite() -> str:
    """Return the hash of every file of the installed suite."""
    return hash_of_package(SUITE)


def hash_of_subject(target: str) -> str:
    """Return the hash of the files of the top-level package or module that `module:attr` names.

    What it imports from other packages is not in the hash; the report lists the versions of those that matter.

    Raises:
        SubjectError: the package is not installed, or has no files.

    """
    return hash_of_package(target.partition(":")[0].partition(".")[0])


def hash_of_package(name: str) -> str:
    """Return a SHA-256 over relative path and content of every file of a top-level package, but compiled Python.

    Raises:
        SubjectError: the package is not installed, or has no files.

    """
    try:
        spec = importlib.util.find_spec(name)  # of a top-level name, this imports nothing
    except ValueError:  # no name of a module, or that of one without files, such as `__main__`
        spec = None
    found = spec and ([Path(folder) for folder in spec.submodule_search_locations or ()] or [Path(spec.origin or "")])
    files = sorted(_files(found or []))
    if not files:
        raise SubjectError(f"package {name} has no files here to take a hash of; is it installed?")
    total = hashlib.sha256()
    for relative, path in files:
        with path.open("rb") as file:
            total.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {relative}\n".encode())
    return total.hexdigest()


def _files(places: list[Path]) -> Iterator[tuple[str, Path]]:
    for place in places:
        if place.is_file():
            yield place.name, place
        for path in place.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(place).as_posix(), path
