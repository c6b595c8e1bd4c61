"""Module state that is copied instead of averaged: buffers before forward, everything once at construction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_impl.base.inner_tensors import described, memory
from ddp_impl.wire import collectives
from ddp_impl.wire.groups import rank_in

#: How a tensor of plain memory is laid out in it, as far as ranks must have it alike.
SHAPE_AND_DTYPE: Final = attrgetter("shape", "dtype")


def synchronised_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """Return the buffers that DDP copies from one rank to all others, by name.

    The wrapper calls it before each forward, because a module may replace its buffers (pytorch/pytorch#63916). Those on
    the meta device hold no data to copy.
    """
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored and not buffer.is_meta}


@dataclass(frozen=True, slots=True)
class BufferLayouts:
    """The buffers that were compared last: what their memory is made of, and by name in words.

    `num_changes`: how often ranks have compared them since construction, because some have changed.
    """

    parts: tuple[tuple[torch.Size, torch.dtype], ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    num_changes: int = 0

    @staticmethod
    def of(buffers: Mapping[str, Tensor], num_changes: int = 0) -> BufferLayouts:
        """Return the layouts of these; raises `RuntimeError` for one that cannot be copied."""
        parts = tuple(map(SHAPE_AND_DTYPE, memory("buffer", buffers)))
        return BufferLayouts(parts, described("buffer", buffers), num_changes)

    def changed_to(self, other: BufferLayouts) -> str:
        """Return the first buffer that is another than before, and how."""
        before, now = self.words, other.words
        names = (name for name in {**before, **now} if before.get(name) != now.get(name))
        return next((f"'{name}' was {before.get(name)} and is {now.get(name)}" for name in names), "their order is new")


def broadcast_state(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, group_src: int = 0
) -> None:
    """Overwrite `tensors` with those of the group's rank `group_src`, whatever device each is on.

    A tensor on another kind of device than `device` (say a CPU buffer in a module on an accelerator,
    pytorch/pytorch#109103) travels through `device`, since the group's backend may serve only that one.
    All ranks must call it.
    """
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
