"""Errors that name the rank, the parameter, what was expected and what to do."""

from __future__ import annotations


class ReductionError(RuntimeError):
    """Gradients could not be, or were not, averaged over all ranks."""


class IllegalEventError(ReductionError):
    """The reducer was told something that cannot happen in its present state; nothing was changed."""


class ReplicaMismatchError(RuntimeError):
    """The ranks did not wrap the same module; raised on every rank, naming the first difference."""
