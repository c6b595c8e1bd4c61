"""Whether buckets leave where they leave on other ranks: between the same two of the other collectives of their group.

A hook of the user's that communicates within backward, and another wrapper, come where the rank's own graph has them.
Where a rank's graph runs its layers in another order, a bucket would meet what is none, and both would be sums of what
does not belong together, without a word (pytorch/pytorch#72843).

In the first iteration all buckets leave at the end of the backward, and ranks compare behind what each gradient came
(`places_of`, sent by `order_exchange`). If their orders differ, all buckets go on leaving at the end.

An order may change later. A backend numbers what it communicates. The numbers that a wrapper's buckets leave with,
counted from the bucket of the group that left before in this backward, are their *places*; how many buckets of other
wrappers have left since its own last ones stands before them. They say nothing of where a backward ends: one rank may
run in one what another runs in two. A rank tells the others nothing as long as its places are those of the iteration
before. When they are new, it says so in the group's store before its last bucket leaves. When it has the
averages, each rank has either said so too, or had no new ones. Unless all have said the same, those that have spoken
compare their averages: if they differ, or nobody else has spoken, some bucket has met another collective. Who is alone
may have sent messages, if it has begun more or less in this backward than in the last one, and goes on.

With `find_unused_parameters` ranks tell each other more, and no bucket leaves before they know that it may: `early`.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl.autograd.backwards import Tally
from ddp_impl.base import messages
from ddp_impl.base.errors import ReductionError
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.wire import agreement
from ddp_impl.wire.forecast import Told
from ddp_impl.wire.groups import rank_in
from ddp_impl.wire.peers import Peers

Members = Sequence[ManagedParameter]

#: How many buckets this process's wrappers of a group have sent, by device.
_num_sent: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[torch.device]] = weakref.WeakKeyDictionary()


class OrderCheck:
    """Compares the places of one wrapper's buckets over its ranks, which must build it alike.

    `count` returns how many collectives the group has begun, None where its backend does not number them: then nothing
    is compared. Nor is anything where `is_paused`. `is_own`: ranks have come to different places.
    """

    def __init__(
        self,
        peers: Peers,
        device: torch.device,
        count: Callable[[], int] | None,
        names: Sequence[str],
        error: Callable[[str], ReductionError],
    ) -> None:
        """Begin without places; `names` are the parameters', and `error` makes of a message what is raised."""
        self._peers = peers
        self._device = device
        self._count = count
        self._names = names
        self._error = error
        self._agreed: list[int] = []
        self._places: list[int] = []
        self._tally = Tally()
        self._filled: Mapping[int, int] = {}
        self._came: Mapping[int, tuple[int, int]] = {}
        # Of the buckets whose gradients every rank was sure of in the last iteration, the members by index; and by
        # identity those that may leave early: not the buckets, which have storage.
        self._sure: dict[int, Members] = {}
        self._sure_gradients: Sequence[bool] = ()
        self._trusted: dict[int, Members] = {}
        self.is_own = False
        self._num_come = self._num_begun = self._num_others_before = 0
        self._num_sent_then = 0 if count is None else _num_sent.get(peers.group, Counter())[device]
        self._said = ""
        self.is_paused = False

    def now(self) -> int:
        """Return how many collectives the group has begun; 0 where that is not known."""
        return 0 if self._count is None else self._count()

    def iteration_begins(self) -> None:
        """Count from here the collectives that gradients come behind."""
        self._num_begun = self.now()

    def backward_begins(self, tally: Tally) -> None:
        """Count places from the begin of the backward that `tally` is of."""
        self._tally, self._places, self._said, self._num_come = tally, [], "", 0

    def num_others(self) -> int:
        """Return how many collectives the group has begun in this backward that are no wrapper's."""
        return self.now() - self._tally.before - self._tally.own

    def begun_by_wrappers(self, number: int) -> None:
        """Count `number` collectives that the group has begun as a wrapper's own."""
        self._tally.own += number

    def own(self) -> AbstractContextManager[None]:
        """Count the group's collectives that the block begins as a wrapper's own, unless it raises."""
        return _Own(self)

    def come(self) -> tuple[int, int]:
        """Return behind how many of the user's collectives a gradient comes, and how much of other wrappers.

        Collectives count from the end of forward: whether a wrapper hears of its backward before a hook on its output
        depends on what else this rank holds.
        """
        return self.now() - self._num_begun - self._tally.own, self._tally.num_come - self._num_come

    def count(self) -> None:
        """Let other wrappers of the backward know that one more gradient has come, or that one more bucket is full."""
        self._tally.num_come += 1
        self._num_come += 1

    def places_of(self, came: Mapping[int, tuple[int, int]]) -> bytes | None:
        """Return a digest that is alike on all ranks if they have come to the same places; None without data.

        `came`: those of the last gradient of each parameter.
        """
        if not came:
            return None
        return agreement.digest(None if self._count is None else sorted(came.items()))

    def differs(self) -> None:
        """Let no bucket leave within a backward from now on; all ranks know, and new places are no surprise."""
        self.is_own, self._agreed = True, []

    def iteration_ends(self, filled: Mapping[int, int], came: Mapping[int, tuple[int, int]]) -> None:
        """Keep what `num_others` was when each bucket had all its gradients.

        `came`: likewise for each parameter, of an iteration that is learnt from; empty of any other.
        """
        self._filled, self._came = filled, came

    def digest(self) -> bytes:
        """Return a few bytes that are alike on all ranks if the buckets that all were sure of could leave alike.

        Of an iteration that was learnt from the same holds for the gradients that all were sure of.
        """
        of_buckets = [(index, self._filled.get(index)) for index in self._sure]
        of_gradients = [(index, self._came[index][0]) for index in self._vouched_for()]
        return agreement.digest((of_buckets, of_gradients))

    def _vouched_for(self) -> list[int]:
        """Return which gradients all ranks were sure of, if the last iteration was learnt from."""
        return [index for index in sorted(self._came) if self._sure_gradients and self._sure_gradients[index]]

    def early(self, told: Told, buckets: Sequence[Bucket]) -> list[bool]:
        """Return for each parameter whether its gradient is sure to come on every rank, in a bucket that may leave.

        Every rank must call it with the same arguments, when it knows them. A bucket may leave within a backward if it
        could have left alike in an earlier one. If others could not, none leaves. An iteration in which a rank has no
        data says nothing of it.
        """
        if not (told.alike or self.is_own):
            self.differs()
        trusted = self._trusted | {id(members): members for members in self._sure.values()}
        learnt = self._vouched_for()
        self._trusted = {
            key: bucket.members
            for bucket in buckets
            if (key := id(bucket.members)) in trusted or all(member.index in learnt for member in bucket.members)
        }
        sure: dict[int, Members] = {
            bucket.index: bucket.members
            for bucket in buckets
            if all(told.sure[member.index] for member in bucket.members)
        }
        self._sure = sure if told.by_all else {}
        self._sure_gradients = told.sure if told.by_all else []
        may_leave = [] if self.is_own else [members for members in sure.values() if id(members) in self._trusted]
        indices = {member.index for members in may_leave for member in members}
        return [index in indices for index in range(len(told.sure))]

    def leaves(self, *, is_last: bool, is_told: bool = True) -> None:
        """Take note that a bucket is about to leave. Of the last one in a backward: tell the others of new places.

        Unless it `is_told`: by some comm hooks an average is there before other ranks have spoken.
        """
        if self._count is None or self.is_paused:
            return
        num_begun = self._count()
        behind = 1 if self._tally.last is None else num_begun - self._tally.last
        self._tally.last = num_begun
        if not is_told:
            return
        num_sent = _num_sent.setdefault(self._peers.group, Counter())
        if not self._places:  # wrappers' own backwards have an order, too
            self._places.append(num_sent[self._device] - self._num_sent_then)
        num_sent[self._device] += 1
        if is_last:
            self._num_sent_then = num_sent[self._device]
        self._places.append(behind)
        if is_last and self._places != self._agreed:
            told = hashlib.sha256(repr(self._places).encode()).hexdigest()[:16]
            self._said = told if self._peers.say(told) else ""

    @property
    def news(self) -> int:
        """What this rank adds to a sum that is 1 if it alone has new places, and they can be no messages of its own.

        0 where places are those of the iteration before, or where it cannot tell the others.
        """
        return (2 if self._may_be_messages() else 1) if self._said else 0

    def _may_be_messages(self) -> bool:
        """Whether only the number of what is no wrapper's has changed in the backward: gloo numbers messages, too."""
        return self._places[:1] == self._agreed[:1] and self.num_others() != self._num_others_before

    def met_others(self) -> ReductionError:
        """Return the error for buckets that have met other collectives; it tells what other ranks say of theirs."""
        told = self._peers.exchange(messages.left_at(self._places))
        return self._error(messages.met_others(rank_in(self._peers.group), self._places, self._names) + told)

    def check(self, averages: Sequence[Tensor]) -> None:
        """Raise `ReductionError` where buckets have met other collectives; all `averages` are on their way here.

        The host waits for them where places are new. Where ranks' places are not alike, they compare their averages:
        some backends number messages, too, which some ranks send each other.
        """
        may_be_messages = bool(self._said) and self._may_be_messages()
        self._num_others_before = self.num_others()
        if not self._said:
            return
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        said, self._said = self._said, ""
        if self._peers.all_say(said) or self._peers.speakers_say(_digest_of(averages), alone=may_be_messages):
            self._agreed = self._places
            return
        with self._peers.awaiting("backward", messages.PLACES):
            raise self.met_others()


class _Own:
    """The block of `OrderCheck.own`. A class costs less than a generator does, and each bucket runs two of these."""

    __slots__ = ("_check", "_num_begun")

    def __init__(self, check: OrderCheck) -> None:
        self._check = check

    def __enter__(self) -> None:
        self._num_begun = self._check.now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._check.begun_by_wrappers(self._check.now() - self._num_begun)


def _digest_of(tensors: Sequence[Tensor]) -> str:
    """Return what tells tensors with one bit of difference apart."""
    digest = hashlib.sha256()
    for tensor in tensors:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        held = dense.to("cpu").contiguous()
        digest.update(ctypes.string_at(held.data_ptr(), held.nbytes))
    return digest.hexdigest()[:16]
