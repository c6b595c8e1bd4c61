"""Uneven inputs: what a rank that has run out of data does so that the others can go on.

Built on torch's `Join`, so that a DDP of ours shares a context with other joinables. A joined rank shadows, in the same
order, every collective that the others issue. Each forward inside a context begins with one agreement, how many ranks
that still have data will synchronise; that is also the effective world size (pytorch/pytorch#61555).
"""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp_impl.api.copied_state import CopiedState, agree_on_rank
from ddp_impl.wire import collectives
from ddp_impl.wire.collectives import size_of


def agree_on_sync(group: dist.ProcessGroup, device: torch.device, will_sync: bool) -> tuple[Tensor, dist.Work]:
    """Begin to count, on the device, the ranks that will synchronise; every rank calls it once per iteration."""
    count = torch.full((1,), float(will_sync), device=device)
    return count, collectives.all_reduce_sum(count, group)


def num_syncing_with_others(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many ranks will synchronise, of a rank that has joined and will not."""
    count, work = agree_on_sync(group, device, will_sync=False)
    collectives.finished(work, "all_reduce", [count])
    return int(count)


class UnevenInputs(Join):
    """torch's context, which leaves behind no filter of warnings, and no module that asks who still has data."""

    def __init__(self, ddp: Any, enable: bool, throw_on_early_termination: bool, **kwargs: Any) -> None:
        super().__init__([ddp], enable, throw_on_early_termination, **kwargs)
        self._ddp: JoinedWrapper = ddp

    def _get_num_nonjoined_procs(self) -> int:
        """Return how many ranks still have data; torch's own does not hear of every failure."""
        ddp = self._ddp
        with ddp.reducer.peers.awaiting("join", "how many ranks still have data"):
            return num_syncing_with_others(ddp.process_group, ddp.device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shadow the other ranks until all have joined. Raises `ReductionError` if the last backward is incomplete."""
        try:
            if kind is None:
                self._ddp.reducer.check_finished()
                self._ddp.reducer.reduction.await_join_agreements()
            with warnings.catch_warnings():
                super().__exit__(kind, error, traceback)
        finally:  # of early termination ranks hear in different places: this one here, others in a forward
            leave(self._ddp)


def leave(ddp: JoinedWrapper) -> None:
    """Tell `ddp` that it is in no context any more."""
    ddp._join_config = ddp._join_config.construct_disabled_join_config()


class DDPJoinHook(JoinHook):
    """Shadows one wrapped module."""

    def __init__(self, ddp: JoinedWrapper, divide_by_initial_world_size: bool) -> None:
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp.reducer.telemetry.joined_uneven_inputs = True
        self._own_gradients: list[Tensor | None] | None = None

    def main_hook(self) -> None:
        """Issue what the other ranks' next forward and backward issue."""
        ddp = self.ddp
        with ddp.reducer.between_backwards("how many ranks still have data"):
            num_syncing = num_syncing_with_others(ddp.process_group, ddp.device)
        if num_syncing:
            ddp.reducer.rebuild_buckets()
        if ddp.will_sync_module_buffers():
            ddp._sync_buffers(authoritative=False)
        ddp.require_forward_param_sync = num_syncing > 0
        if num_syncing:
            if self._own_gradients is None:
                self._own_gradients = _put_gradients_aside(ddp)
            ddp.reducer.shadow_iteration()
        else:
            ddp.reducer.reduction.follows_local = True

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that joined last to all ranks; this rank's own gradients are as it left them."""
        ddp = self.ddp
        ddp.reducer.reduction.await_join_agreements()
        if self._own_gradients is not None:
            for member, gradient in zip(ddp.reducer.members, self._own_gradients, strict=True):
                member.parameter.grad = gradient
        with ddp.reducer.between_backwards("the model of a rank that joined last"):
            source = agree_on_rank(ddp.process_group, ddp.device, is_last_joiner)
            ddp._authoritative_rank = source
            ddp.synchronise_state(with_buffers=ddp.forward_sync_buffers, group_src=source)
        ddp.reducer.reduction.divisor = size_of(ddp.process_group)
        leave(ddp)


def _put_gradients_aside(ddp: JoinedWrapper) -> list[Tensor | None]:
    """Take the gradients off the parameters and return them, copied where they live in buckets."""
    aside: list[Tensor | None] = []
    for member in ddp.reducer.members:
        gradient = member.parameter.grad
        aside.append(gradient.clone() if gradient is not None and ddp.gradient_as_bucket_view else gradient)
        member.parameter.grad = None
    return aside


class JoinedWrapper(CopiedState, Joinable):
    """The part of the wrapper that a join context calls."""

    _divide_by_initial_world_size = True
    _authoritative_rank = 0

    @property
    def _synchronises(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may run out of data at different times; every rank must enter.

        Sums are divided by the initial world size, or by how many ranks still have data; at the end all have the model
        of one that left last. `throw_on_early_termination`: all raise `RuntimeError` when the first has run out.
        """
        return UnevenInputs(
            self,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Return the hook with which a join context shadows this module; called by the context."""
        return DDPJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device of the join context's own collectives."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which ranks join."""
        return self.process_group

    def divisor_in_join(self, num_syncing: Tensor) -> int:
        """Return what sums are divided by within a join context where `num_syncing` ranks still have data."""
        return size_of(self.process_group) if self._divide_by_initial_world_size else max(1, int(num_syncing))

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> None:
        """Inside a join context, agree with all ranks that have not joined on who synchronises this forward."""
        if is_joined_rank:
            return
        reduction = self.reducer.reduction
        with self.reducer.between_backwards("how many ranks still have data"):
            num_syncing, work = agree_on_sync(self.process_group, self.device, self._synchronises)

        def take() -> None:
            collectives.finished(work, "all_reduce", [num_syncing])
            reduction.divisor = self.divisor_in_join(num_syncing)

        # Nobody needs it before the first bucket leaves, and a forward without a backward sends none.
        reduction.join_agreements.append(take)
        if not (self._synchronises and torch.is_grad_enabled()):
            reduction.await_join_agreements()
        # Joined ranks do not know whether it was under `no_grad`. The number is read, which waits for a device, only
        # where it can be none.
        if not self._synchronises and not num_syncing:
            reduction.follows_local = True
