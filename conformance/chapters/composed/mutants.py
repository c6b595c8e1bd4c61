"""Mutants of chapter composed: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.errors import ReductionError
from ddp_impl.reducer import Reducer


class RefusesAlone(Reducing):
    """BUG: a rank that cannot use a gradient raises at once; the others wait for it."""

    class OwnReducer(Reducer):
        """Raises whatever the options are."""

        def _refuse(self, error: ReductionError) -> None:
            raise error


class KeepsDroppedGradients(Reducing):
    """BUG: a gradient that the loop dropped before its first reduction counts; the parameter gets zeros."""

    class OwnReducer(Reducer):
        """Forgets nothing."""

        def _forget_dropped(self, unused: Iterable[int]) -> None:
            """Do nothing."""


class CopyLeavesFrozenOut(DistributedDataParallel):
    """BUG: a copy averages what requires a gradient on this rank now, not what the original averaged."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Forget what the original averaged."""
        super().__setstate__({name: value for name, value in state.items() if name != "_averaged"})
