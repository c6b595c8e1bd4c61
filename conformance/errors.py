"""Errors that the harness shows to its users: each says what was expected, what came, and what to do.

What nobody outside can get wrong is a mistake of our own. `assert` would say so, but `python -O` removes it. What a
subject, a backend or a file may get wrong is no matter for `certain` and `present`: programs observe it as a fact, and
readers raise a `ConformanceError`.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class ConformanceError(Exception):
    """Base of every error that a user can cause and correct. The command line prints it without a traceback."""


class ScenarioError(ConformanceError, ValueError):
    """A scenario is malformed, or names a program, model or requirement that does not exist."""


class SubjectError(ConformanceError):
    """The DDP under test cannot be imported, or does not return an `nn.Module`."""


class BackendError(ConformanceError):
    """The backend is unknown, is not available here, or cannot serve the requested world size."""


class SpecificationError(ConformanceError, ValueError):
    """The catalogue is malformed, or an id names no requirement."""


class ReportError(ConformanceError):
    """A report cannot be written or read."""


class KnownFailureError(ConformanceError, ValueError):
    """Known failures are malformed, contradict each other, or name scenarios that do not exist."""


class ReplicaError(ConformanceError):
    """The rank that computes the truth did not return it."""


class InterpreterError(ConformanceError):
    """The Python that runs the harness skips checks that verdicts rest on."""


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
