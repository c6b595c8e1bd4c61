"""Errors that the harness shows to its users: each says what was expected, what arrived, and what to do.

`certain`, `present` and `instance` are for mistakes of the harness; `assert` would be, but `python -O` removes it. A
mistake of a subject or a backend is a fact that programs observe; a mistake in a file is a `ConformanceError`.
"""

import difflib
import re
from collections.abc import Iterable
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
    """The harness contradicts itself: its users cannot correct that."""


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` with the known names close to `name`, or a list of known names if none is close."""
    names = sorted(known)
    by_plain = {_plain(candidate): candidate for candidate in names}
    near = [by_plain[match] for match in difflib.get_close_matches(_plain(name), by_plain, n=3)]
    if near:
        return f"; did you mean {', '.join(near)}?"
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    return f"; known: {shown or 'none'}"


def _plain(name: str) -> str:
    """Return `name` as people type ids: GRAD-01, grad-01 and GRAD-1 are one name."""
    return re.sub(r"-0+(?=[0-9])", "-", name.lower())


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
