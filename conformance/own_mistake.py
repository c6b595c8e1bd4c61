"""What the harness relies on and does not judge: where it does not hold, the mistake is our own.

`assert` says the same, but `python -O` removes it. What a subject, a backend or a file may get wrong is no matter for
these functions: programs observe it as a fact, and readers raise a `ConformanceError`.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class OwnMistake(Exception):  # noqa: N818 - it is one
    """The harness contradicts itself. Nobody who uses it can mend that."""


def certain(holds: bool, otherwise: str) -> None:
    """Raise `OwnMistake`, with the text `otherwise`, unless the condition holds."""
    if not holds:
        raise OwnMistake(otherwise)


def present(value: T | None) -> T:
    """Return `value`, which is not None; raises `OwnMistake` if it is."""
    if value is None:
        raise OwnMistake("a value is missing")
    return value


def instance(value: object, kind: type[T]) -> T:
    """Return `value`, which is an instance of `kind`; raises `OwnMistake` if it is not."""
    if not isinstance(value, kind):
        raise OwnMistake(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
