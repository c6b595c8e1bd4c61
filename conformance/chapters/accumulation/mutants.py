"""Mutants of chapter accumulation: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.bases import ActsAfterBackward, NothingToWaitFor, Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.parameter_usage import ParameterUsage
from ddp_impl.reducer import Reducer


class ReducesInsideNoSync(TorchDDP):
    """BUG: `no_sync` does nothing; every backward averages what has been accumulated."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing."""
        yield


class GathersInsideNoSync(ActsAfterBackward):
    """BUG: gradients are averaged by all_gather, and gathered inside `no_sync`, too, where nobody uses what comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _mean_of_gathered)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Note whether the forward is local."""
        self.is_local = not self.require_backward_grad_sync
        return super().forward(*inputs, **kwargs)

    def after_reduced(self) -> None:
        """Gather what this rank has accumulated."""
        if self.is_local:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            _gathered(self.process_group, torch.cat([gradient.reshape(-1) for gradient in gradients]))


def _gathered(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
    parts = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(parts, flat, group=group)
    return torch.stack(parts)


def _mean_of_gathered(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    mean: Future[Tensor] = Future()
    mean.set_result(_gathered(group, bucket.buffer()).sum(0) / group.size())
    return mean


class BackwardDecides(Reducing):
    """BUG: whether gradients are reduced is decided by where backward runs, not by where forward did."""

    class OwnReducer(Reducer):
        """Asks its wrapper late."""

        wrapper: Any = None

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            if self.wrapper().require_backward_grad_sync:
                super()._start(bucket, buffer)
            else:
                self.iteration.in_flight[bucket.index] = (buffer, NothingToWaitFor())

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.wrapper = weakref.ref(self)  # type: ignore[attr-defined]


class ResyncsParameters(DistributedDataParallel):
    """BUG: leaving `no_sync` gives every rank the parameters of rank 0."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run without synchronisation, then copy."""
        with super().no_sync():
            yield
        self._synchronise_state(False)


class HidesNoSync(DistributedDataParallel):
    """BUG: inside `no_sync` the attribute `require_backward_grad_sync` stays True."""

    is_local = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Note it elsewhere."""
        before = self.is_local
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, without synchronisation if that was noted."""
        with super().no_sync() if self.is_local else contextlib.nullcontext():
            return super().forward(*inputs, **kwargs)


class ForgetsEarlierUse(Reducing):
    """BUG: what was used under `no_sync` does not count as used when it is reduced."""

    class OwnUsage(ParameterUsage):
        """Counts the last backward alone."""

        def _used(self, used_before: Collection[int] = ()) -> list[bool]:
            self.used_locally.clear()
            return super()._used(())


class InnerNoSyncEndsOuter(TorchDDP):
    """BUG: leaving any `no_sync` switches synchronisation on."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Switch synchronisation off, then on."""
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = True


class NoSyncSurvivesException(TorchDDP):
    """BUG: when an exception leaves `no_sync`, synchronisation stays off."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Switch synchronisation off, and back on only if all goes well."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = before


class NoSyncDropsGradients(DistributedDataParallel):
    """BUG: the first synchronised forward throws away what was accumulated under `no_sync`."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync and not self.require_forward_param_sync:
            self.module.zero_grad()
        return super()._pre_forward(*inputs, **kwargs)


class AveragesInBetween(Reducing):
    """BUG: any backward sets off the reduction that a synchronised forward has armed, a local one, too."""

    class OwnReducer(Reducer):
        """Does not listen to local forwards."""

        def forward_was_local(self, outputs: Iterable[Tensor]) -> None:
            """Do nothing."""


class TakesFailedForRunning(Reducing):
    """BUG: a backward that raised goes on for the reducer: it takes the gradients of the next one, a local one, too."""

    class OwnReducer(Reducer):
        """Does not notice that a backward raised."""

        def _backward_raised(self, *_: object) -> None:
            """Do nothing."""
