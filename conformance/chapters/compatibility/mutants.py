"""Mutants of chapter compatibility: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel, sync_batch_norm
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
            for buffer, work in self.iteration.in_flight.values():
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


class RunsTheModuleItself(DistributedDataParallel):
    """BUG: forward calls the module, whatever a subclass puts in the place of `_run_ddp_forward`."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _forward(self, compiler: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self.module(*inputs, **kwargs))


class LeavesAThread(DistributedDataParallel):
    """BUG: each wrapper starts a thread, and nobody ends it."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        threading.Thread(target=threading.Event().wait, name="monitor", daemon=True).start()


class LeavesAProcess(DistributedDataParallel):
    """BUG: each wrapper starts a process with a session of its own, and nobody ends it."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        subprocess.Popen(["sleep", "5"], start_new_session=True)


class LeavesAGroup(DistributedDataParallel):
    """BUG: each wrapper makes a process group, and nobody destroys it."""

    def __init__(self, module: Any, process_group: Any = None, **options: Any) -> None:
        group = process_group or dist.group.WORLD
        super().__init__(module, process_group=dist.new_group(dist.get_process_group_ranks(group)), **options)


class LeavesAFile(DistributedDataParallel):
    """BUG: each wrapper opens a file, and nobody closes it."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        os.open(__file__, os.O_RDONLY)


class LeavesAnExitCallback(DistributedDataParallel):
    """BUG: each wrapper has Python call something when the process ends, and nobody takes it back."""

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        atexit.register(str)


class IsRemembered(DistributedDataParallel):
    """BUG: a list of the class keeps what every wrapper averages."""

    _all: ClassVar[list[Sequence[ManagedParameter]]] = []

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        """Note the parameters."""
        super()._attach_reducer(members)
        self._all.append(members)


class TakesNoSubclassSeriously(DistributedDataParallel):
    """BUG: the constructor accepts subclasses whose overrides nobody calls."""

    def __init__(self, module: Any, **options: Any) -> None:
        kind = type(self)
        self.__class__ = DistributedDataParallel  # type: ignore[assignment]
        DistributedDataParallel.__init__(self, module, **options)
        self.__class__ = kind


class ForgetsSecondOrder(DistributedDataParallel):
    """BUG: the gradient of SyncBatchNorm passes for a constant, so that a gradient penalty has no effect."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with mock.patch.object(sync_batch_norm, "_NormaliseOverRanks", _Normalise):
            return super().forward(*inputs, **kwargs)


class _Normalise(sync_batch_norm._NormaliseOverRanks):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            return sync_batch_norm._NormaliseOverRanks.backward(ctx, *grads)
