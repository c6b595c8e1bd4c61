"""Mutants of chapter static_graph: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import weakref
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_leaves

from conformance.mutants.bases import summed
from conformance.mutants.patches import Call, replaces
from ddp_impl.buckets.arrivals import Arrivals
from ddp_impl.reducer.expectations import StaticGraph
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


class IgnoresStaticGraph(TorchDDP):
    """BUG: the promise of a static graph is accepted and forgotten."""

    def __init__(self, *args: Any, static_graph: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _set_static_graph(self) -> None:
        pass


class ForgetsFirstIteration(TorchDDP):
    """BUG: the iteration that learns the graph leaves local gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_iterations = 0
        self.register_comm_hook(None, self._mean_but_for_first)

    def _mean_but_for_first(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if self.num_iterations == 0:
            future: Future[Tensor] = Future()
            future.set_result(buffer)
        else:
            buffer.div_(dist.get_world_size(self.process_group))
            future = summed(self.process_group, bucket)
        self.num_iterations += bucket.is_last()
        return future


@replaces(TorchDDP, "forward")
def ValidationSwitchesOff(ddp: TorchDDP, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: after a forward under `no_grad`, the backward that follows is not synchronised."""
    if not torch.is_grad_enabled():
        ddp.require_backward_grad_sync = False
        return forward(*inputs, **kwargs)
    output = forward(*inputs, **kwargs)
    ddp.require_backward_grad_sync = True
    return output


class LastWrapperWins(TorchDDP):
    """BUG: only the wrapper that was made last averages its gradients."""

    newest: ClassVar[Any] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        LastWrapperWins.newest = weakref.ref(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.require_backward_grad_sync = LastWrapperWins.newest() is self
        return super().forward(*inputs, **kwargs)


class LocalAfterException(TorchDDP):
    """BUG: after an exception in backward, gradients are not synchronised any more, and nothing is said."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_backward_under_way = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.is_backward_under_way:
            self.require_backward_grad_sync = False
        output = super().forward(*inputs, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._noted)
        return output

    def _noted(self, _: Tensor) -> None:
        self.is_backward_under_way = True
        Variable._execution_engine.queue_callback(self._passed)

    def _passed(self) -> None:
        self.is_backward_under_way = False


@replaces(Reduction, "finalize_buckets")
def PromisesWhatWasLocal(reduction: Reduction, finalize_buckets: Call) -> None:
    """BUG: what backwards under no_sync used once counts as used in every later iteration of a static graph."""
    now, ever = reduction.iteration, vars(reduction).setdefault("ever", set())
    ever.update(reduction.used_locally)
    if now.used_anywhere is not None:
        now.used_anywhere = [each or index in ever for index, each in enumerate(now.used_anywhere)]
    finalize_buckets()


@replaces(StaticGraph, "exchange_usage")
def KeepsLocalToItself(expectation: StaticGraph, exchange_usage: Call) -> None:
    """BUG: gradients from under no_sync stay local where the static graph does not use their parameters."""
    if expectation.reduction.learnt.promise is None:
        exchange_usage()


@replaces(Reducer, "open_iteration")
def SkipsUnlessLocal(reducer: Reducer, open_iteration: Call) -> None:
    """BUG: buckets that no rank uses are not sent, unless this rank's last forwards were under `no_sync`."""
    open_iteration()
    reduction, promise = reducer.reduction, reducer.reduction.learnt.promise
    if promise is not None and not reduction.follows_local:
        unused = [bucket for bucket in reduction.buckets if not any(promise.used[index] for index in bucket.indices)]
        reduction.iteration.skipped = {bucket.index for bucket in unused}


@replaces(StaticGraph, "resolve_unused")
def EndsWithAnyBackward(expectation: StaticGraph, resolve_unused: Call) -> Any:
    """BUG: a backward that has reached no output of forward ends the iteration."""
    expectation.reduction.iteration.is_reached = True
    return resolve_unused()


@replaces(StaticGraph, "resolve_unused")
def ForgetsWhatCameInPart(_: StaticGraph, resolve_unused: Call) -> Any:
    """BUG: a parameter that has brought fewer gradients than were learnt counts as unused: it stays local."""
    with mock.patch.object(Arrivals, "arrived_in_part", return_value=False):
        return resolve_unused()
