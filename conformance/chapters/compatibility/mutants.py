"""Mutants of chapter compatibility: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import ManagedParameter
from ddp_impl.reducer import Reducer


class SaysNothing(DistributedDataParallel):
    """BUG: a public method has no docstring."""

    def undocumented(self) -> None:  # noqa: D102
        pass


class ReadsResults(Reducing):
    """BUG: sums are read from `Work.result()`, which not every backend has."""

    class OwnReducer(Reducer):
        """Asks the work."""

        def _finalize(self) -> None:
            for buffer, work in self._in_flight.values():
                if self.comm_hook is None:
                    work.wait()
                    buffer.copy_(work.result()[0])
            super()._finalize()


class ArgumentsWithoutTuples(DistributedDataParallel):
    """BUG: `to_kwargs` gives inputs and keywords as they are, not each in a tuple of one."""

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Return both."""
        return inputs, kwargs


class PreparesOnce(DistributedDataParallel):
    """BUG: preparing for backward a second time switches averaging off."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        prepare = self.reducer.prepare_for_backward

        def prepare_once(outputs: Any) -> None:
            if self.reducer.state.phase.value == "armed":
                self.reducer.remove_hooks()
            prepare(outputs)

        self.reducer.prepare_for_backward = prepare_once  # type: ignore[method-assign]


class LooksItsGroupUp(DistributedDataParallel):
    """BUG: a group is looked up among those that torch.distributed has made."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        dist.get_rank(self.process_group)
        super()._attach_reducer(members)
