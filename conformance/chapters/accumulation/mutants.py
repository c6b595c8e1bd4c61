"""Mutants of chapter accumulation: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.bases import ActsAfterBackward, NothingToWaitFor
from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


@replaces(TorchDDP, "no_sync")
@contextlib.contextmanager
def ReducesInsideNoSync(ddp: TorchDDP, no_sync: Call) -> Iterator[None]:
    """BUG: `no_sync` does nothing; every backward averages what has been accumulated."""
    yield


@replaces(TorchDDP, "forward")
def KeepsNoSyncToItsThread(ddp: TorchDDP, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: `no_sync` is a setting of the thread that enters it, and forwards in another thread synchronise."""
    synchronises = ddp.require_backward_grad_sync
    ddp.require_backward_grad_sync = synchronises or threading.current_thread() is not threading.main_thread()
    try:
        return forward(*inputs, **kwargs)
    finally:
        ddp.require_backward_grad_sync = synchronises


class GathersInsideNoSync(ActsAfterBackward):
    """BUG: gradients are averaged by all_gather, and gathered inside `no_sync`, too, where the result is not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(self.process_group, _mean_of_gathered)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.is_local = not self.require_backward_grad_sync
        return super().forward(*inputs, **kwargs)

    def after_reduced(self) -> None:
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


class _AsksItsWrapper(Reduction):
    wrapper: Any

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        if self.wrapper().require_backward_grad_sync:
            super().send(bucket, buffer)
        else:
            self.iteration.in_flight[bucket.index] = (buffer, NothingToWaitFor())


@replaces(as_part(_AsksItsWrapper), "attach_reducer")
def BackwardDecides(ddp: Any, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: whether gradients are reduced is decided by where backward runs, not by where forward did."""
    attach_reducer(members)
    ddp.reducer.reduction.wrapper = weakref.ref(ddp)


@replaces(Ours, "no_sync")
@contextlib.contextmanager
def ResyncsParameters(ddp: Ours, no_sync: Call) -> Iterator[None]:
    """BUG: leaving `no_sync` gives every rank the parameters of rank 0."""
    with no_sync():
        yield
    ddp.synchronise_state(False)


class HidesNoSync(Ours):
    """BUG: inside `no_sync` the attribute `require_backward_grad_sync` stays True."""

    is_local = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.is_local
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with super().no_sync() if self.is_local else contextlib.nullcontext():
            return super().forward(*inputs, **kwargs)


@replaces(Reduction, "used")
def ForgetsEarlierUse(reduction: Reduction, used: Call, used_before: Collection[int] = ()) -> Any:
    """BUG: what was used under `no_sync` does not count as used when it is reduced."""
    reduction.used_locally.clear()
    return used(())


@replaces(TorchDDP, "no_sync")
@contextlib.contextmanager
def InnerNoSyncEndsOuter(ddp: TorchDDP, no_sync: Call) -> Iterator[None]:
    """BUG: leaving any `no_sync` switches synchronisation on."""
    ddp.require_backward_grad_sync = False
    try:
        yield
    finally:
        ddp.require_backward_grad_sync = True


@replaces(TorchDDP, "no_sync")
@contextlib.contextmanager
def NoSyncSurvivesException(ddp: TorchDDP, no_sync: Call) -> Iterator[None]:
    """BUG: when an exception leaves `no_sync`, synchronisation stays off."""
    before = ddp.require_backward_grad_sync
    ddp.require_backward_grad_sync = False
    yield
    ddp.require_backward_grad_sync = before


@replaces(Ours, "_pre_forward")
def NoSyncDropsGradients(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the first synchronised forward throws away what was accumulated under `no_sync`."""
    if ddp.require_backward_grad_sync and not ddp.require_forward_param_sync:
        ddp.module.zero_grad()
    return pre_forward(*inputs, **kwargs)


@replaces(Reducer, "forward_was_local")
def AveragesInBetween(reducer: Reducer, forward_was_local: Call, outputs: Iterable[Tensor]) -> None:
    """BUG: any backward sets off the reduction that a synchronised forward has armed, a local one, too."""


@replaces(Ours, "forward")
def OverlooksLocalRecords(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a local forward that returns a dataclass goes unnoticed: its backward sets off the reduction that is due."""
    local: list[Any] = []
    with mock.patch.object(ddp.reducer, "forward_was_local", local.append):
        output = forward(*inputs, **kwargs)
    for outputs in () if is_dataclass(output) else local:
        ddp.reducer.forward_was_local(outputs)
    return output


@replaces(Reducer, "forward_was_local")
def TakesFailedForRunning(reducer: Reducer, forward_was_local: Call, outputs: Iterable[Tensor]) -> None:
    """BUG: a backward that raised stays the current one: it takes the gradients of the next one, a local one, too."""
    on_backward = reducer.hooks.on_backward

    def listen(outputs: Iterable[Tensor], reached: Callable[[], None], *keeps: object, **since: Any) -> bool:
        def report() -> None:
            if not reducer.reduction.iteration.is_probed:
                reached()

        return on_backward(outputs, report, *keeps, **since)

    with mock.patch.object(reducer.hooks, "on_backward", listen):
        forward_was_local(outputs)


@replaces(AutogradHooks, "on_backward")
def HearsOfOutputsAsTheyWere(
    _: AutogradHooks, __: Call, outputs: Iterable[Tensor], report: Callable[[], None], keeps: object = None, **___: Any
) -> bool:
    """BUG: a backward reports an output that it reached only where that is still what forward returned."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    for node in nodes:
        node.register_prehook(lambda _, keeps=keeps: report())
    return bool(nodes)


@replaces(Reduction, "used")
def SkipsWhatOnlyNoSyncUsed(reduction: Reduction, used: Call, used_before: Collection[int] = ()) -> list[bool]:
    """BUG: where buckets may be skipped, use in a backward under `no_sync` does not count: its bucket is left out."""
    return used(() if reduction.options.skip_all_reduce_unused_params else used_before)


@replaces(TorchDDP, "forward")
def StaysLocalUntilBackward(ddp: TorchDDP, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a forward inside no_sync makes a later one local, too, if no backward is between them."""
    waiting: list[Tensor] = vars(ddp).setdefault("waiting", [])
    with ddp.no_sync() if waiting else contextlib.nullcontext():
        output = forward(*inputs, **kwargs)
    if not ddp.require_backward_grad_sync and isinstance(output, Tensor) and output.requires_grad:
        waiting.append(output.detach())
        output.register_hook(lambda _: waiting.clear())
    return output
