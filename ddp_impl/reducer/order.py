"""Whether gradients arrive, on all ranks, between the same two of the other collectives of their group.

A hook of the user's that communicates within backward, and another wrapper, come where the rank's own graph has them.
Where a rank's graph runs its layers in another order, a bucket would meet what is none, and both would be sums of what
does not belong together, without a word (pytorch/pytorch#72843). So in the first iteration all buckets leave when the
backward is over, and ranks compare the *place* of each gradient: how many of the user's collectives, and how much of
other wrappers, precede it. If their places differ, all buckets go on leaving when the backward is over.

With `find_unused_parameters` ranks exchange more in every iteration, and no bucket leaves before they know that it may:
`may_launch_in_backward`. A graph that changes its order in a later iteration is not noticed before that iteration is
over (docs/decisions/order_of_communication.md).

A backend numbers what it communicates. Only iterations that ranks compare are counted; all others pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.reducer.company import Tally
from ddp_impl.torch_internals.distributed import counter_of
from ddp_impl.wire.collectives import size_of
from ddp_impl.wire.round import Answer, digest

Members = Sequence[ManagedParameter]


class Order:
    """Compares the places of one wrapper's gradients over the ranks of `group`, which must build it alike.

    `ranks_diverge`: they have found different places. `tally`: of the backward that runs, where anybody counts.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Begin without places; a backend that does not number its collectives has none."""
        self.ranks_diverge = False
        self.tally: Tally | None = None
        self._count: Callable[[], int] | None = counter_of(group, device) if size_of(group) > 1 else None
        self._num_begun = self._num_arrived = 0
        # Of the last iteration: how many of the user's collectives preceded each full bucket, and the place of each
        # gradient; and of the buckets whose gradients every rank was certain of, the members by index.
        self._filled: Mapping[int, int] = {}
        self._arrived: Mapping[int, tuple[int, int]] = {}
        self._certain: dict[int, Members] = {}
        self._certain_gradients: Sequence[bool] = ()
        # By identity, those that may leave early: not the buckets, which have storage.
        self._trusted: dict[int, Members] = {}

    def now(self) -> int:
        """Return how many collectives the group has begun; 0 where the backend does not number them."""
        return 0 if self._count is None else self._count()

    def iteration_begins(self) -> None:
        """Count from here the collectives that gradients arrive behind."""
        self._num_begun = self.now()

    def backward_begins(self, tally: Tally | None) -> None:
        """Count places from the begin of the backward that `tally` is of; None: nobody counts."""
        self.tally = tally
        self._num_arrived = 0

    def counting_own_collectives(self) -> AbstractContextManager[None]:
        """Count the group's collectives that the block begins as a wrapper's own, unless it raises."""
        return nullcontext() if self.tally is None else _Own(self.tally, self.now)

    def num_of_the_users(self) -> int:
        """Return how many collectives the group has begun in this backward that are no wrapper's."""
        return 0 if self.tally is None else self.now() - self.tally.before - self.tally.own

    def position_of_arrival(self) -> tuple[int, int]:
        """Return (user collectives, other wrappers' arrivals) that precede a gradient.

        Collectives count from the end of forward: whether a wrapper notices its backward before a hook on its output
        runs depends on what else this rank holds.
        """
        if self.tally is None:
            return 0, 0
        return self.now() - self._num_begun - self.tally.own, self.tally.num_arrived - self._num_arrived

    def count_arrival(self) -> None:
        """Let other wrappers of the backward see that one more gradient has arrived, or one more bucket is full."""
        if self.tally is not None:
            self.tally.num_arrived += 1
            self._num_arrived += 1

    def digest_of(self, arrived: Mapping[int, tuple[int, int]]) -> bytes | None:
        """Return a digest that is alike on all ranks if gradients arrived at the same places; None without data."""
        if not arrived:
            return None
        return digest(None if self._count is None else sorted(arrived.items()))

    def iteration_ends(self, filled: Mapping[int, int], arrived: Mapping[int, tuple[int, int]]) -> None:
        """Keep the places of this iteration's full buckets, and of its gradients if it was learnt from."""
        self._filled, self._arrived = filled, arrived

    def digest(self) -> bytes:
        """Return a few bytes that are alike on all ranks if the buckets that all were certain of could leave alike.

        Of an iteration that was learnt from the same holds for the gradients that all were certain of.
        """
        of_buckets = [(index, self._filled.get(index)) for index in self._certain]
        of_gradients = [(index, self._arrived[index][0]) for index in self._vouched_for()]
        return digest((of_buckets, of_gradients))

    def _vouched_for(self) -> list[int]:
        """Return which gradients all ranks were certain of, if the last iteration was learnt from."""
        return [index for index in sorted(self._arrived) if self._certain_gradients and self._certain_gradients[index]]

    def may_launch_in_backward(self, forecast: Answer, buckets: Sequence[Bucket]) -> list[bool]:
        """Return for each parameter whether its gradient will arrive on every rank, in a bucket that may leave.

        Every rank must call it with the same arguments, when it knows them. A bucket may leave within a backward if it
        could have left alike in an earlier one. If others could not, none leaves. An iteration in which a rank has no
        data says nothing of it.
        """
        certain, by_all = forecast.certain, forecast.num_telling == forecast.num_ranks
        if not all(forecast.alike):
            self.ranks_diverge = True
        trusted = self._trusted | {id(members): members for members in self._certain.values()}
        learnt = self._vouched_for()
        self._trusted = {
            key: bucket.members
            for bucket in buckets
            if (key := id(bucket.members)) in trusted or bucket.indices.issubset(learnt)
        }
        uncertain = {index for index, is_certain in enumerate(certain) if not is_certain}
        found: dict[int, Members] = {
            bucket.index: bucket.members for bucket in buckets if bucket.indices.isdisjoint(uncertain)
        }
        self._certain = found if by_all else {}
        self._certain_gradients = certain if by_all else []
        may_leave = [] if self.ranks_diverge else [one for one in found.values() if id(one) in self._trusted]
        indices = {member.index for members in may_leave for member in members}
        return [index in indices for index in range(len(certain))]


class _Own:
    """The block of `Order.counting_own_collectives`. A class costs less than a generator does."""

    __slots__ = ("_now", "_num_begun", "_tally")

    def __init__(self, tally: Tally, now: Callable[[], int]) -> None:
        self._tally, self._now = tally, now

    def __enter__(self) -> None:
        self._num_begun = self._now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._tally.own += self._now() - self._num_begun
