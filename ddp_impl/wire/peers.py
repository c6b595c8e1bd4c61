"""Reports that ranks exchange through the group's store when one fails or waits long.

A rank that raises leaves the others with "Connection closed by peer" or a timeout. In a step that goes well nothing is
written or read, and nothing here replaces the error that was raised. At construction a rank reports whether it will
compare its module with the others'.

A rank that skips a batch leaves the others waiting until the group's timeout. So one thread of the process looks at its
waits a few times a second, and logs those that last. It ends with the last wrapper, and when nobody waits. It also
answers ranks whose buffers have changed, and who wait for this one to compare its own: see `Peers.answer`.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from ddp_impl.base import messages
from ddp_impl.base.errors import CommunicationError, ReductionError, ReplicaMismatchError
from ddp_impl.base.messages import FailureReport
from ddp_impl.base.telemetry import log
from ddp_impl.torch_internals.distributed import Store
from ddp_impl.wire.collectives import rank_in, size_of

#: How long the others' reports are waited for.
_PATIENCE_S = 0.5
#: How long a store may take to answer. One whose server is frozen never does.
_STORE_ANSWERS_S = 5.0
_MAX_CHARACTERS = 2000
#: How long a rank whose wrapper compares nothing waits, before its first forward, for ranks that still have none.
_CONSTRUCTED_WITHIN = timedelta(seconds=30)
#: After how many seconds of waiting a rank logs it.
SLOW_S: Final = 30.0
#: After how many seconds of waiting a rank looks for the first time whether others wait for its buffers.
_ANSWERS_AFTER_S = 1.0
#: The report on its buffers of a rank that copied them unchanged.
UNCHANGED: Final = "unchanged"
#: How often the thread looks, and how long it goes on when nobody waits.
_PERIOD_S = 0.2
#: How long the thread may take to end with the last wrapper: what it logs at that moment.
_ENDS_WITHIN_S = 1.0

#: What a rank waits for, in words, or a function that returns the words when they are needed.
Description = str | Callable[[], str]
#: When a wait began (on the monotonic clock), in which phase, and for what.
Wait = tuple[float, str, Description]


def in_lines(reports: Iterable[FailureReport]) -> str:
    """Return what ranks reported as lines behind a message, a line each."""
    return "".join(f"\n{report}" for report in reports)


class Peers:
    """The other ranks of one wrapper's group, which find each other's reports if they build wrappers in the same order.

    Without a store a rank reports only its own state. A store that served an earlier run has its reports under the name
    of that run.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, copy_of: str = "", decline: Callable[[], object] = lambda: None
    ) -> None:
        """Count the wrappers of `group`; copies are counted apart, by `copy_of`, the `copied_now` of their original.

        `decline` begins, on a rank that raises, the collective in which the others compare modules.
        """
        self.group, self.decline = group, decline
        self.step = 0  # the reducer counts them
        self.lost = ""  # why no collective may follow: one has failed here, and the others may be elsewhere
        self.wait: Wait | None = None  # what this rank waits for now
        self.company = _Company.of(group)
        self.num_copies = self.num_compared = 0  # how often ranks copied buffers, and compared them first
        self._answered: tuple[float, float] | None = None  # in the wait since when, and after how long next
        self._published: FailureReport | None = None
        self._unknown_in: str | None = None  # the phase that an exception ended which nobody here has seen
        #: How many wrappers the group had before this one, on every rank the same; 0 for a copy.
        self.number = 0 if copy_of else self.company.count()
        self._name = f"{copy_of}.{self.company.count(copy_of)}" if copy_of else f"{self.number}"
        # Who wraps or changes its group after a failure begins anew, on every rank: earlier failures are past.
        self._is_past = False
        if not copy_of:
            for other in self.company.living():
                other._is_past = other._is_past or bool(other.lost or other.broke_off)
            self.company.has_failed = False
        self.company.wrappers[self] = None

    def publish_init_sync(self, compares: bool, *, has_buffers: bool = False) -> None:
        """Publish this rank's `init_sync`: a rank without it takes no part in the comparison of modules.

        Raises `ReplicaMismatchError` where a rank gave up before any compared: then none does.
        """
        if size_of(self.group) > 1:
            self._write(f"compares {compares}", rank_in(self.group))
            self._write(f"{rank_in(self.group)} is there", has_buffers)
            if compares and not self._are_compared(otherwise=True):
                self.refuse_unlike(compares)

    def _are_compared(self, *, otherwise: bool) -> bool:
        """Return whether modules are compared, as the first rank of the group that asks has it: `otherwise`.

        So a rank that gives up finds whether others wait for it, who would be a collective ahead of it ever after.
        """
        store = self._store()
        with contextlib.suppress(Exception):
            if store is not None:
                key, mine = self.key_of("are compared"), json.dumps([time.time(), otherwise])
                first = store.compare_set(key, "", mine).decode()
                if self._of_this_run(first) is None:
                    first = store.compare_set(key, first, mine).decode()
                return bool(json.loads(first)[1])
        return otherwise

    def refuse_unlike(self, compares: bool) -> None:
        """Raise `ReplicaMismatchError` where another rank has published another `init_sync`, or an exception.

        A rank that compares nothing waits a moment for the other ranks: it has no later chance.
        """
        other, gone, store = None, None, self._store()
        with contextlib.suppress(Exception):
            others = set(range(size_of(self.group))) - {rank_in(self.group)}
            if store is not None and others and not compares:
                _await(store, [self.key_of(f"{rank} is there") for rank in others], _CONSTRUCTED_WITHIN)
        with contextlib.suppress(Exception):
            other = None if store is None else self._value_of(store, f"compares {not compares}")
            gone = None if store is None else self._value_of(store, "gave up")
        if gone is not None:
            raise ReplicaMismatchError(
                f"[rank {rank_in(self.group)}] no rank can wrap its module, because rank {gone[0]} raised in "
                f"construction: {gone[1]}"
            )
        if other is not None:
            if not compares:
                self._give_up()
            raise ReplicaMismatchError(
                f"[rank {rank_in(self.group)}] DDP expects the same init_sync on every rank, but it is {compares} on "
                f"rank {rank_in(self.group)} and {not compares} on rank {other}: one would wait for a comparison in "
                "which the other takes no part. Give every rank the same"
            )

    def any_has_buffers(self) -> bool:
        """Return whether a rank had buffers when it was constructed, as far as its word is there already."""
        store = self._store()
        with contextlib.suppress(Exception):
            return store is not None and any(
                self._value_of(store, f"{rank} is there") for rank in range(size_of(self.group))
            )
        return False

    def compare_buffers(self, mine: str, timeout: timedelta) -> list[str] | None:
        """Leave `mine`, this rank's buffers, as some have changed; return what all ranks left, or `UNCHANGED`, by rank.

        None without a store. Ranks whose buffers are as before do not call it: the watcher of one answers when the rank
        waits in a later collective. Raises the store's error after `timeout`.
        """
        store = self._store()
        self.num_compared += 1
        if store is None or not self.company.run:
            return None
        number, rank = self.num_compared, rank_in(self.group)
        keys = [self._key_of_buffers(each, number) for each in range(size_of(self.group))]
        store.set(self._key_of_buffers(rank, number), mine)
        self._write("compares buffers", [number, self.num_copies, self.step])
        _await(store, keys, timeout)
        with contextlib.suppress(RuntimeError):  # who has written this one has read the one before
            store.delete_key(self._key_of_buffers(rank, number - 1))
        return [store.get(key).decode() for key in keys]

    def answer(self, wait: Wait, seconds: float) -> None:
        """Report, in the watcher's thread, to ranks that compare buffers: nothing changed here before this wait."""
        due = self._answered[1] if self._answered is not None and self._answered[0] == wait[0] else _ANSWERS_AFTER_S
        store = self._store() if seconds >= due else None
        if store is None:
            return
        self._answered = wait[0], 2 * seconds  # ever more rarely: a thousand ranks may wait for one that is slow
        with contextlib.suppress(Exception):
            number, num_copies, step = self._value_of(store, "compares buffers") or (0, 0, 0)
            has_passed = self.num_copies > num_copies or self.step + (wait[1] == "backward") > step
            # Read after it: this rank may go on meanwhile, and then compare, too.
            if has_passed and self.wait is wait and number > self.num_compared:
                store.set(self._key_of_buffers(rank_in(self.group), number), UNCHANGED)

    def _key_of_buffers(self, rank: int, number: int) -> str:
        return self.key_of(f"{rank}/buffers {number}")

    def why_lost(self) -> str:
        """Return why no collective of this wrapper may follow: one failed here, or a backward broke off here alone."""
        if self.lost or not self.company.has_failed:
            return self.lost
        for other in [other for other in self.company.living() if other is not self and not other._is_past]:
            if not other.lost and other.broke_off and len(other.reports() or ()) < size_of(self.group) - 1:
                other.lost = messages.broke_off_here(rank_in(self.group))
            if other.lost:
                return messages.lost_by_another(other.lost)
        return ""

    def refuse_lost(self, phase: str, what: Description, *, with_reports: bool = True) -> None:
        """Raise `CommunicationError` where no collective of this wrapper may follow."""
        if lost := self.why_lost():
            error = CommunicationError(lost)
            self._explain(phase, what, error, with_reports=with_reports)
            raise error

    def failed(self, phase: str, what: Description, error: BaseException, *, with_reports: bool = True) -> None:
        """Note that a collective raised `error`: no other may follow. Add other ranks' reports to the error."""
        self.lost = messages.lost(rank_in(self.group), _in_words(what), phase, self.step)
        self.wait, self.company.has_failed = None, True
        if isinstance(error, Exception):
            self._explain(phase, what, error, with_reports=with_reports)

    def _explain(self, phase: str, what: Description, error: Exception, *, with_reports: bool) -> None:
        rank, text = rank_in(self.group), _in_words(what)
        if not with_reports:
            error.add_note(messages.place(rank, text, phase, self.step))
        elif not isinstance(error, (ReductionError, ReplicaMismatchError)):  # ours, which say themselves what is wrong
            self.publish(messages.waited(error, text, phase, self.step), waited=True)
            reports = self.reports(until_cause=True)
            error.add_note(messages.waited_in_vain(rank, text, phase, self.step, reports))

    @property
    def copied_now(self) -> str:
        """The name of the original for a copy that is made now; the same on all ranks that copy in the same step."""
        return f"{self._name}@{self.step}"

    @property
    def broke_off(self) -> bool:
        """Whether a backward of this wrapper raised after its first gradient."""
        return self._published is not None and self._published.unfinished

    @contextlib.contextmanager
    def publishing_errors(self, phase: str) -> Iterator[None]:
        """Publish an exception that the block raises; other ranks need not wait for it in `refuse_unlike`."""
        try:
            yield
        except BaseException as error:
            self.raised(phase, error, error.__traceback__)
            if size_of(self.group) > 1:
                self._write("gave up", [rank_in(self.group), f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]])
                self._write(f"{rank_in(self.group)} is there", value=False)
                self._give_up()
            raise

    def _give_up(self) -> None:
        """Take part in a comparison of modules that others have begun, as `decline` does, and wait for nobody."""
        with contextlib.suppress(Exception):
            if self._are_compared(otherwise=False):
                self.decline()

    def awaiting(self, phase: str, what: Description, *, with_reports: bool = True) -> AbstractContextManager[None]:
        """Return a block in which ranks wait for `what`; its exceptions get a note with other ranks' reports.

        Without `with_reports`, as where a hook of the user's communicates, the note has only `what`.
        """
        return _InStep(self, phase, what, with_reports=with_reports)

    def log_slow_wait(self, wait: Wait, seconds: float) -> None:
        """Log, in the watcher's thread, what this rank and the others wait for."""
        _, phase, described = wait
        what, step = _in_words(described), self.step
        rank, store = rank_in(self.group), self._store()
        log.warning(messages.waits_long(rank, what, phase, step, seconds))
        if store is None:
            return
        with contextlib.suppress(Exception):  # a store that fails says nothing of the wait
            self._write(f"{rank}/waits", [step, f"{what} in {phase}"])
            others = [other for other in range(size_of(self.group)) if other != rank]
            told = {other: left for other in others if (left := self._value_of(store, f"{other}/waits"))}
            waiting = {other: where for other, (at, where) in told.items() if at >= step}
            log.warning(messages.others_wait(rank, waiting, [other for other in others if other not in waiting]))

    def raised(
        self, phase: str, error: BaseException | None, traceback: TracebackType | None, *, unfinished: bool = False
    ) -> None:
        """Publish an exception; if it is unknown here, `ended_by` publishes it when the process ends."""
        self.publish(messages.raised(error, traceback, phase, self.step), unfinished=unfinished)
        if error is None:
            self._unknown_in = phase

    def ended_by(self, error: BaseException) -> None:
        """Publish the exception that ends this process: of a backward, perhaps, or of the user's code."""
        phase, self._unknown_in = self._unknown_in, None
        if phase is not None:
            self._published = None
        self.raised(phase or "the training loop", error, error.__traceback__)

    def publish(self, reason: str, *, waited: bool = False, unfinished: bool = False) -> None:
        """Write `reason` to the store; of one step only the first, because it is the cause."""
        told = self._published
        if told is not None and told.step >= self.step and (told.unfinished or not unfinished):
            return
        rank = rank_in(self.group)
        self._published = FailureReport(rank, self.step, reason[:_MAX_CHARACTERS], waited, unfinished)
        self.company.has_failed |= unfinished
        if size_of(self.group) > 1:
            self._write(f"{rank}", dataclasses.asdict(self._published))

    def exchange(self, reason: str) -> str:
        """Publish `reason`, and return the other ranks' reports, a line each."""
        self.publish(reason)
        return in_lines(self.reports() or ())

    def reports(self, *, until_cause: bool = False) -> list[FailureReport] | None:
        """Return other ranks' reports on this step, causes first; None if the store does not answer.

        Waits a moment, because another rank that fails may not have published yet, or until there is a cause.
        """
        store = self._store()
        if store is None:
            return []
        found: dict[int, FailureReport] = {}
        reader = threading.Thread(target=self._read, args=(store, found, until_cause), daemon=True)
        try:
            reader.start()
        except RuntimeError:  # the interpreter is shutting down
            return None
        reader.join(_PATIENCE_S + _STORE_ANSWERS_S)
        if reader.is_alive():
            return None
        return sorted(found.values(), key=lambda report: (report.waited, report.rank))

    def _read(self, store: Store, found: dict[int, FailureReport], until_cause: bool) -> None:
        others = set(range(size_of(self.group))) - {rank_in(self.group)}
        end = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(Exception):
            while others:
                for rank in sorted(others):
                    if left := self._value_of(store, f"{rank}"):
                        others.discard(rank)
                        report = FailureReport(**left)
                        if report.step >= self.step - 1:  # an older one was about something that is over
                            found[rank] = report
                if until_cause and not all(report.waited for report in found.values()):
                    return
                if time.monotonic() >= end:
                    return
                time.sleep(0.02)

    def _write(self, about: str, value: Any) -> None:
        """Leave `value` (JSON data) for the other ranks, with the time by this one's clock; raise nothing."""
        store = self._store()
        if store is not None:
            with contextlib.suppress(Exception):  # the error that is being raised, perhaps, matters more
                store.set(self.key_of(about), json.dumps([time.time(), value]))

    def _value_of(self, store: Store, about: str) -> Any:
        """Return what was left about this, None if nothing; while the run has no name, since this process began."""
        return self._of_this_run(store.get(self.key_of(about))) if store.check([self.key_of(about)]) else None

    def _of_this_run(self, left: str | bytes) -> Any:
        at, value = json.loads(left)
        return value if self.company.run or at >= _began else None

    def key_of(self, about: str) -> str:
        """Return where this wrapper's ranks leave something in the group's store."""
        return f"ddp_impl/{self.company.run}/{self._name}/{about}"

    def _store(self) -> Store | None:
        try:
            return self.group.get_group_store()
        except (RuntimeError, AttributeError):  # made without one; or this rank is not in the group
            return None


class _InStep:
    """Keeps ranks' collectives in step: behind a block that raised, each further one raises `CommunicationError`."""

    def __init__(self, peers: Peers, phase: str, what: Description, *, with_reports: bool) -> None:
        self._peers, self._phase, self._what, self._with_reports = peers, phase, what, with_reports

    def __enter__(self) -> None:
        peers = self._peers
        if peers.lost or peers.company.has_failed:
            peers.refuse_lost(self._phase, self._what, with_reports=self._with_reports)
        if size_of(peers.group) > 1:
            peers.wait = (time.monotonic(), self._phase, self._what)  # set first, see `SlowWaits`
            if slow_waits.watcher is None:
                slow_waits.start()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._peers.wait = None
        if error is not None:
            self._peers.failed(self._phase, self._what, error, with_reports=self._with_reports)


class _Company:
    """The wrappers of one group. `has_failed`: a collective or a backward of one of them has, and is not past.

    `run`: the name of this run on all ranks, once the first wrapper has compared its replicas; empty before.
    """

    def __init__(self) -> None:
        self.wrappers: weakref.WeakKeyDictionary[Peers, None] = weakref.WeakKeyDictionary()
        self.has_failed = False
        self.run = ""
        self._counts: Counter[str] = Counter()

    @staticmethod
    def of(group: dist.ProcessGroup) -> _Company:
        """Return that of `group`; of no group, to which this rank does not belong, one that nobody shares."""
        return _companies.setdefault(group, _Company()) if isinstance(group, dist.ProcessGroup) else _Company()

    def living(self) -> list[Peers]:
        """Return the wrappers, also in a thread while another one builds some."""
        return [peers for reference in self.wrappers.keyrefs() if (peers := reference()) is not None]

    def count(self, copy_of: str = "") -> int:
        """Return how many wrappers, or copies of one, the group had before this one."""
        self._counts[copy_of] += 1
        return self._counts[copy_of] - 1


class SlowWaits:
    """Watches the waits of `Peers`: each sets its attribute first, and then starts the `watcher` if there is none."""

    def __init__(self, slow_s: float = SLOW_S) -> None:
        self.watcher: threading.Thread | None = None
        self._slow_s = slow_s
        self._num_served = 0
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_watcher)  # threads do not live on in a fork

    def serve(self, wrapper: object) -> None:
        """Keep the watcher for as long as `wrapper` lives, or another that is served."""
        self._num_served += 1
        weakref.finalize(wrapper, self._leave).atexit = False

    def start(self) -> None:
        """Start the watcher unless there is one."""
        with self._lock:
            if self.watcher is None:
                self._is_over.clear()
                self.watcher = threading.Thread(target=self._watch, name="ddp_impl slow waits", daemon=True)
                self.watcher.start()

    def _leave(self) -> None:
        self._num_served -= 1
        watcher = self.watcher
        if self._num_served == 0 and watcher is not None:
            self._is_over.set()
            if watcher is not threading.current_thread():
                watcher.join(_ENDS_WITHIN_S)

    def _forget_watcher(self) -> None:
        self.watcher, self._lock, self._is_over = None, threading.Lock(), threading.Event()

    def _watch(self) -> None:
        logged: list[tuple[Peers, Wait]] = []
        idle_before = False
        while not self._is_over.wait(_PERIOD_S):
            is_idle = not self._look(logged)
            if is_idle and idle_before:
                self.watcher = None
                # Who began to wait before this line saw a watcher there; who does later starts one.
                if any(waiter.wait for waiter in all_peers()):
                    self.start()
                return
            idle_before = is_idle
        self.watcher = None

    def _look(self, logged: list[tuple[Peers, Wait]]) -> bool:
        """Return whether a wrapper waits; this frame, and not the thread's, holds what it waits for, a bucket."""
        now = time.monotonic()
        waiting = [(waiter, wait) for waiter in all_peers() if (wait := waiter.wait) is not None]
        logged[:] = [each for each in waiting if each in logged]
        for waiter, wait in waiting:
            waiter.answer(wait, now - wait[0])
            if (waiter, wait) not in logged and now - wait[0] >= self._slow_s:
                logged.append((waiter, wait))
                waiter.log_slow_wait(wait, now - wait[0])
        return bool(waiting)


_companies: weakref.WeakKeyDictionary[dist.ProcessGroup, _Company] = weakref.WeakKeyDictionary()
slow_waits = SlowWaits()


def _process_began() -> float:
    """Return when this process began, as `time.time` counts: it may import this long after others have wrapped.

    A process that has replaced itself by `exec` takes what it left before for this run's.
    """
    with contextlib.suppress(OSError, AttributeError, IndexError, ValueError):  # no Linux
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return time.time()


#: What a store holds from before was left by an earlier run.
_began = _process_began()


def all_peers() -> list[Peers]:
    """Return the peers of every wrapper of this process, also in a thread while another one builds wrappers."""
    groups = [group for reference in _companies.keyrefs() if (group := reference()) is not None]
    return [peers for group in groups for peers in _companies[group].living()]


def _begin_as_a_fork() -> None:
    global _began
    _began = _process_began()


os.register_at_fork(after_in_child=_begin_as_a_fork)


def _await(store: Store, keys: list[str], timeout: timedelta) -> None:
    with contextlib.suppress(RuntimeError):  # one written in Python has no copies
        store = store.clone()  # type: ignore[attr-defined]  # waiting, it serves nobody else
    store.wait(keys, timeout)


def _in_words(what: Description) -> str:
    return what if isinstance(what, str) else what()


@atexit.register
def _publish_fatal_error() -> None:
    """Publish the exception that ends this process, wherever it was raised: before connections are closed."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        for peers in all_peers():
            peers.ended_by(error)
