"""Whether buckets leave where they leave on other ranks: between the same two of the other collectives of their group.

A hook of the user's that communicates within backward, and another wrapper, come where the rank's own graph has them.
Where a rank's graph runs its layers in another order, a bucket would meet what is none, and both would be sums of what
does not belong together, without a word (pytorch/pytorch#72843).

A backend numbers what it communicates: the numbers that a wrapper's buckets leave with, counted from the backward's
begin, are their *places*. A rank tells the others nothing as long as its places are those of the iteration before. When
they are new, it says so in the group's store before its last bucket leaves. When it has the averages, each rank has
either said so too, or had no new ones; and unless all have said the same, some bucket has met another collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from ddp_impl import messages
from ddp_impl.errors import ReductionError
from ddp_impl.groups import rank_in
from ddp_impl.peers import Peers


class OrderCheck:
    """Compares the places of one wrapper's buckets over its ranks, which must build it alike.

    `count` returns how many collectives the group has begun, None where its backend does not number them: then nothing
    is compared. Nor is anything within a join context, whose idle ranks see none but the wrapper's own collectives.
    """

    def __init__(
        self,
        peers: Peers,
        device: torch.device,
        count: Callable[[], int] | None,
        error: Callable[[str], ReductionError],
    ) -> None:
        """Begin without places; `error` makes of a message what is raised."""
        self._peers = peers
        self._device = device
        self._count = count
        self._error = error
        self._agreed: list[int] = []
        self._places: list[int] = []
        self._first = 0
        self._said: str | None = None
        self.is_paused = False

    def now(self) -> int:
        """Return how many collectives the group has begun; 0 where that is not known."""
        return 0 if self._count is None else self._count()

    def backward_begins(self, first: int) -> None:
        """Count places from `first`, which was `now` when the first wrapper of the group began with the backward."""
        self._first, self._places, self._said = first, [], None

    def leaves(self, *, is_last: bool) -> None:
        """Take note that a bucket is about to leave. Of the last one in a backward: tell the others of new places."""
        if self._count is None or self.is_paused:
            return
        self._places.append(self._count() - self._first)
        if is_last and self._places != self._agreed:
            self._said = self._peers.say(hashlib.sha256(repr(self._places).encode()).hexdigest()[:16])

    def check(self) -> None:
        """Raise `ReductionError` unless all ranks have the places of this one; all averages are on their way here.

        The host waits for them where places are new.
        """
        if self._said is None:
            return
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        said, self._said = self._said, None
        if self._peers.all_say(said):
            self._agreed = self._places
            return
        with self._peers.awaiting("backward", messages.PLACES):
            told = self._peers.exchange(messages.left_at(self._places))
            raise self._error(messages.met_others(rank_in(self._peers.group), self._places) + told)
