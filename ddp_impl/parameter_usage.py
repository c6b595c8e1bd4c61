"""Which parameters a backward used: on this rank, and on any rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl import collectives


class ParameterUsage:
    """What this rank knows of the use of `num_parameters` parameters in the present and the last iteration.

    `unused`: indices that this rank's synchronised backward did not use; `used_locally`: those that earlier backwards
    without synchronisation used. `anywhere[i]`: whether any rank used parameter i; None until the ranks have exchanged
    it, and until then all count as used. `is_exchanged`: they have in this iteration. `num_refusing`: how many ranks
    said in the last exchange that they cannot average what came; `num_reading`: how many ranks waited to hear that.
    `promised[i]`: of a static graph, whether any rank's synchronised backward uses parameter i; None until they know.
    `follows_local`: forwards under `no_sync` came before this iteration, on every rank the same ones.

    To read what ranks exchanged, the host must wait for the device. On an accelerator only those ranks do so that miss
    a gradient or refuse; the others' device copies the answer to the host, where `refused_before` looks at it later.
    """

    def __init__(self, num_parameters: int) -> None:
        """Begin without any knowledge."""
        self._num_parameters = num_parameters
        self.unused: set[int] = set()
        self.used_locally: set[int] = set()
        self.anywhere: list[bool] | None = None
        self.is_exchanged = False
        self.promised: list[bool] | None = None
        self.follows_local = False
        self.num_refusing = self.num_reading = 0
        self.looks_static = True  # every iteration so far left out the same parameters
        self.last_unused: set[int] | None = None
        self._agreement: tuple[Tensor, dist.Work, bool] | None = None
        self._num_users = [0] * num_parameters
        self._unread: deque[tuple[Tensor, torch.Event]] = deque()

    def begin_agreeing(
        self, group: dist.ProcessGroup, device: torch.device, *, refuses: bool, learns: bool = False
    ) -> None:
        """Start exchanging with all ranks what they used, and whether one `refuses` to go on.

        `learns`: what they use now without earlier backwards is what they promise to use. Every rank calls it between
        the same collectives.
        """
        reads = device.type == "cpu" or refuses or learns or not self.unused <= self.used_locally
        told = [
            self._flags(self.unused, self.used_locally),
            torch.tensor([refuses, reads], dtype=torch.int32, device="cpu"),
        ]
        if learns:
            told.append(self._flags(self.unused))
        flags = _on_device(torch.cat(told), device)
        self._agreement = (flags, collectives.all_reduce_sum(flags, group), reads)

    def end_agreeing(self) -> None:
        """Wait for the exchange, if one is on its way; on an accelerator the host waits only where it must know."""
        self.num_refusing = 0
        if self._agreement is None:
            return
        flags, work, reads = self._agreement
        self._agreement = None
        work.wait()
        if reads:
            self._unread.clear()
            self._take(flags.tolist())
            self.anywhere = [count > 0 for count in self._num_users]
        else:
            self._unread.append(_on_its_way(flags))
            self.anywhere = None  # this rank used all of them
        self.is_exchanged = True

    def refused_before(self) -> bool:
        """Whether a rank refused in an earlier iteration, as far as the device has got; the host does not wait for it.

        Once True it is not asked again: those ranks do not go on.
        """
        while self._unread and self._unread[0][1].query():
            self._take(self._unread.popleft()[0].tolist())
            if self.num_refusing:
                self._unread.clear()
                return True
        return False

    def num_users(self) -> list[int]:
        """Return how many ranks used each parameter in the last exchange; makes the host wait if it has not read it."""
        if self._unread:
            flags, arrived = self._unread[-1]
            arrived.synchronize()
            return flags.tolist()[: self._num_parameters]
        return self._num_users

    def expected_anywhere(self, absent: Iterable[int], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
        """Return whether any rank expects to use each parameter; `absent` are those this rank does not. Collective."""
        flags = _on_device(self._flags(set(absent), self.used_locally), device)
        collectives.all_reduce_now(flags, group)
        return [count > 0 for count in flags.tolist()]

    def expect_nothing(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Answer `expected_anywhere` of other ranks: this one expects to use no parameter. Returns at once."""
        flags = _on_device(self._flags(set(range(self._num_parameters)), self.used_locally), device)
        collectives.all_reduce_sum(flags, group)

    def end_iteration(self) -> None:
        """Remember which parameters were unused and forget which ones earlier backwards used."""
        if self.last_unused is not None and self.last_unused != self.unused:
            self.looks_static = False
        self.last_unused = set(self.unused)
        self.used_locally.clear()
        self.is_exchanged = self.follows_local = False
        if self.promised is not None:
            self.anywhere = self.promised

    def forget_agreements(self) -> None:
        """Forget what ranks have exchanged and what the last iteration used; not what awaits its first reduction."""
        self.anywhere = self.promised = None
        self._num_users = [0] * self._num_parameters
        self.last_unused = None
        self.unused.clear()
        self._agreement = None
        self._unread.clear()

    def _take(self, counts: list[int]) -> None:
        num_parameters = self._num_parameters
        self._num_users, (self.num_refusing, self.num_reading) = (
            counts[:num_parameters], counts[num_parameters : num_parameters + 2]
        )  # fmt: skip
        if learnt := counts[num_parameters + 2 :]:
            self.promised = [count > 0 for count in learnt]

    def _flags(self, unused: set[int], used_before: Collection[int] = ()) -> Tensor:
        used = (index not in unused or index in used_before for index in range(self._num_parameters))
        return torch.tensor(list(used), dtype=torch.int32, device="cpu")


def _on_device(flags: Tensor, device: torch.device) -> Tensor:
    """Return `flags` on `device` without making the host wait for the device: a copy from pinned memory does not."""
    return flags if device.type == "cpu" else flags.pin_memory().to(device, non_blocking=True)


def _on_its_way(flags: Tensor) -> tuple[Tensor, torch.Event]:
    """Return a copy of `flags` in pinned memory of the host, and the event after which it is there."""
    copy = torch.empty_like(flags, device="cpu", pin_memory=True).copy_(flags, non_blocking=True)
    arrived = torch.Event(flags.device)
    arrived.record(torch.accelerator.current_stream(flags.device))
    return copy, arrived
