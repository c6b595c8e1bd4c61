"""What ranks tell each other when one fails: it leaves a word in the group's store, and a wait that fails reads it.

A rank that raises leaves the others waiting for it. All that they learn from the backend is "Connection closed by peer"
or a timeout. In a step that goes well nothing is written or read, and nothing here replaces the error that was raised.
At construction a rank says whether it will compare its module with the others', because one that does not never comes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from ddp_impl import messages
from ddp_impl.errors import CommunicationError, ReductionError, ReplicaMismatchError
from ddp_impl.groups import rank_in, size_of
from ddp_impl.logs import log
from ddp_impl.slow_waits import SlowWaits
from ddp_impl.torch_internals.distributed import Store

#: How long the others' words are waited for.
_PATIENCE_S = 0.5
#: How long a store may take to answer. One whose server is frozen never does.
STORE_ANSWERS_S = 5.0
_MAX_CHARACTERS = 2000

#: What a block is about, or what says it when somebody must hear it.
Description = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class Word:
    """Why a rank raised in a step, counted from 0. `waited`: because others did not come; the cause lies with them.

    `unfinished`: it cannot go on to another step, because gradients of this one had come. `at`: the time by its clock.
    """

    rank: int
    step: int
    reason: str
    waited: bool = False
    unfinished: bool = False
    at: float = dataclasses.field(default_factory=time.time, compare=False)


def in_lines(told: Iterable[Word]) -> str:
    """Return what ranks said as lines behind a message, a line each."""
    return "".join(f"\nrank {word.rank} {word.reason}" for word in told)


class Peers:
    """The other ranks of one wrapper's group.

    Not collective, but ranks find each other's words only if they build their wrappers in the same order. A group
    without a store is silent: ranks then report what they know themselves. A store may have served an earlier run, as
    an elastic agent's does: what is left in it stands under a name of this run, once the ranks have agreed on one.
    """

    def __init__(self, group: dist.ProcessGroup, *, copy_of: str = "") -> None:
        """Count the wrappers of `group`; apart from them those copies that are `copy_of` what `copied_now` has said."""
        self.group = group
        self.step = 0  # the reducer counts them
        self.lost = ""  # why no collective may follow: one has failed here, and the others may be elsewhere
        self._told: Word | None = None
        self._said: tuple[str, ...] = ()  # the keys of the last step in which `all_say` was asked
        self._unknown_in: str | None = None  # the phase that an exception ended which nobody here has seen
        #: How many wrappers the group had before this one, on every rank the same; 0 for a copy.
        self.number = 0 if copy_of else _count(group)
        self._name = f"{copy_of}.{_count(group, copy_of)}" if copy_of else f"{self.number}"
        # Who wraps or changes its group after a failure begins anew, on every rank: earlier failures are past.
        self._is_past = False
        for other in () if copy_of else _all_living():
            other._is_past = other._is_past or (other.group is group and bool(other.lost or other.broke_off))
        key, living = id(self), _living  # by the end of the process the name may stand for nothing
        living[key] = weakref.ref(self, lambda _: living.pop(key, None))

    def agree(self, run: str) -> None:
        """Keep what all ranks of the group call this run from now on, unless an earlier wrapper of it has said so."""
        _runs.setdefault(self.group, run)

    def say_whether_compared(self, compares: bool) -> None:
        """Leave word of this rank's `init_sync`: a rank without it issues no collective that others could wait for."""
        store, rank = self._store(), rank_in(self.group)
        if store is not None and size_of(self.group) > 1:
            with contextlib.suppress(Exception):
                for key in (self._key(rank), self._key(-1)):
                    store.set(f"{key}/compares {compares}", json.dumps([rank, time.time()]))

    def refuse_unlike(self, compares: bool) -> None:
        """Raise `ReplicaMismatchError` where another rank has left word of another `init_sync` than this one's."""
        other = self._left(f"{self._key(-1)}/compares {not compares}")
        if other is not None:
            raise ReplicaMismatchError(
                f"[rank {rank_in(self.group)}] DDP expects the same init_sync on every rank, but it is {compares} on "
                f"rank {rank_in(self.group)} and {not compares} on rank {other}: one would wait for a comparison to "
                "which the other does not come. Give every rank the same"
            )

    def await_like(self, compares: bool) -> None:
        """Wait a moment until all ranks have left word of the same `init_sync`; raises as `refuse_unlike` does."""
        others = set(range(size_of(self.group))) - {rank_in(self.group)}
        end = time.monotonic() + STORE_ANSWERS_S
        while others and self._store() is not None and time.monotonic() < end:
            self.refuse_unlike(compares)
            others = {each for each in others if self._left(f"{self._key(each)}/compares {compares}") is None}
            time.sleep(0.005)

    def _left(self, key: str) -> int | None:
        """Return which rank has left word under this key in this run; None if none has, or the store does not say."""
        with contextlib.suppress(Exception):
            store = self._store()
            if store is not None and store.check([key]):
                rank, at = json.loads(store.get(key))
                return int(rank) if self._is_of_this_run(at) else None
        return None

    def serve(self, wrapper: object) -> None:
        """Say it where this rank waits long, for as long as `wrapper` lives."""
        _slow_waits.serve(wrapper)

    def lost_by_another(self) -> str:
        """Return why no collective of this wrapper may follow: one of another wrapper of the group has failed here.

        The same where a backward of the other broke off on this rank and not on all: those wait for it, and would take
        what comes next in the group for an answer.
        """
        if len(_living) == 1:
            return ""
        for other in [other for other in _all_living() if other is not self and other.group is self.group]:
            if other._is_past:
                continue
            if not other.lost and other.broke_off and len(other.words() or ()) < size_of(self.group) - 1:
                other.lost = messages.broke_off_here(rank_in(self.group))
            if other.lost:
                return messages.lost_by_another(other.lost)
        return ""

    @property
    def copied_now(self) -> str:
        """Of what a copy is one that is made now: of this wrapper in its step. Ranks that copy together agree."""
        return f"{self._name}@{self.step}"

    @property
    def broke_off(self) -> bool:
        """Whether a backward of this wrapper raised when gradients had come."""
        return self._told is not None and self._told.unfinished

    def telling(self, phase: str) -> AbstractContextManager[None]:
        """Leave word of an exception that the block raises."""
        return _Telling(self, phase)

    def awaiting(self, phase: str, what: Description) -> AbstractContextManager[None]:
        """Add to an exception of the block, which waits for other ranks, what they said, or else what is known here.

        No block is entered after one that failed, as with `communicating`.
        """
        return _InStep(self, phase, what, self._explain_wait)

    def communicating(self, phase: str, what: Description) -> AbstractContextManager[None]:
        """Add `what` it was about to an exception of the block, in which this rank, or a hook, issues collectives."""
        return _InStep(self, phase, what, self._say_where)

    def _explain_wait(self, phase: str, what: str, error: Exception) -> None:
        if isinstance(error, (ReductionError, ReplicaMismatchError)):  # of our own, which say themselves what is wrong
            return
        self.tell(messages.waited(error, what, phase, self.step), waited=True)
        words = self.words(until_cause=True)
        error.add_note(
            messages.waited_in_vain(
                rank_in(self.group), what, phase, self.step,
                None if words is None else [(word.rank, word.reason) for word in words],
                only_waited=bool(words) and all(word.waited for word in words or ()),
            )
        )  # fmt: skip

    def _say_where(self, phase: str, what: str, error: Exception) -> None:
        error.add_note(messages.place(rank_in(self.group), what, phase, self.step))

    def speak_of_slow_wait(self, phase: str, what: str, step: int, seconds: float) -> None:
        """Log what this rank waits for, and what the others say that they wait for; those that wait for nothing run on.

        The same word serves others that look later: it is no reason of a failure.
        """
        rank, store = rank_in(self.group), self._store()
        log.warning(messages.waits_long(rank, what, phase, step, seconds))
        if store is None:
            return
        with contextlib.suppress(Exception):  # a store that fails says nothing of the wait
            store.set(f"{self._key(rank)}/waits", json.dumps([step, f"{what} in {phase}", time.time()]))
            others = [other for other in range(size_of(self.group)) if other != rank]
            told = {
                other: json.loads(store.get(f"{self._key(other)}/waits"))
                for other in others
                if store.check([f"{self._key(other)}/waits"])
            }
            waiting = {
                other: where for other, (its, where, at) in told.items() if its >= step and self._is_of_this_run(at)
            }
            log.warning(messages.others_wait(rank, waiting, [other for other in others if other not in waiting]))

    def raised(
        self, phase: str, error: BaseException | None, traceback: TracebackType | None, *, unfinished: bool = False
    ) -> None:
        """Leave word of an exception, as far as it is known; what more is known when the process ends comes then."""
        self.tell(messages.raised(error, traceback, phase, self.step), unfinished=unfinished)
        if error is None:
            self._unknown_in = phase

    def ended_by(self, error: BaseException) -> None:
        """Leave word of the exception that ends this process: that of a backward, perhaps, or the user's own."""
        phase, self._unknown_in = self._unknown_in, None
        if phase is not None:
            self._told = None
        self.raised(phase or "the training loop", error, error.__traceback__)

    def tell(self, reason: str, *, waited: bool = False, unfinished: bool = False) -> None:
        """Leave `reason` where the other ranks can read it; the first one of a step, because it is the cause."""
        told = self._told
        if told is not None and told.step >= self.step and (told.unfinished or not unfinished):
            return
        rank = rank_in(self.group)
        self._told = Word(rank, self.step, reason[:_MAX_CHARACTERS], waited, unfinished)
        store = self._store()
        if store is not None and size_of(self.group) > 1:
            with contextlib.suppress(Exception):  # the error that is being raised matters more
                store.set(self._key(rank), json.dumps(dataclasses.asdict(self._told)))

    def say(self, what: str) -> bool:
        """Count this rank among those that say `what` in this step; return whether it could.

        It cannot without a store, nor while the ranks have not agreed on a name for the run.
        """
        store = self._store()
        if store is None or not self._run:
            return False
        with contextlib.suppress(Exception):  # the step needs no store
            store.add(self._of_step("speakers"), 1)
            store.add(self._of_step(what), 1)
            return True
        return False

    def all_say(self, what: str) -> bool:
        """Return whether all ranks have said `what` by now, as this rank has; all must be in this step."""
        store = self._store()
        if store is None:
            return True
        for key in self._said if rank_in(self.group) == 0 else ():  # all have read what they said in an earlier step
            with contextlib.suppress(Exception):
                store.delete_key(key)
        self._said = (self._of_step("speakers"), self._of_step(what))
        try:
            return store.add(self._of_step(what), 0) == size_of(self.group)
        except Exception:  # nothing is known
            return True

    def speakers_say(self, what: str, *, alone: bool) -> bool:
        """Return whether all ranks that have said something in this step, as this rank has, say `what` now.

        All of them must call it; `alone` where there is no other. Waits a moment for them: a store has no call that
        waits for a number.
        """
        store = self._store()
        with contextlib.suppress(Exception):
            num_speakers = 0 if store is None else store.add(self._of_step("speakers"), 0)
            if store is None or num_speakers < 2:
                return alone
            store.add(self._of_step(what), 1)
            store.add(self._of_step("answers"), 1)
            end = time.monotonic() + STORE_ANSWERS_S
            while store.add(self._of_step("answers"), 0) < num_speakers and time.monotonic() < end:
                time.sleep(0.01)
            return bool(store.add(self._of_step(what), 0) == num_speakers)
        return False

    def _of_step(self, what: str) -> str:
        return f"ddp_impl/{self._run}/{self._name}/{self.step}/{what}"

    def exchange(self, reason: str) -> str:
        """Leave `reason`, and return what other ranks left, a line each."""
        self.tell(reason)
        return in_lines(self.words() or ())

    def words(self, *, until_cause: bool = False) -> list[Word] | None:
        """Return what other ranks said of this step, causes first; None if the store does not answer.

        Waits a moment, because a rank that fails too may only be about to say so; `until_cause`: no longer than until
        one has said what is no consequence.
        """
        store = self._store()
        if store is None:
            return []
        found: dict[int, Word] = {}
        reader = threading.Thread(target=self._read, args=(store, found, until_cause), daemon=True)
        try:
            reader.start()
        except RuntimeError:  # the interpreter is shutting down
            return None
        reader.join(_PATIENCE_S + STORE_ANSWERS_S)
        if reader.is_alive():
            return None
        return sorted(found.values(), key=lambda word: (word.waited, word.rank))

    def _read(self, store: Store, found: dict[int, Word], until_cause: bool) -> None:
        others = set(range(size_of(self.group))) - {rank_in(self.group)}
        end = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(Exception):
            while others:
                for rank in sorted(others):
                    if store.check([self._key(rank)]):
                        others.discard(rank)
                        word = Word(**json.loads(store.get(self._key(rank))))
                        # An older one was about something that is over.
                        if word.step >= self.step - 1 and self._is_of_this_run(word.at):
                            found[rank] = word
                if until_cause and not all(word.waited for word in found.values()):
                    return
                if time.monotonic() >= end:
                    return
                time.sleep(0.02)

    def _key(self, rank: int) -> str:
        return f"ddp_impl/{self._run}/{self._name}/{rank}"

    @property
    def _run(self) -> str:
        return _runs.get(self.group, "")

    def _is_of_this_run(self, at: float) -> bool:
        """Whether what was left at time `at` can be of this run: all processes of an earlier one had ended before."""
        return bool(self._run) or at >= _began

    def _store(self) -> Store | None:
        try:
            return self.group.get_group_store()
        except (RuntimeError, AttributeError):  # made without one; or this rank is not in the group
            return None


class _Telling:
    """The block of `Peers.telling`. A class costs a forward less than a generator does."""

    __slots__ = ("_peers", "_phase")

    def __init__(self, peers: Peers, phase: str) -> None:
        self._peers, self._phase = peers, phase

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._peers.raised(self._phase, error, error.__traceback__)


class _InStep:
    """Keeps the ranks' collectives in step: after a block that raised, none is entered, and `Peers.lost` says why.

    Its collectives would meet others of the other ranks'. Each further block raises `CommunicationError`. `explain`
    adds to an exception what there is to say. Two of these run for each bucket: `what` it is about is put into words
    only where somebody hears of it.
    """

    __slots__ = ("_explain", "_peers", "_phase", "_step", "_what")

    def __init__(
        self, peers: Peers, phase: str, what: Description, explain: Callable[[str, str, Exception], None]
    ) -> None:
        self._peers, self._phase, self._what, self._explain = peers, phase, what, explain
        self._step = peers.step

    def __enter__(self) -> None:
        peers = self._peers
        if lost := peers.lost or peers.lost_by_another():
            error = CommunicationError(lost)
            self._explain(self._phase, self._words(), error)
            raise error
        if size_of(peers.group) > 1:
            _slow_waits.begin(peers, self._speak)

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        peers = self._peers
        if error is not None:
            peers.lost = messages.lost(rank_in(peers.group), self._words(), self._phase, self._step)
        _slow_waits.end(peers)
        if isinstance(error, Exception):
            self._explain(self._phase, self._words(), error)

    def _words(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def _speak(self, seconds: float) -> None:
        self._peers.speak_of_slow_wait(self._phase, self._words(), self._step, seconds)


def _count(group: dist.ProcessGroup, copy_of: str = "") -> int:
    """Return how many wrappers, or copies of one, `group` had before this one; a rank not in it need not count."""
    if not isinstance(group, dist.ProcessGroup):
        return 0
    counter = _num_wrappers.setdefault(group, Counter())
    counter[copy_of] += 1
    return counter[copy_of] - 1


#: By what name the ranks of a group know what they have left in its store.
_runs: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_began = time.time()


def _begin_as_a_fork() -> None:
    global _began
    _began = time.time()


os.register_at_fork(after_in_child=_begin_as_a_fork)

_num_wrappers: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
#: By identity. Each wait asks how many there are, and a WeakSet would count them in Python.
_living: dict[int, weakref.ref[Peers]] = {}
_slow_waits = SlowWaits()


@atexit.register
def _say_why_the_process_ends() -> None:
    """Leave word of the exception that ends this process, wherever it was raised: before connections are closed."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        for peers in _all_living():
            peers.ended_by(error)


def _all_living() -> list[Peers]:
    return [peers for ref in list(_living.values()) if (peers := ref()) is not None]
