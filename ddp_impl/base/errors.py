"""Errors that name the rank, the parameter, what was expected and what to do."""

from __future__ import annotations


class ReductionError(RuntimeError):
    """The reducer could not average the gradients of an iteration over all ranks, or has not done so."""


class CommunicationError(RuntimeError):
    """A collective has failed, or what its future holds is not what was promised, and no wait has raised that."""


class IllegalEventError(ReductionError):
    """An event came that cannot happen in the present phase of the iteration; the reducer has changed nothing."""


class ReplicaMismatchError(RuntimeError):
    """The ranks do not wrap the same module; every rank raises this and names the first difference."""
