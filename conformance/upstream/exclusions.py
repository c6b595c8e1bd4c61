"""Reads the tests that only torch's DDP can pass, with a reason for each."""

import tomllib
from collections.abc import Collection
from importlib import resources

from conformance.errors import SpecificationError
from conformance.upstream.outcome import TestName

_FILE = "exclusions.toml"


def load_exclusions() -> dict[TestName, str]:
    """Return the excluded tests and why.

    Raises:
        SpecificationError: an entry without test or reason, or two for the same test.

    """
    return parse_exclusions(resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8"))


def parse_exclusions(text: str) -> dict[TestName, str]:
    """Return the excluded tests of a TOML document with `[[exclusion]]` tables of `test` and `reason`."""
    try:
        entries = tomllib.loads(text).get("exclusion", [])
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecificationError(f"{_FILE}: {error}") from error
    exclusions: dict[TestName, str] = {}
    for entry in entries:
        if set(entry) != {"test", "reason"} or not all(isinstance(text, str) and text for text in entry.values()):
            raise SpecificationError(f"{_FILE}: an exclusion has a test and a reason, and nothing else; got {entry}")
        suite, _, method = entry["test"].partition("::")
        name = TestName(suite, method)
        if name in exclusions:
            raise SpecificationError(f"{_FILE}: {name} is excluded twice")
        exclusions[name] = entry["reason"]
    return exclusions


def check_exclusions(exclusions: Collection[TestName], tests: Collection[TestName]) -> None:
    """Raise `SpecificationError` when an exclusion matches none of all the `tests` of this torch."""
    if unknown := sorted(str(name) for name in exclusions if name not in tests):
        raise SpecificationError(
            f"{_FILE}: no such test in this version of torch: {', '.join(unknown)}; remove or rename the exclusion"
        )
