"""What a wrapper copies from one rank to all instead of averaging it: buffers before forward, everything once."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_impl.api.torch_names import TorchSurface
from ddp_impl.base.nested_tensors import described, memory
from ddp_impl.buckets.comm_hooks import BufferHook, BufferHookLocation
from ddp_impl.module.replicas import agree_on_run, verify_buffers
from ddp_impl.torch_internals.distributed import timeout_of
from ddp_impl.wire import collectives
from ddp_impl.wire.collectives import rank_in
from ddp_impl.wire.peers import UNCHANGED

#: How a tensor of plain memory is laid out in it, as far as ranks must have it alike.
SHAPE_AND_DTYPE: Final = attrgetter("shape", "dtype")


def synchronised_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """Return by name the buffers to be copied, found in each forward (pytorch/pytorch#63916); meta ones are empty."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored and not buffer.is_meta}


@dataclass(frozen=True, slots=True)
class BufferLayouts:
    """The buffers that were compared last: their memory, None if none were, and their description by name."""

    parts: tuple[tuple[torch.Size, torch.dtype], ...] | None = None
    words: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(buffers: Mapping[str, Tensor]) -> BufferLayouts:
        """Return the layouts of these; raises `RuntimeError` for one that cannot be copied."""
        parts = tuple(map(SHAPE_AND_DTYPE, memory("buffer", buffers)))
        return BufferLayouts(parts, described("buffer", buffers))

    def changed_to(self, other: BufferLayouts) -> str:
        """Return the first buffer that is another than before, and how."""
        if self.parts is None:
            return "none were compared before"
        before, now = self.words, other.words
        names = (name for name in {**before, **now} if before.get(name) != now.get(name))
        return next((f"'{name}' was {before.get(name)} and is {now.get(name)}" for name in names), "their order is new")


def broadcast_state(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, group_src: int = 0
) -> None:
    """Overwrite `tensors`, on any device, with those of rank `group_src`, through `device`. All ranks must call it."""
    if {found.type for found in set(map(attrgetter("device"), tensors))} <= {device.type}:  # in C, as mostly
        collectives.broadcast_coalesced(tensors, group, group_src)
        return
    here = [tensor for tensor in tensors if tensor.device.type == device.type]
    collectives.broadcast_coalesced(here, group, group_src)
    elsewhere = [tensor for tensor in tensors if tensor.device.type != device.type]
    if elsewhere:
        moved = [tensor.detach().to(device) for tensor in elsewhere]
        collectives.broadcast_coalesced(moved, group, group_src)
        for tensor, copy in zip(elsewhere, moved, strict=True):
            tensor.data.copy_(copy)


def agree_on_rank(group: dist.ProcessGroup, device: torch.device, candidate: bool) -> int:
    """Return the highest rank of the group that calls itself a candidate; all ranks must call it."""
    rank = torch.full((1,), rank_in(group) if candidate else -1, device=device)
    collectives.all_reduce_now(rank, group, dist.ReduceOp.MAX)
    chosen = int(rank.item())
    if chosen < 0:
        raise RuntimeError("no rank of the group offered its model, although one has joined last")
    return chosen


class CopiedState(TorchSurface):
    """The part of the wrapper that copies parameters and buffers. `_has_buffers`: as far as known."""

    _buffer_hook: BufferHook | None
    _has_buffers: bool
    _join_config: Any
    _buffer_layouts = BufferLayouts()

    @property
    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore}

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return list(self._named_parameters.values())

    def copied_tensors(self, with_buffers: bool) -> dict[str, dict[str, Tensor]]:
        """Return what `synchronise_state` copies, by kind and name."""
        return {"parameters": {**self._named_parameters}, "buffers": self.named_module_buffers if with_buffers else {}}

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward will copy rank 0's buffers to all ranks."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    @property
    def broadcast_buffers(self) -> bool:
        """Deprecated name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are copied before forward, by name."""
        return synchronised_buffers(self.module, self.parameters_to_ignore)

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are copied before forward."""
        return list(self.named_module_buffers.values())

    def _check_sync_bufs_pre_fwd(self) -> bool:
        before = self._buffer_hook is None or self._buffer_hook.location is BufferHookLocation.PRE_FORWARD
        return before and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        after = self._buffer_hook is not None and self._buffer_hook.location is BufferHookLocation.POST_FORWARD
        return after and self.will_sync_module_buffers()

    def _sync_buffers(self, authoritative: bool = True) -> None:
        """Copy buffers to all ranks: rank 0's, or inside a join context those of the last rank that still has data."""
        buffers = self.named_module_buffers
        self._has_buffers = bool(buffers)
        if self._buffer_hook is not None and buffers:
            self.reducer.check_finished()
            with self.reducer.peers.awaiting("forward", "the buffer comm hook", with_reports=False):
                self.reducer.reduction.post_backward_futures.extend(self._buffer_hook.run(buffers))
            return
        tensors = memory("buffer", buffers)
        if tuple(map(SHAPE_AND_DTYPE, tensors)) != self._buffer_layouts.parts:
            self._compare(BufferLayouts.of(buffers))
        self.reducer.peers.num_copies += 1
        source = 0
        if self._join_config.enable:
            with self.reducer.between_backwards("which rank's buffers are copied"):
                source = agree_on_rank(self.process_group, self.device, authoritative)
        with self.reducer.between_backwards(f"the buffers of rank {source}"):
            broadcast_state(tensors, self.process_group, self.device, source)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: Any = BufferHookLocation.POST_FORWARD
    ) -> None:
        """Let `hook(state, {name: buffer})` synchronise buffers in place of the broadcast, on every rank."""
        if not callable(hook):
            raise TypeError(f"a buffer comm hook must be callable; got {type(hook).__name__}")
        self._buffer_hook = BufferHook(hook, state, BufferHookLocation[comm_hook_location.name])

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Copy buffers from one rank to all, as the default synchronisation does; for buffer hooks, on every rank."""
        buffers = self.named_module_buffers if bufs is None else {str(place): each for place, each in enumerate(bufs)}
        with self.reducer.between_backwards(f"the buffers of rank {authoritative_rank}"):
            broadcast_state(memory("buffer", buffers), self.process_group, self.device, authoritative_rank)

    def synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        """Copy parameters, and buffers if asked to, from a rank of the group to all; every rank must call it."""
        copied = self.copied_tensors(with_buffers)
        tensors = [part for kind, named in copied.items() for part in memory(kind[:-1], named)]
        broadcast_state(tensors, self.process_group, self.device, group_src)

    def _compare(self, layouts: BufferLayouts) -> None:
        """Compare the layouts of buffers, which have changed, with those that other ranks leave in the store.

        Raises `ReplicaMismatchError` naming one that differs, also from that of a rank that has changed nothing, and
        the store's error after the group's timeout.
        """
        before, company = self._buffer_layouts, self.reducer.peers.company
        with self.reducer.between_backwards(f"the other ranks' buffers, because here {before.changed_to(layouts)}"):
            if not company.run and before.parts is None:  # without `init_sync`: all ranks are here, for the first time
                company.run = agree_on_run(self.process_group, self.device)
            timeout = timeout_of(self.process_group, self.device)
            told = self.reducer.peers.compare_buffers(json.dumps(layouts.words), timeout)
            words = [before.words if each == UNCHANGED else json.loads(each) for each in told or ()]
            verify_buffers(words, rank_in(self.process_group))
        self._buffer_layouts = layouts
