"""Errors of the harness: each says what was expected, what came, and what to do."""

from __future__ import annotations


class ConformanceError(Exception):
    """Base of every error that a user of the harness can cause and mend. Fronts print it without a traceback."""


class ScenarioError(ConformanceError, ValueError):
    """A scenario is malformed or names something that does not exist."""


class SubjectError(ConformanceError):
    """The DDP under test cannot be imported or is not a module wrapper."""


class BackendError(ConformanceError):
    """The backend is unknown, is not available here, or cannot serve what was asked."""


class SpecificationError(ConformanceError, ValueError):
    """The catalogue is malformed, or an id names no requirement."""


class ReportError(ConformanceError):
    """A report cannot be written or read."""


class KnownFailureError(ConformanceError, ValueError):
    """Known failures are malformed, contradict each other, or name scenarios that do not exist."""
