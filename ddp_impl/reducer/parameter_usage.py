"""Which parameters a backward used: on this rank, and on any rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl.torch_internals.distributed import reduces_on_host
from ddp_impl.wire import agreement, collectives
from ddp_impl.wire.groups import size_of

#: More than once a parameter is rarely used; beyond this, how often is not compared.
_MOST_TIMES = 1000


@dataclass(frozen=True, slots=True)
class Promise:
    """Of a static graph: `used[i]`, a rank's synchronised backward uses parameter i; `alike[i]`, all equally often."""

    used: list[bool]
    alike: list[bool]


class ParameterUsage:
    """What this rank knows of the use of `num_parameters` parameters in the present and the last iteration.

    `unused`: indices that this rank's synchronised backward did not use; `used_locally`: those that earlier backwards
    without synchronisation used. `anywhere[i]`: whether any rank used parameter i; None until the ranks have exchanged
    it, and until then all count as used. `is_exchanged`: they have in this iteration. `num_refusing`: how many ranks
    said in the last exchange that they cannot average what came; `num_reading`: how many ranks waited to hear that;
    `news`: the sum of theirs (`OrderCheck.news`).
    `promise`: what ranks know of a static graph; None until they do.
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
        self.promise: Promise | None = None
        self.follows_local = False
        self.num_refusing = self.num_reading = self.news = 0
        self.looks_static = True  # every iteration so far left out the same parameters
        self.last_unused: set[int] | None = None
        self._agreement: tuple[Tensor, dist.Work, bool] | None = None
        self._num_users = [0] * num_parameters
        self._num_ranks = 1
        self._unread: deque[tuple[Tensor, torch.Event]] = deque()

    def begin_agreeing(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        refuses: bool,
        news: int = 0,
        learnt: Sequence[int] | None = None,
    ) -> None:
        """Start exchanging with all ranks what they used, and whether one `refuses` to go on.

        `news`: whether this rank's buckets left elsewhere than in the iteration before (`OrderCheck.news`); if the sum
        of all is 1, all refuse.
        `learnt`: how many gradients each parameter brought now, without earlier backwards, which this rank promises for
        every iteration. Every rank calls it between the same collectives.

        Where the `promise` is known, what none uses must be read in each iteration: hosts tell each other then, if the
        group serves them, so that none waits for its device.
        """
        if self.promise is not None and reduces_on_host(group):
            device = torch.device("cpu")
        reads = (
            device.type == "cpu" or refuses or news > 0 or learnt is not None or not self.unused <= self.used_locally
        )
        told: list[int] = [*self._used(self.used_locally), refuses, reads, news]
        if learnt is not None:
            told += [*self._used(), *agreement.to_sum([min(number, _MOST_TIMES) for number in learnt])]
        self._num_ranks = size_of(group)
        flags = _on_device(torch.tensor(told, dtype=torch.int32, device="cpu"), device)
        self._agreement = (flags, collectives.all_reduce_sum(flags, group), reads)

    @property
    def is_agreeing(self) -> bool:
        """Whether an exchange is on its way."""
        return self._agreement is not None

    def end_agreeing(self) -> None:
        """Wait for the exchange, if one is on its way; on an accelerator the host waits only where it must know."""
        self.num_refusing = 0
        if self._agreement is None:
            return
        flags, work, reads = self._agreement
        self._agreement = None
        collectives.finished(work, "all_reduce", [flags])
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

    def used_anywhere(self, group: dist.ProcessGroup, device: torch.device) -> list[bool]:
        """Return whether any rank used each parameter by now. Collective; the host waits."""
        flags = _on_device(torch.tensor(self._used(self.used_locally), dtype=torch.int32, device="cpu"), device)
        collectives.all_reduce_now(flags, group)
        return [count > 0 for count in flags.tolist()]

    def end_iteration(self) -> None:
        """Remember which parameters were unused and forget which ones earlier backwards used."""
        if self.last_unused is not None and self.last_unused != self.unused:
            self.looks_static = False
        self.last_unused = set(self.unused)
        self.used_locally.clear()
        self.is_exchanged = self.follows_local = False
        if self.promise is not None:
            self.anywhere = self.promise.used

    def forget_agreements(self) -> None:
        """Forget what ranks have exchanged and what the last iteration used; not what awaits its first reduction."""
        self.anywhere = self.promise = None
        self._num_users = [0] * self._num_parameters
        self.last_unused = None
        self.unused.clear()
        self._agreement = None
        self._unread.clear()

    def _take(self, counts: list[int]) -> None:
        num_parameters = self._num_parameters
        self._num_users, (self.num_refusing, self.num_reading, self.news) = (
            counts[:num_parameters], counts[num_parameters : num_parameters + 3]
        )  # fmt: skip
        if self.news == 1 < self._num_ranks:
            self.num_refusing = max(1, self.num_refusing)
        if learnt := counts[num_parameters + 3 :]:
            self.promise = Promise(
                used=[count > 0 for count in learnt[:num_parameters]],
                alike=agreement.are_alike(learnt[num_parameters:], self._num_ranks),
            )

    def _used(self, used_before: Collection[int] = ()) -> list[bool]:
        return [index not in self.unused or index in used_before for index in range(self._num_parameters)]


def _on_device(flags: Tensor, device: torch.device) -> Tensor:
    """Return `flags` on `device` without making the host wait for the device: a copy from pinned memory does not."""
    return flags if device.type == "cpu" else flags.pin_memory().to(device, non_blocking=True)


def _on_its_way(flags: Tensor) -> tuple[Tensor, torch.Event]:
    """Return a copy of `flags` in pinned memory of the host, and the event after which it is there."""
    copy = torch.empty_like(flags, device="cpu", pin_memory=True).copy_(flags, non_blocking=True)
    arrived = torch.Event(flags.device)
    arrived.record(torch.accelerator.current_stream(flags.device))
    return copy, arrived
