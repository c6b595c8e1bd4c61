"""Uneven inputs: what a rank that has run out of data does so that the others can go on.

Built on torch's `Join`, `Joinable` and `JoinHook`, so that a DDP of ours shares a context with other joinables such as
`ZeroRedundancyOptimizer`. A joined rank shadows, in the same order, every collective that a forward and backward of the
other ranks issues. Each forward inside a join context begins with one agreement: how many ranks that still have data
will synchronise. That number is also the effective world size, so nothing depends on which joinable came first.
Sources: pytorch/pytorch#61555, torch's "Generic Join Context Manager" page.
"""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook

from ddp_impl import collectives
from ddp_impl.groups import rank_in, size_of
from ddp_impl.reducer import Reducer


class Shadowed(Protocol):
    """What shadowing needs of a wrapped module."""

    process_group: dist.ProcessGroup
    device: torch.device
    reducer: Reducer
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _divide_by_initial_world_size: bool
    _authoritative_rank: int
    _join_config: Any

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Whether gradients live in buckets."""

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward begins with a copy of buffers."""

    def _sync_buffers(self, authoritative: bool = True) -> None: ...

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None: ...


def agree_on_sync(group: dist.ProcessGroup, device: torch.device, will_sync: bool) -> Tensor:
    """Return how many ranks will synchronise in this iteration; every rank of the group calls it once per iteration.

    The number stays on the device: whoever reads it makes the host wait.
    """
    count = torch.full((1,), float(will_sync), device=device)
    collectives.all_reduce_now(count, group)
    return count


def agree_on_rank(group: dist.ProcessGroup, device: torch.device, candidate: bool) -> int:
    """Return the highest rank of the group that calls itself a candidate; all ranks must call it."""
    rank = torch.full((1,), rank_in(group) if candidate else -1, device=device)
    collectives.all_reduce_now(rank, group, dist.ReduceOp.MAX)
    chosen = int(rank.item())
    if chosen < 0:
        raise RuntimeError("no rank of the group offered its model, although one has joined last")
    return chosen


class UnevenInputs(Join):
    """torch's context, of which nothing is left when training has come out of it, be it by an exception.

    torch's leaves a filter of warnings behind, and modules that go on to ask at each forward who still has data.
    """

    def __init__(self, ddp: Any, enable: bool, throw_on_early_termination: bool, **kwargs: Any) -> None:
        """Make a context of one wrapped module."""
        super().__init__([ddp], enable, throw_on_early_termination, **kwargs)
        self._ddp: Shadowed = ddp

    def _get_num_nonjoined_procs(self) -> int:
        """Return how many ranks still have data; torch's own does not hear of every failure."""
        ddp = self._ddp
        with ddp.reducer.peers.awaiting("join", "how many ranks still have data"):
            return int(agree_on_sync(ddp.process_group, ddp.device, will_sync=False))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shadow the other ranks until all have joined.

        Raises `ReductionError` if the last backward is not complete: the others would meet other collectives of it.
        """
        try:
            if kind is None:
                self._ddp.reducer.check_finished()
            with warnings.catch_warnings():
                super().__exit__(kind, error, traceback)
        finally:  # of early termination ranks hear in different places: this one here, others in a forward
            leave(self._ddp)


def leave(ddp: Shadowed) -> None:
    """Tell `ddp` that it is in no context any more."""
    ddp._join_config = ddp._join_config.construct_disabled_join_config()


class DDPJoinHook(JoinHook):
    """Shadows one wrapped module."""

    def __init__(self, ddp: Shadowed, divide_by_initial_world_size: bool) -> None:
        """Tell `ddp` how to divide sums while it is in the context."""
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp.reducer.telemetry.joined_uneven_inputs = True
        self._own_gradients: list[Tensor | None] | None = None

    def main_hook(self) -> None:
        """Issue what the other ranks' next forward and backward issue."""
        ddp = self.ddp
        with ddp.reducer.between_backwards("how many ranks still have data"):
            num_syncing = int(agree_on_sync(ddp.process_group, ddp.device, will_sync=False))
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
            ddp.reducer.usage.follows_local = True

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that joined last to all ranks; this rank's own gradients are as it left them."""
        ddp = self.ddp
        if self._own_gradients is not None:
            for member, gradient in zip(ddp.reducer.members, self._own_gradients, strict=True):
                member.parameter.grad = gradient
        with ddp.reducer.between_backwards("the model of a rank that joined last"):
            source = agree_on_rank(ddp.process_group, ddp.device, is_last_joiner)
            ddp._authoritative_rank = source
            ddp._synchronise_state(with_buffers=ddp.forward_sync_buffers, group_src=source)
        ddp.reducer.divisor = size_of(ddp.process_group)
        leave(ddp)


def _put_gradients_aside(ddp: Shadowed) -> list[Tensor | None]:
    """Take the gradients off the parameters and return them, copied where they live in buckets."""
    aside: list[Tensor | None] = []
    for member in ddp.reducer.members:
        gradient = member.parameter.grad
        aside.append(gradient.clone() if gradient is not None and ddp.gradient_as_bucket_view else gradient)
        member.parameter.grad = None
    return aside
