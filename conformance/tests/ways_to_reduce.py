"""DDPs that are right and average gradients by other means than one all-reduce per bucket: no check may fail them.

Each is torch's DDP with a comm hook; what its hook returns is the mean, bit for bit where sums are exact.
"""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.

import queue
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.subjects.subject import CAPABILITIES, Subject

#: A hook of its own is in the way of some; the others are about what torch's DDP does in other ways than by its hook.
_LACKING = {
    "auto_buckets", "cast_forward_inputs", "comm_hook", "delay_all_reduce", "full_precision_modules", "join",
    "logging_data", "mixed_precision", "pickling", "replicated_parameters", "update_process_group",
}  # fmt: skip


class Averaging(TorchDDP):
    """Averages a bucket by `average`, and does not return before it is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        average, groups = type(self).average, self.make_groups(self.process_group)

        def hook(state: None, bucket: GradBucket) -> Future[Tensor]:
            done: Future[Tensor] = Future()
            done.set_result(average(groups, bucket.buffer()))
            return done

        self.register_comm_hook(None, hook)

    def make_groups(self, group: dist.ProcessGroup) -> Any:
        """Return what `average` communicates in: `group`."""
        return group

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """Return the mean of `flat` over the ranks."""
        raise NotImplementedError


def _padded(flat: Tensor, multiple: int) -> Tensor:
    return nn.functional.pad(flat, (0, -flat.numel() % multiple))


class Gathers(Averaging):
    """Every rank gets the gradients of all, and averages for itself."""

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """By all_gather."""
        parts = [torch.empty_like(flat) for _ in range(groups.size())]
        dist.all_gather(parts, flat, group=groups)
        return torch.stack(parts).sum(0) / groups.size()


class Sends(Averaging):
    """Every rank sends its gradients to every other."""

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """By isend and irecv."""
        parts = {peer: torch.empty_like(flat) for peer in range(groups.size()) if peer != groups.rank()}
        works = [dist.isend(flat, group=groups, group_dst=peer) for peer in parts]
        works += [dist.irecv(part, group=groups, group_src=peer) for peer, part in parts.items()]
        for work in works:
            if work is not None:
                work.wait()
        return torch.stack([flat, *parts.values()]).sum(0) / groups.size()


class Shards(Averaging):
    """Every rank sums a shard of each bucket, which is padded to a multiple of the number of ranks."""

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """By reduce_scatter and all_gather."""
        padded = _padded(flat, groups.size())
        shard = padded.new_empty(padded.numel() // groups.size())
        dist.reduce_scatter_tensor(shard, padded, group=groups)
        dist.all_gather_into_tensor(padded, shard / groups.size(), group=groups)
        return padded[: flat.numel()]


class ShardsByAllToAll(Averaging):
    """The same, and every rank adds up the pieces of its shard itself."""

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """By all_to_all and all_gather."""
        padded = _padded(flat, groups.size())
        pieces = torch.empty_like(padded)
        dist.all_to_all_single(pieces, padded, group=groups)
        shard = pieces.view(groups.size(), -1).sum(0) / groups.size()
        dist.all_gather_into_tensor(padded, shard.to(flat.dtype), group=groups)
        return padded[: flat.numel()]


class Serves(Averaging):
    """Rank 0 sums, and tells the others."""

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """By reduce and broadcast."""
        dist.reduce(flat, group_dst=0, group=groups)
        mean = flat / groups.size()
        dist.broadcast(mean, group_src=0, group=groups)
        return mean


class Widens(Averaging):
    """Sums in double precision."""

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """By all_reduce of float64."""
        wide = flat.double()
        dist.all_reduce(wide, group=groups)
        return (wide / groups.size()).to(flat.dtype)


class Pads(Averaging):
    """Sums buckets whose sizes are multiples of 64."""

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """By all_reduce of a bucket with zeros at its end."""
        padded = _padded(flat, 64)
        dist.all_reduce(padded, group=groups)
        return padded[: flat.numel()] / groups.size()


class InPairs(Averaging):
    """Sums among two neighbours, then among the first of the pairs, who tell their neighbours."""

    def make_groups(self, group: dist.ProcessGroup) -> Any:
        """Return the number of ranks, this rank's pair, and the group of the first ones if this rank is one."""
        everyone = dist.get_process_group_ranks(group)
        pairs = [dist.new_group(everyone[first : first + 2]) for first in range(0, len(everyone), 2)]
        firsts = dist.new_group(everyone[::2])
        mine = [pairs[group.rank() // 2], *([firsts] if group.rank() % 2 == 0 else [])]
        for one in mine:
            weakref.finalize(self, dist.destroy_process_group, one)
        return group.size(), *mine

    @staticmethod
    def average(groups: Any, flat: Tensor) -> Tensor:
        """By reduce, all_reduce and broadcast."""
        size, pair, *firsts = groups
        dist.reduce(flat, group_dst=0, group=pair)
        for group in firsts:
            dist.all_reduce(flat, group=group)
        dist.broadcast(flat, group_src=0, group=pair)
        return flat / size


class InThread(TorchDDP):
    """A thread of its own issues the all-reduces; it ends with the wrapper."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def hook(state: None, bucket: GradBucket) -> Future[Tensor]:
            mean: Future[Tensor] = Future()
            waiting.put((mean, bucket.buffer()))
            return mean

        thread = threading.Thread(target=_average_all, args=(waiting, self.process_group), daemon=True)
        thread.start()

        def stop() -> None:
            waiting.put(None)
            thread.join()

        weakref.finalize(self, stop)
        self.register_comm_hook(None, hook)


def _average_all(waiting: "queue.SimpleQueue[Any]", group: dist.ProcessGroup) -> None:
    while (job := waiting.get()) is not None:
        mean, flat = job
        dist.all_reduce(flat, group=group)
        mean.set_result(flat / group.size())
        del job, mean, flat


class AlwaysAgrees(TorchDDP):
    """Always looks for unused parameters, and has no such option."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any) -> None:
        options.pop("find_unused_parameters", None)
        super().__init__(module, process_group=process_group, find_unused_parameters=True, **options)


WAYS = {
    way.__name__: Subject(way.__name__, f"{__name__}:{way.__name__}", CAPABILITIES - _LACKING)
    for way in (
        Gathers, Sends, Shards, ShardsByAllToAll, Serves, Widens, Pads, InPairs, InThread, AlwaysAgrees
    )
}  # fmt: skip
