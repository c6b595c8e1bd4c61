"""DDPs in which one option or feature spoils another, each in one way: `ddp_impl`, changed."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from conformance.mutants.reductions import NothingToWaitFor, Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.bucket_plan import BucketPlan, plan_for_unknown_order
from ddp_impl.reducer import Reducer
from ddp_impl.reducer_state import Event, Phase


class SumsInViews(Reducing):
    """BUG: with `gradient_as_bucket_view` gradients are summed and never divided."""

    class OwnReducer(Reducer):
        """Forgets to divide."""

        def _launch(self, bucket: Bucket) -> None:
            if self.options.gradient_as_bucket_view:
                self.divisor = 1
            super()._launch(bucket)


class LosesBatchedCopies(DistributedDataParallel):
    """BUG: with `batched_grad_copy` the first gradient of the batch is lost."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        kept = members[1:] if self.batched_grad_copy else members
        super()._attach_reducer([dataclasses.replace(member, index=index) for index, member in enumerate(kept)])


class DropsTensorHooks(DistributedDataParallel):
    """BUG: hooks that a user registered on a parameter are gone after the first forward."""

    def _post_forward(self, output: Any, averages: bool = False) -> Any:
        for parameter in self.module.parameters():
            if parameter._backward_hooks:
                parameter._backward_hooks.clear()
        return super()._post_forward(output, averages)


class RefusesGraphs(Reducing):
    """BUG: `backward(create_graph=True)` raises."""

    class OwnReducer(Reducer):
        """Wants plain gradients."""

        def _launch(self, bucket: Bucket) -> None:
            if any(parameter.grad is not None and parameter.grad.requires_grad for parameter in bucket.parameters):
                raise RuntimeError("gradients must not require gradients")
            super()._launch(bucket)


class OneBackwardPerForward(Reducing):
    """BUG: a second backward through the same outputs leaves local gradients, and says nothing."""

    class OwnReducer(Reducer):
        """Begins with a forward only."""

        def _begin_backward(self, reachable: set[int] | None) -> None:
            if self.state.phase is not Phase.IDLE:
                super()._begin_backward(reachable)


class AnyBackwardCounts(Reducing):
    """BUG: `torch.autograd.grad` between forward and backward uses up the reduction."""

    class OwnReducer(OneBackwardPerForward.OwnReducer):
        """Ends with every backward."""

        def _backward_ended(self) -> None:
            if self.state.phase is Phase.RUNNING:
                self.state.handle(Event.RESET)
                self.arrivals.disarm()
            super()._backward_ended()


class GivesFrozenGradients(DistributedDataParallel):
    """BUG: frozen parameters get gradients of zeros."""

    def _post_forward(self, output: Any, averages: bool = False) -> Any:
        for parameter in self.module.parameters():
            if not parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super()._post_forward(output, averages)


class LastForwardCounts(Reducing):
    """BUG: of several forwards before one backward only the last one's parameters count as used."""

    class OwnReducer(Reducer):
        """Remembers one forward."""

        def prepare_for_backward(self, outputs: Any) -> None:
            """Forget the forwards before."""
            self.reach.is_walked = True
            tensors = [tensor for tensor in outputs if tensor.requires_grad]
            super().prepare_for_backward(tensors)
            if self.options.find_unused_parameters:
                self.reach.reached = self.reach.walk.reachable(tensors)

        def _is_welcome_late(self, index: int) -> bool:
            return False


class RefusesSinkClone(DistributedDataParallel):
    """BUG: `_set_ddp_sink_clone` raises."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        raise NotImplementedError("there is no sink")


class MixesDtypes(DistributedDataParallel):
    """BUG: gradients of different dtypes share a bucket, in the dtype of the first."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        with mock.patch("ddp_impl.distributed.Reducer", _OneKind):
            super()._attach_reducer(members)


class _OneKind(Reducer):
    def _adopt(self, plan: BucketPlan) -> None:
        self.specs = [dataclasses.replace(spec, kind=()) for spec in self.specs]
        super()._adopt(plan if plan.capped else plan_for_unknown_order(self.specs))


class AlternatesBuckets(Reducing):
    """BUG: buckets are planned anew in every iteration, by the order of gradients and then by its reverse."""

    class OwnReducer(Reducer):
        """Turns round."""

        def rebuild_buckets(self) -> None:
            """Plan again, the other way round."""
            self.has_rebuilt_buckets = False
            self.order.reverse()
            super().rebuild_buckets()


class EachAlone(DistributedDataParallel):
    """BUG: whatever the caps, every gradient is a bucket of its own."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        caps = dataclasses.replace(self._options.caps, first_bytes=0, cap_bytes=0, per_bucket_bytes=())
        self._options = dataclasses.replace(self._options, caps=caps)
        super()._attach_reducer(members)


class BackwardDecides(Reducing):
    """BUG: whether gradients are reduced is decided by where backward runs, not by where forward did."""

    class OwnReducer(Reducer):
        """Asks its wrapper late."""

        wrapper: Any = None

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            if self.wrapper().require_backward_grad_sync:
                super()._start(bucket, buffer)
            else:
                self._in_flight[bucket.index] = (buffer, NothingToWaitFor())

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


class RefusesUnusedSparse(Reducing):
    """BUG: a sparse gradient that does not come is an error."""

    class OwnReducer(Reducer):
        """Wants sparse gradients."""

        def _launch(self, bucket: Bucket) -> None:
            if bucket.sparse and bucket.parameters[0].grad is None:
                raise RuntimeError("a sparse gradient is missing")
            super()._launch(bucket)


class LeavesOneOut(Reducing):
    """BUG: off by one, with `find_unused_parameters` the last parameter counts as unused."""

    class OwnReducer(Reducer):
        """Miscounts."""

        def _used_by_now(self, bucket: Bucket, buffer: Tensor) -> list[bool] | None:
            used = super()._used_by_now(bucket, buffer)
            return None if used is None or not self.options.find_unused_parameters else [*used[:-1], False]


class HooksStopOptimizers(Reducing):
    """BUG: with a comm hook, optimizers in backward do not step."""

    class OwnReducer(Reducer):
        """Leaves steps out."""

        def _finalize(self) -> None:
            if self.comm_hook is not None:
                self.steps_optimizers = False
            super()._finalize()


class RefusesToDelayAll(DistributedDataParallel):
    """BUG: not all parameters may be delayed."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        if all(member.name in self._options.delayed for member in members):
            raise ValueError("some parameter must not be delayed")
        super()._attach_reducer(members)


class ResetForgetsHook(Reducing):
    """BUG: after `_update_process_group` the comm hook is not called any more."""

    class OwnReducer(Reducer):
        """Clears too much."""

        def reset(self, group: Any) -> None:
            """Take the new group and forget the hook."""
            super().reset(group)
            self.comm_hook = None


class RefusesOutsiders(DistributedDataParallel):
    """BUG: a rank that is not in the new group cannot be told so."""

    def _update_process_group(self, new_process_group: Any) -> None:
        if not isinstance(new_process_group, torch.distributed.ProcessGroup):
            raise TypeError("a process group is needed")
        super()._update_process_group(new_process_group)


class TakesAnyGroup(DistributedDataParallel):
    """BUG: `_update_process_group` accepts what is no process group, and does nothing then."""

    def _update_process_group(self, new_process_group: Any) -> None:
        with contextlib.suppress(TypeError):
            super()._update_process_group(new_process_group)


class AlarmsUnderNoSync(DistributedDataParallel):
    """BUG: `_check_reducer_finalized` raises after a backward under `no_sync`."""

    def _check_reducer_finalized(self) -> None:
        super()._check_reducer_finalized()
        if not self.require_forward_param_sync:
            raise RuntimeError("the last backward was not reduced")


class StumblesOverDebugLevels(Reducing):
    """BUG: at a debug level, gradients are divided twice."""

    class OwnReducer(Reducer):
        """Debugs wrongly."""

        def _finalize(self) -> None:
            super()._finalize()
            if get_debug_level() != DebugLevel.OFF:
                for member in self.members:
                    if member.parameter.grad is not None:
                        member.parameter.grad.div_(2)


class CopyTakesOver(DistributedDataParallel):
    """BUG: the original of a copy averages nothing any more."""

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        self.reducer.remove_hooks()
        return state


class SaysNothing(DistributedDataParallel):
    """BUG: a public method has no docstring."""

    def undocumented(self) -> None:  # noqa: D102
        pass
