"""Mutants of chapter delayed_all_reduce: DDPs with one bug each; `mutants.toml` names what detects it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.reducer import Reducer


class RefusesToDelayAll(DistributedDataParallel):
    """BUG: not all parameters may be delayed."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        if all(member.name in self._options.delayed for member in members):
            raise ValueError("some parameter must not be delayed")
        super()._attach_reducer(members)


class DelaysNothing(DistributedDataParallel):
    """BUG: parameters that were to be delayed are reduced with all others."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._options = dataclasses.replace(self._options, delayed=frozenset())
        super()._attach_reducer(members)


class LeavesDelayedLocal(Reducing):
    """BUG: delayed gradients are put off for ever."""

    class OwnReducer(Reducer):
        """Does not send the delayed."""

        def _launch(self, bucket: Bucket) -> None:
            if not any(self.specs[member.index].delayed for member in bucket.members):
                super()._launch(bucket)


class LeavesDelayedParametersAlone(DistributedDataParallel):
    """BUG: delayed parameters are not copied from rank 0 at construction."""

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.module.named_parameters() if name not in self._options.delayed]


class DelaysToTheEnd(DistributedDataParallel):
    """BUG: delayed gradients wait for all others, not for that of `param_to_hook_all_reduce` alone."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._options = dataclasses.replace(self._options, releases_delayed="")
        super()._attach_reducer(members)
