"""All checkers, by name."""

from conformance.checkers import agreement, exercised, facts, fate, protocol, refusal
from conformance.checkers.checker import CHECKERS, Checker
from conformance.errors import SpecificationError, hint

#: The modules whose import registers checkers.
MODULES = (agreement, exercised, facts, fate, protocol, refusal)


def get_checker(name: str) -> Checker:
    """Return the checker called `name`; raises `SpecificationError` with near misses."""
    if name not in CHECKERS:
        raise SpecificationError(f"unknown checker {name!r}{hint(name, CHECKERS)}")
    return CHECKERS[name]
