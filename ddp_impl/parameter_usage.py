"""Which parameters a backward used: on this rank, and on any rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl import collectives


class ParameterUsage:
    """What this rank knows of the use of `num_parameters` parameters in the present and the last iteration.

    `unused`: indices that this rank's synchronised backward did not use; `used_locally`: those that earlier backwards
    without synchronisation used. `anywhere[i]`: whether any rank used parameter i; None until the ranks have exchanged
    it, and until then all count as used. `num_users[i]`: how many ranks used it. `num_refusing`: how many ranks said in
    the last exchange that they cannot average what came.
    """

    def __init__(self, num_parameters: int) -> None:
        """Begin without any knowledge."""
        self.unused: set[int] = set()
        self.used_locally: set[int] = set()
        self.anywhere: list[bool] | None = None
        self.num_users = [0] * num_parameters
        self.num_refusing = 0
        self.looks_static = True  # every iteration so far left out the same parameters
        self.last_unused: set[int] | None = None
        self._agreement: tuple[Tensor, dist.Work] | None = None

    def begin_agreeing(self, group: dist.ProcessGroup, device: torch.device, *, refuses: bool) -> None:
        """Start exchanging with all ranks what they used, and whether one `refuses` to go on.

        Every rank calls it between the same collectives.
        """
        refusal = torch.tensor([refuses], dtype=torch.int32)
        flags = _on_device(torch.cat([self._flags(self.unused), refusal]), device)
        self._agreement = (flags, collectives.all_reduce_sum(flags, group))

    def end_agreeing(self) -> None:
        """Wait for the exchange, if one is on its way."""
        self.num_refusing = 0
        if self._agreement is None:
            return
        flags, work = self._agreement
        self._agreement = None
        work.wait()
        *self.num_users, self.num_refusing = flags.tolist()
        self.anywhere = [count > 0 for count in self.num_users]

    def expected_anywhere(self, absent: Iterable[int], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
        """Return whether any rank expects to use each parameter; `absent` are those this rank does not. Collective."""
        flags = _on_device(self._flags(set(absent)), device)
        collectives.all_reduce_now(flags, group)
        return [count > 0 for count in flags.tolist()]

    def end_iteration(self) -> None:
        """Remember which parameters were unused and forget which ones earlier backwards used."""
        if self.last_unused is not None and self.last_unused != self.unused:
            self.looks_static = False
        self.last_unused = set(self.unused)
        self.used_locally.clear()

    def forget_agreements(self) -> None:
        """Forget what ranks have exchanged and what the last iteration used; not what awaits its first reduction."""
        self.anywhere = None
        self.num_users = [0] * len(self.num_users)
        self.last_unused = None
        self.unused.clear()
        self._agreement = None

    def _flags(self, unused: set[int]) -> Tensor:
        used = (index not in unused or index in self.used_locally for index in range(len(self.num_users)))
        return torch.tensor(list(used), dtype=torch.int32)


def _on_device(flags: Tensor, device: torch.device) -> Tensor:
    """Return `flags` on `device` without making the host wait for the device: a copy from pinned memory does not."""
    return flags if device.type == "cpu" else flags.pin_memory().to(device, non_blocking=True)
