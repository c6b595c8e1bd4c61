"""Which parameters a backward used: on this rank, and on any rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl import collectives


class ParameterUsage:
    """What this rank knows of the use of `num_parameters` parameters in the present and the last iteration.

    `unused`: indices that this rank's synchronised backward did not use; `used_locally`: those that earlier backwards
    without synchronisation used. `anywhere[i]`: whether any rank used parameter i; None until the ranks have exchanged
    it, and until then all count as used. `is_exchanged`: they have in this iteration. `num_users[i]`: how many ranks
    used it. `num_refusing`: how many ranks said in the last exchange that they cannot average what came.
    `promised[i]`: of a static graph, whether any rank's synchronised backward uses parameter i; None until they know.
    `follows_local`: forwards under `no_sync` came before this iteration, on every rank the same ones.
    """

    def __init__(self, num_parameters: int) -> None:
        """Begin without any knowledge."""
        self.unused: set[int] = set()
        self.used_locally: set[int] = set()
        self.anywhere: list[bool] | None = None
        self.is_exchanged = False
        self.promised: list[bool] | None = None
        self.follows_local = False
        self.num_users = [0] * num_parameters
        self.num_refusing = 0
        self.looks_static = True  # every iteration so far left out the same parameters
        self.last_unused: set[int] | None = None
        self._agreement: tuple[Tensor, dist.Work] | None = None

    def begin_agreeing(
        self, group: dist.ProcessGroup, device: torch.device, *, refuses: bool, learns: bool = False
    ) -> None:
        """Start exchanging with all ranks what they used, and whether one `refuses` to go on.

        `learns`: what they use now without earlier backwards is what they promise to use. Every rank calls it between
        the same collectives.
        """
        refusal = torch.tensor([refuses], dtype=torch.int32)
        told = [self._flags(self.unused, self.used_locally), refusal]
        if learns:
            told.append(self._flags(self.unused))
        flags = _on_device(torch.cat(told), device)
        self._agreement = (flags, collectives.all_reduce_sum(flags, group))

    def end_agreeing(self) -> None:
        """Wait for the exchange, if one is on its way."""
        self.num_refusing = 0
        if self._agreement is None:
            return
        flags, work = self._agreement
        self._agreement = None
        work.wait()
        num_parameters = len(self.num_users)
        counts = flags.tolist()
        self.num_users, self.num_refusing = counts[:num_parameters], counts[num_parameters]
        self.anywhere = [count > 0 for count in self.num_users]
        if learnt := counts[num_parameters + 1 :]:
            self.promised = [count > 0 for count in learnt]
        self.is_exchanged = True

    def expected_anywhere(self, absent: Iterable[int], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
        """Return whether any rank expects to use each parameter; `absent` are those this rank does not. Collective."""
        flags = _on_device(self._flags(set(absent), self.used_locally), device)
        collectives.all_reduce_now(flags, group)
        return [count > 0 for count in flags.tolist()]

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
        self.num_users = [0] * len(self.num_users)
        self.last_unused = None
        self.unused.clear()
        self._agreement = None

    def _flags(self, unused: set[int], used_before: Collection[int] = ()) -> Tensor:
        used = (index not in unused or index in used_before for index in range(len(self.num_users)))
        return torch.tensor(list(used), dtype=torch.int32)


def _on_device(flags: Tensor, device: torch.device) -> Tensor:
    """Return `flags` on `device` without making the host wait for the device: a copy from pinned memory does not."""
    return flags if device.type == "cpu" else flags.pin_memory().to(device, non_blocking=True)
