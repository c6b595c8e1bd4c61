"""The wrappers that take part in one run of autograd's engine: they begin together, send in one order, end together.

A rank's gradients arrive in the order of its own graph. Of two wrappers, the one that autograd reaches first on this
rank is perhaps the second on another. What a wrapper sends because a backward begins or ends is therefore sent by all
wrappers of that backward at one moment, in the order of their construction, which is the same on every rank of a group.
Between the two, a wrapper sends a bucket when those that were built after it, which a backward mostly reaches first,
have sent all that they are certain to send. Where no wrapper expects ranks to differ (`find_unused_parameters`), none
waits for another: then gradients arrive in one order on all ranks.

A gradient of a parameter that a waiting wrapper shares with another, an output of which the backward has reached, is
the other's: the wrapper waits on, unless the backward reaches an output of its own.

A wrapper hands out its averages only when all have sent their gradients: two of them may share a parameter, and what
one averages is what the backward brought. Under compiled autograd, which drops the callback at the end of a backward,
each hands out by itself when its last gradient has arrived.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_impl.torch_internals.autograd import WhenBackwardEnds, compiled_autograd, current_backward

Construction = tuple[int, ...]
_constructions = itertools.count()


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
    def send_what_waits(self) -> None: ...
    def backward_begins(self) -> None: ...
    def backward_ends(self) -> None: ...
    def all_have_sent(self) -> None: ...
    def all_have_handed_out(self) -> None: ...
    def counts_with(self, tally: Tally) -> None: ...
    def engine_run_is_over(self) -> None: ...
    def compiled_backward_ended(self) -> None: ...
    def backward_raised(self, number: int, error: BaseException | None, traceback: TracebackType | None) -> None: ...


#: Every reducer of this process that lives, by identity: a WeakSet would be walked in Python.
_living: dict[int, weakref.ref[Participant]] = {}
#: The engine runs that a wrapper takes part in, by their number.
_running: dict[int, EngineRun] = {}


def construction(copied: Construction) -> Construction:
    """Return the place of a wrapper that is being built, or made as a copy of the one at `copied`."""
    return (*copied, next(_constructions))


def wrapper_lives() -> bool:
    """Whether any wrapper is alive here. Garbage collection makes the answer rank-local."""
    return bool(_living)


def watch_for(participant: Participant) -> None:
    """Have `participant` begin with others, for as long as it lives."""
    key, living = id(participant), _living
    living[key] = weakref.ref(participant, lambda _: living.pop(key, None))


def all_living() -> list[Participant]:
    """Return every wrapper of this process that lives."""
    return [one for ref in list(_living.values()) if (one := ref()) is not None]


def mark_shared(participant: Participant) -> None:
    """Have all that live share backwards if `participant` does; called where all ranks know of it, as of a forward."""
    if participant.may_share_backward and len(_living) > 1:
        for other in all_living():
            other.may_share_backward = True


def has_an_order(participant: Participant) -> bool:
    """Whether `participant` must begin and send in one order with others, as ranks may differ in what one uses."""
    if not participant.may_share_backward:
        return False
    return participant.ranks_may_differ or any(one.ranks_may_differ for one in all_living())


def backward_belongs_to_other(participant: Participant) -> bool:
    """Whether the backward that runs now is that of a wrapper other than `participant`, as far as it has run."""
    return any(one.is_reached for one in all_living() if one is not participant)


def takes_part(participant: Participant) -> bool:
    """Whether `participant` takes part in the backward that runs now, or in one within which that runs."""
    return any(participant in run.participants for run in _running.values())


def begin(participant: Participant) -> None:
    """Begin the backward of `participant`, an output of which autograd has reached, and of those that begin with it."""
    if not has_an_order(participant):
        participant.backward_begins()
        return
    repeated = participant.last_backward
    others = [other for other in all_living() if other is not participant and other.begins_with_others(repeated)]
    for one in sorted([participant, *others], key=_construction):
        one.backward_begins()


def may_send(participant: Participant) -> bool:
    """Whether `participant` may send a bucket within the backward: all that were built after it have sent theirs."""
    rivals = _rivals(participant)
    return not any(one.construction > participant.construction and one.has_more_to_send() for one in rivals)


def has_sent(participant: Participant) -> None:
    """Have the others send what waited for `participant`, which has sent all that it is certain to send."""
    waiting = [one for one in _rivals(participant) if one.construction < participant.construction]
    for one in sorted(waiting, key=_construction, reverse=True):
        one.send_what_waits()


def _rivals(participant: Participant) -> list[Participant]:
    """Return the other wrappers of the backward whose buckets must not meet those of `participant`."""
    run = participant.engine_run
    rivals = [
        one
        for one in (run.participants if run is not None else ())
        if one is not participant and one.group is participant.group and one.device == participant.device
    ]
    return rivals if any(one.ranks_may_differ for one in (participant, *rivals)) else []


def join(participant: Participant) -> EngineRun:
    """Have `participant` end with the backward that runs now; return it."""
    number = current_backward()
    run = _running.get(number)
    if run is None:
        run = _running[number] = EngineRun(number)
    participant.engine_run = run
    if participant not in run.participants:
        run.participants.append(participant)
    run.has_rivals = len(run.participants) > 1 and any(one.ranks_may_differ for one in run.participants)
    return run


@torch.no_grad()
def end_alone(participant: Participant) -> None:
    """End the part of `participant` in a backward that compiled autograd runs: raise here, or nobody hears of it."""
    for step in _STEPS:
        step(participant)


@dataclass(slots=True)
class Tally:
    """How many collectives a group had begun before a backward, and how many of those since are the wrappers' own.

    `num_arrived`: gradients that arrived at wrappers that learn from this backward, and full buckets of others that
    expect the same ones on all ranks.
    """

    before: int = 0
    own: int = 0
    num_arrived: int = 0


class EngineRun:
    """One run of autograd's engine, and who takes part in it.

    `has_rivals`: buckets of several wrappers may have to be kept apart. `tallies`: of groups in which somebody counts.
    """

    def __init__(self, number: int) -> None:
        """Have autograd report the end of the backward with this number, which runs now."""
        self.number, self.is_compiled = number, compiled_autograd.in_compiled_autograd_region
        self.participants: list[Participant] = []
        self.has_rivals = False
        self.tallies: dict[tuple[dist.ProcessGroup, torch.device], Tally] = {}
        WhenBackwardEnds(self._ended, self._raised)

    def count(self, participant: Participant, now: Callable[[], int]) -> None:
        """Count the collectives of the participant's group from here, which others may do already; all take part."""
        key = (participant.group, participant.device)
        if key not in self.tallies:
            tally = self.tallies[key] = Tally(now())
            for other in self.participants:
                if (other.group, other.device) == key:
                    other.counts_with(tally)

    def _ended(self) -> None:
        if torch.is_grad_enabled():  # with create_graph=True
            with torch.no_grad():
                return self._ended()
        _running.pop(self.number, None)
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
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"Another DistributedDataParallel of this backward raised, too: {other}")
            raise errors[0]
        return None

    def _raised(self, error: BaseException | None, traceback: TracebackType | None) -> None:
        _running.pop(self.number, None)
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
            for run in _running.values():  # one within which this ran
                if participant in run.participants:
                    participant.engine_run = run
            participant.engine_run_is_over()


_construction = attrgetter("construction")
#: How a backward ends: each step for all participants before the next one.
_STEPS = tuple(map(methodcaller, ("backward_ends", "all_have_sent", "all_have_handed_out")))
