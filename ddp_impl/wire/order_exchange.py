"""What ranks tell each other once, behind the iteration that they learn from: rank 0's order, and if all have it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_impl.wire import agreement, collectives
from ddp_impl.wire.groups import rank_in


class OrderExchange:
    """One small all-reduce, which every rank of the group must start between the same two collectives.

    `order`: of this rank's gradients, at most `longest` integers that are not negative; rank 0's goes to all.
    `places`: a digest that may be alike on all ranks; None of a rank that has no data and agrees with all.
    """

    def __init__(
        self,
        order: Sequence[int],
        longest: int,
        places: bytes | None,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Start the exchange."""
        self._longest = longest
        of_rank_0 = [*order, *[-1] * (longest - len(order))] if rank_in(group) == 0 else [0] * longest
        compared = agreement.to_sum(places or bytes(agreement.NUM_BYTES))
        self._sums = torch.tensor([*of_rank_0, places is not None, *compared], dtype=torch.int32, device=device)
        self._work = collectives.all_reduce_sum(self._sums, group)

    def result(self) -> tuple[list[int], bool]:
        """Wait for all ranks; return rank 0's order, and whether the places of all are alike."""
        collectives.finished(self._work, "all_reduce", [self._sums])
        sums = self._sums.tolist()
        num_telling, *compared = sums[self._longest :]
        order = [number for number in sums[: self._longest] if number >= 0]
        return order, all(agreement.are_alike(compared, num_telling))
