"""`Round`: one small all_reduce in which all ranks of a group exchange several lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import torch
import torch.distributed as dist

from ddp_impl.torch_internals.distributed import reduces_on_host
from ddp_impl.wire import collectives
from ddp_impl.wire.collectives import rank_in, size_of


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a `Round`.

    `counts`: sums over the `num_contributing` ranks. `alike[i]`: these ranks gave equal numbers. `of_rank_0`: its list.
    """

    counts: list[int]
    alike: list[bool]
    of_rank_0: list[int]
    num_contributing: int
    num_ranks: int

    @property
    def certain(self) -> list[bool]:
        """For each count whether every contributing rank gave 1."""
        return [count == self.num_contributing for count in self.counts]


class Round:
    """Starts when it is made; every rank makes it between the same two collectives, with lists of equal lengths.

    A rank that does not contribute agrees with every other rank. With `waits` the host reads the answer within the
    backward. It then waits for the other ranks' hosts, and not for its device, which is busy with the forward: the
    exchange runs on the host, or on its own stream where the group cannot reduce on the host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        counts: Sequence[int] = (),
        alike: Sequence[int] = (),
        of_rank_0: Sequence[int] = (),
        contributes: bool = True,
        waits: bool = True,
    ) -> None:
        """Start the exchange; `alike` numbers are small, because the ranks sum their squares as int32."""
        first = list(of_rank_0) if rank_in(group) == 0 else [0] * len(of_rank_0)
        numbers = [*counts, contributes, *first, *alike, *map(mul, alike, alike)]
        if not contributes:
            numbers = [*[0] * (len(counts) + 1), *first, *[0] * (2 * len(alike))]
        flags = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        self._sizes = (len(counts), len(of_rank_0), len(alike))
        self._num_ranks = size_of(group)
        self._arrived: torch.Event | None = None
        on_host = device.type == "cpu" or (waits and reduces_on_host(group))
        self._stream = torch.Stream(device) if waits and not on_host else None
        if self._stream is None:
            self._flags = flags if on_host else flags.pin_memory().to(device, non_blocking=True)
            self._work = collectives.all_reduce_sum(self._flags, group)
        else:
            with self._stream:
                self._flags = flags.pin_memory().to(device, non_blocking=True)
                self._work = collectives.all_reduce_sum(self._flags, group)

    def result(self) -> Answer:
        """Wait for all ranks, on an accelerator for the device too; return their `Answer`."""
        if self._stream is not None:
            with self._stream:
                collectives.finished(self._work, "all_reduce", [self._flags])
                return self._answer()
        if self._arrived is None:
            collectives.finished(self._work, "all_reduce", [self._flags])
        else:
            self._arrived.synchronize()
        return self._answer()

    def defer(self) -> None:
        """Let the device wait for all ranks and copy the answer to the host, which does not wait before `result`."""
        collectives.finished(self._work, "all_reduce", [self._flags])
        flags, self._arrived = self._flags, torch.Event(self._flags.device)
        self._flags = torch.empty_like(flags, device="cpu", pin_memory=True).copy_(flags, non_blocking=True)
        self._arrived.record(torch.accelerator.current_stream(flags.device))

    @property
    def is_here(self) -> bool:
        """Whether the result of a deferred exchange has arrived on the host."""
        return self._arrived is not None and bool(self._arrived.query())

    def _answer(self) -> Answer:
        num_counts, num_first, num_alike = self._sizes
        summed: list[int] = self._flags.tolist()
        counts, num_contributing, rest = summed[:num_counts], summed[num_counts], summed[num_counts + 1 :]
        first, sums, squares = rest[:num_first], rest[num_first : num_first + num_alike], rest[num_first + num_alike :]
        # Equal numbers are those whose squared sum is the sum of squares times the ranks (Cauchy and Schwarz).
        pairs = zip(sums, squares, strict=True)
        alike = [total * total == num_contributing * square for total, square in pairs]
        return Answer(counts, alike, first, num_contributing, self._num_ranks)
