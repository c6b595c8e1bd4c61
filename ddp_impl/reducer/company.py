"""What the wrappers of a process owe each other and the user's collectives: who begins, sends and ends together.

A rank's gradients arrive in the order of its own graph. Of two wrappers, the one that autograd reaches first on this
rank is perhaps the second on another. What a wrapper sends because a backward begins or ends is therefore sent by all
wrappers of that backward at one moment, in the order of their construction, which is the same on every rank of a group.
Between the two, a wrapper sends a bucket when those that were built after it, which a backward mostly reaches first,
have sent all that they are certain to send. Where no wrapper expects ranks to differ (`find_unused_parameters`), none
waits for another: then gradients arrive in one order on all ranks.

A gradient of a parameter that a waiting wrapper shares with another, an output of which the backward has reached, is
the other's. Averages are handed out when all wrappers have sent: two may share a parameter. Under compiled autograd,
which drops the callback at the end of a backward, each hands out when its last gradient has arrived.

A hook of the user's that communicates within a backward, and another wrapper, stand where the rank's own graph has
them. In another order of layers a bucket would meet a collective that is none (pytorch/pytorch#72843). So ranks compare
in the first iteration, in which all buckets leave when the backward is over, at which `Order.position_of_arrival` each
gradient arrived (docs/decisions/order_of_communication.md).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_impl.torch_internals.autograd import WhenBackwardEnds, compiled_autograd, current_backward
from ddp_impl.torch_internals.distributed import counter_of
from ddp_impl.wire.collectives import size_of

Construction = tuple[int, ...]


class Participant(Protocol):
    """A wrapper's reducer; `Reducer` says of each method what it does.

    `construction`: its place in the order in which this process built wrappers; a copy stands behind what it is a copy
    of, because ranks may copy several wrappers in different orders. `group` and `device`: over what and with what it
    communicates. `may_share_backward`: other wrappers may take part in its backwards, on every rank of the group alike.
    `ranks_may_differ`: ranks exchange what they use, as it may not be the same. `engine_run`: what it takes part in.
    """

    construction: Construction
    may_share_backward: bool
    ranks_may_differ: bool
    device: torch.device
    engine_run: EngineRun | None

    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def last_backward(self) -> int | None: ...
    @property
    def is_reached(self) -> bool: ...
    def begins_with_others(self, repeated: int | None) -> bool: ...
    def has_more_to_send(self) -> bool: ...
    def send_held_back(self) -> None: ...
    def backward_begins(self) -> None: ...
    def backward_ends(self) -> None: ...
    def all_have_sent(self) -> None: ...
    def all_have_handed_out(self) -> None: ...
    def counts_with(self, tally: Tally | None) -> None: ...
    def engine_run_is_over(self) -> None: ...
    def compiled_backward_ended(self) -> None: ...
    def backward_raised(self, number: int, error: BaseException | None, traceback: TracebackType | None) -> None: ...


class Company:
    """The wrappers of this process that live, and the engine runs that they take part in, by number."""

    def __init__(self) -> None:
        self._constructions = itertools.count()
        self._living: dict[int, weakref.ref[Participant]] = {}  # by identity: a WeakSet would be walked in Python
        self.running: dict[int, EngineRun] = {}

    def construction(self, copied: Construction) -> Construction:
        """Return the place of a wrapper that is being built, or made as a copy of the one at `copied`."""
        return (*copied, next(self._constructions))

    @property
    def wrapper_lives(self) -> bool:
        """Whether any wrapper is alive here. Garbage collection makes the answer rank-local."""
        return bool(self._living)

    def watch_for(self, participant: Participant) -> None:
        """Have `participant` begin with others, for as long as it lives."""
        key, living = id(participant), self._living
        living[key] = weakref.ref(participant, lambda _: living.pop(key, None))

    def all_living(self) -> list[Participant]:
        """Return every wrapper of this process that lives."""
        return [one for ref in list(self._living.values()) if (one := ref()) is not None]

    def mark_shared(self, participant: Participant) -> None:
        """Let every living wrapper share backwards if `participant` does; ranks must call it at the same place."""
        if participant.may_share_backward and len(self._living) > 1:
            for other in self.all_living():
                other.may_share_backward = True

    def has_an_order(self, participant: Participant) -> bool:
        """Whether `participant` must begin and send in one order with others, as ranks may differ in what one uses."""
        if not participant.may_share_backward:
            return False
        return participant.ranks_may_differ or any(one.ranks_may_differ for one in self.all_living())

    def backward_belongs_to_other(self, participant: Participant) -> bool:
        """Whether the backward that runs now is that of another wrapper than `participant`, as far as it has run."""
        return any(one.is_reached for one in self.all_living() if one is not participant)

    def takes_part(self, participant: Participant) -> bool:
        """Whether `participant` takes part in the backward that runs now, or in one within which that runs."""
        return any(participant in run.participants for run in self.running.values())

    def begin(self, participant: Participant) -> None:
        """Begin the backward of `participant`, an output of which autograd has reached, and of those it begins with."""
        if not self.has_an_order(participant):
            participant.backward_begins()
            return
        repeated = participant.last_backward
        others = [one for one in self.all_living() if one is not participant and one.begins_with_others(repeated)]
        for one in sorted([participant, *others], key=_construction):
            one.backward_begins()

    def join(self, participant: Participant) -> EngineRun:
        """Have `participant` end with the backward that runs now; return it."""
        number = current_backward()
        run = self.running.get(number)
        if run is None:
            run = self.running[number] = EngineRun(number)
        participant.engine_run = run
        if participant not in run.participants:
            run.participants.append(participant)
        run.has_rivals = len(run.participants) > 1 and any(one.ranks_may_differ for one in run.participants)
        return run


company = Company()


def may_send(participant: Participant) -> bool:
    """Whether `participant` may send a bucket within the backward: all that were built after it have sent theirs."""
    rivals = _rivals(participant)
    return not any(one.construction > participant.construction and one.has_more_to_send() for one in rivals)


def has_sent(participant: Participant) -> None:
    """Have the others send the buckets that waited for `participant`, whose certain buckets have all left."""
    waiting = [one for one in _rivals(participant) if one.construction < participant.construction]
    for one in sorted(waiting, key=_construction, reverse=True):
        one.send_held_back()


def _rivals(participant: Participant) -> list[Participant]:
    """Return the other wrappers of the backward whose buckets must not meet those of `participant`."""
    run = participant.engine_run
    rivals = [one for one in run.beside(participant) if one is not participant] if run is not None else []
    return rivals if any(one.ranks_may_differ for one in (participant, *rivals)) else []


@torch.no_grad()
def end_compiled_backward(participant: Participant) -> None:
    """End the part of `participant` in a backward that compiled autograd runs; only errors raised here are reported."""
    for step in _STEPS:
        step(participant)


class EngineRun:
    """A run of autograd's engine. `has_rivals`: buckets of several participants have to be kept apart."""

    def __init__(self, number: int) -> None:
        """Have autograd report the end of the backward with this number, which runs now."""
        self.number, self.is_compiled = number, compiled_autograd.in_compiled_autograd_region
        self.participants: list[Participant] = []
        self.has_rivals = False
        self.tallies: dict[tuple[dist.ProcessGroup, torch.device], Tally] = {}
        WhenBackwardEnds(self._ended, self._raised)

    def beside(self, participant: Participant) -> list[Participant]:
        """Return those that communicate over the group of `participant`, itself too, on the same device."""
        group, device = participant.group, participant.device
        return [one for one in self.participants if one.group is group and one.device == device]

    def tally_of(self, participant: Participant, *, begins: bool) -> Tally | None:
        """Return what is counted in the participant's group; if it `begins` to, everybody there counts from here."""
        key = (participant.group, participant.device)
        if begins and key not in self.tallies:
            self.tallies[key] = Tally()
            for other in self.beside(participant):
                other.counts_with(self.tallies[key])
        return self.tallies.get(key)

    def _ended(self) -> None:
        if torch.is_grad_enabled():  # with create_graph=True
            with torch.no_grad():
                return self._ended()
        company.running.pop(self.number, None)
        participants = sorted(self.participants, key=_construction)
        errors: list[Exception] = []
        try:
            for step in _STEPS:
                for participant in list(participants):
                    try:
                        step(participant)
                    except Exception as error:
                        participants.remove(participant)
                        errors.append(error)
        finally:
            self._is_over(self.participants)
        try:
            if errors:
                for other in errors[1:]:
                    errors[0].add_note(f"Another DistributedDataParallel of this backward raised, too: {other}")
                raise errors[0]
        finally:
            errors.clear()  # the traceback of one would hold this frame, which holds it
        return None

    def _raised(self, error: BaseException | None, traceback: TracebackType | None) -> None:
        company.running.pop(self.number, None)
        try:
            for participant in sorted(self.participants, key=_construction):
                if self.is_compiled and traceback is None:
                    participant.compiled_backward_ended()
                else:
                    participant.backward_raised(self.number, error, traceback)
        finally:
            self._is_over(self.participants)

    def _is_over(self, participants: list[Participant]) -> None:
        self.participants = []
        for participant in participants:
            participant.engine_run = None
            for run in company.running.values():  # one within which this ran
                if participant in run.participants:
                    participant.engine_run = run
            participant.engine_run_is_over()


_construction = attrgetter("construction")
#: How a backward ends: each step for all participants before the next one.
_STEPS = tuple(map(methodcaller, ("backward_ends", "all_have_sent", "all_have_handed_out")))


@dataclass(slots=True)
class Tally:
    """Of a backward in which a wrapper learns: the wrappers' own collectives, and what arrived at them."""

    own: int = 0
    num_arrived: int = 0


class Order:
    """Counts, where a wrapper learns, what precedes a gradient: arrivals, and collectives if a backend numbers them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.tally: Tally | None = None
        self._count: Callable[[], int] | None = counter_of(group, device) if size_of(group) > 1 else None
        self._num_begun = self._num_arrived = 0

    def now(self) -> int:
        """Return how many collectives the group has begun; 0 where the backend does not number them."""
        return 0 if self._count is None else self._count()

    def iteration_begins(self) -> None:
        """Count from here the collectives that gradients arrive behind."""
        self._num_begun = self.now()

    def backward_begins(self, tally: Tally | None) -> None:
        """Count from the begin of the backward that `tally` is of; None: nobody counts."""
        self.tally, self._num_arrived = tally, 0

    def counting_own_collectives(self) -> AbstractContextManager[None]:
        """Count the group's collectives that the block begins as a wrapper's own, unless it raises."""
        return nullcontext() if self.tally is None else self._counting(self.tally)

    @contextmanager
    def _counting(self, tally: Tally) -> Iterator[None]:
        num_begun = self.now()
        yield
        tally.own += self.now() - num_begun

    def position_of_arrival(self) -> tuple[int, int]:
        """Return (user collectives since forward, other wrappers' arrivals) that precede a gradient."""
        if self.tally is None:
            return 0, 0
        return self.now() - self._num_begun - self.tally.own, self.tally.num_arrived - self._num_arrived

    def count_arrival(self) -> None:
        """Let other wrappers of the backward see that one more gradient has arrived, or one more bucket is full."""
        if self.tally is not None:
            self.tally.num_arrived += 1
            self._num_arrived += 1
