"""Errors that the harness shows to its users: each says what was expected, what came, and what to do."""

from __future__ import annotations


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


class ClientError(ConformanceError):
    """A client is malformed, or what it imports is not installed."""
