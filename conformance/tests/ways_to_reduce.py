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
        average, group = type(self).average, self.make_group(self.process_group)

        def hook(state: None, bucket: GradBucket) -> Future[Tensor]:
            done: Future[Tensor] = Future()
            done.set_result(average(group, bucket.buffer()))
            return done

        self.register_comm_hook(None, hook)

    def make_group(self, group: dist.ProcessGroup) -> Any:
        return group

    @staticmethod
    def average(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
        raise NotImplementedError


def _padded(flat: Tensor, multiple: int) -> Tensor:
    return nn.functional.pad(flat, (0, -flat.numel() % multiple))


class Gathers(Averaging):
    """Every rank gets the gradients of all, and averages for itself."""

    @staticmethod
    def average(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
        parts = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(parts, flat, group=group)
        return torch.stack(parts).sum(0) / group.size()


class Sends(Averaging):
    """Every rank sends its gradients to every other."""

    @staticmethod
    def average(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
        parts = {peer: torch.empty_like(flat) for peer in range(group.size()) if peer != group.rank()}
        works = [dist.isend(flat, group=group, group_dst=peer) for peer in parts]
        works += [dist.irecv(part, group=group, group_src=peer) for peer, part in parts.items()]
        for work in works:
            if work is not None:
                work.wait()
        return torch.stack([flat, *parts.values()]).sum(0) / group.size()


class Shards(Averaging):
    """Every rank sums a shard of each bucket, which is padded to a multiple of the number of ranks."""

    @staticmethod
    def average(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
        padded = _padded(flat, group.size())
        shard = padded.new_empty(padded.numel() // group.size())
        dist.reduce_scatter_tensor(shard, padded, group=group)
        dist.all_gather_into_tensor(padded, shard / group.size(), group=group)
        return padded[: flat.numel()]


class ShardsByAllToAll(Averaging):
    """The same, and every rank adds up the pieces of its shard itself."""

    @staticmethod
    def average(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
        padded = _padded(flat, group.size())
        pieces = torch.empty_like(padded)
        dist.all_to_all_single(pieces, padded, group=group)
        shard = pieces.view(group.size(), -1).sum(0) / group.size()
        dist.all_gather_into_tensor(padded, shard.to(flat.dtype), group=group)
        return padded[: flat.numel()]


class Serves(Averaging):
    """Rank 0 sums, and tells the others."""

    @staticmethod
    def average(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
        dist.reduce(flat, group_dst=0, group=group)
        mean = flat / group.size()
        dist.broadcast(mean, group_src=0, group=group)
        return mean


class Widens(Averaging):
    """Sums in double precision."""

    @staticmethod
    def average(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
        wide = flat.double()
        dist.all_reduce(wide, group=group)
        return (wide / group.size()).to(flat.dtype)


class Pads(Averaging):
    """Sums buckets whose sizes are multiples of 64."""

    @staticmethod
    def average(group: dist.ProcessGroup, flat: Tensor) -> Tensor:
        padded = _padded(flat, 64)
        dist.all_reduce(padded, group=group)
        return padded[: flat.numel()] / group.size()


class InPairs(Averaging):
    """Sums among two neighbours, then among the first of the pairs, who tell their neighbours."""

    def make_group(self, group: dist.ProcessGroup) -> Any:
        everyone = dist.get_process_group_ranks(group)
        pairs = [dist.new_group(everyone[first : first + 2]) for first in range(0, len(everyone), 2)]
        firsts = dist.new_group(everyone[::2])
        mine = [pairs[group.rank() // 2], *([firsts] if group.rank() % 2 == 0 else [])]
        for one in mine:
            weakref.finalize(self, dist.destroy_process_group, one)
        return group.size(), *mine

    @staticmethod
    def average(group: Any, flat: Tensor) -> Tensor:
        size: int
        size, pair, *firsts = group
        dist.reduce(flat, group_dst=0, group=pair)
        for among_firsts in firsts:
            dist.all_reduce(flat, group=among_firsts)
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
