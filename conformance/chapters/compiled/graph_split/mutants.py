"""Mutants of chapter graph_split: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.bases import LeavesTheInside
from conformance.own_mistake import present
from ddp_impl import DistributedDataParallel
from ddp_impl.autograd_hooks import AutogradHooks
from ddp_impl.bucket import ManagedParameter
from ddp_impl.compile.who_averages import InGraph, Reduction
from ddp_impl.options import BucketCaps


class NeverCuts(TorchDDP):
    """BUG: the compiler is not told where buckets end, so that no reduction begins before the backward is over."""

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        yield


class CompilesWhole(DistributedDataParallel):
    """BUG: graphs are never cut, so that no reduction begins before the backward is over."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        if self._compiled_calls.reduction is Reduction.SPLIT:
            self._compiled_calls.reduction = Reduction.WHOLE


class CutsOnlyAroundItself(LeavesTheInside):
    """BUG: graphs are cut if the wrapper is compiled, and stay whole if what is compiled lies inside of it."""


class CutsInEveryForward(DistributedDataParallel):
    """BUG: every forward has backends of its own, so that everything is compiled in every step."""

    def _averages_in_graph(self) -> InGraph | None:
        self._compiled_calls._backends.clear()
        self._compiled_calls._callbacks.clear()
        return super()._averages_in_graph()


class ReducesOtherBuckets(DistributedDataParallel):
    """BUG: graphs are cut where `bucket_cap_mb` says, but the reducer's buckets span the parts from step 2 on."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.caps = BucketCaps(1 << 40, 1 << 40)


class CompilesItsHooks(DistributedDataParallel):
    """BUG: Dynamo may capture the hooks of parameters, each of which it compiles anew."""

    class OwnHooks(AutogradHooks):
        """Has hooks of the same code, in a code object that nobody has marked as none to capture."""

        unmarked: CodeType | None = None

        def _counting(self, index: int) -> Callable[[Tensor], None]:
            marked: Any = super()._counting(index)
            self.unmarked = self.unmarked or marked.__code__.replace(co_name="unmarked")
            return FunctionType(self.unmarked, marked.__globals__, closure=marked.__closure__)

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        reducer = self.reducer
        reducer._hooks.remove()
        reducer._hooks = self.OwnHooks(
            members, reducer.arrivals, reducer._early_moves, reducer._bucket_full, reducer._take_reported_gradient
        )


class ForgetsTheMeshWhenCompiled(DistributedDataParallel):
    """BUG: once compiled, it averages over all ranks, whatever dimension of a mesh the module was wrapped for."""

    def _forward_compiled(self, callback: Any, inputs: Any, kwargs: Any) -> Any:
        self._update_process_group(present(dist.group.WORLD))
        return super()._forward_compiled(callback, inputs, kwargs)
