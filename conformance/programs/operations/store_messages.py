"""Messages between ranks through the default group's store, which works whatever state the backend is in.

A wait for another rank does not count the time in which that rank waited for a processor.
"""

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from conformance.waiting.kept_waiting import seconds_of

#: How long a rank waits for the messages of the others: longer than a rank may poll in vain before its message.
_PATIENCE = timedelta(seconds=8)
#: The first part of a wait, which counts all time: most messages arrive within it.
_AT_ONCE = timedelta(seconds=0.5)
_PAUSE_S = 0.0005
_num_published: Counter[str] = Counter()


def introduce() -> None:
    """Publish this rank's process, so that the others can see its waits for a processor."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process/{store.add('processes', 1)}", f"{os.getpid()} {os.uname().nodename}")


def _wait_for(keys: Sequence[str], patience: timedelta) -> bool:
    """Whether the store has all keys within `patience`."""
    store = dist.distributed_c10d._get_default_store()
    at_once = min(patience, _AT_ONCE)
    # The store's own wait takes at least a second if it fails.
    if any(store.check(list(keys)) for _ in seconds_of((), at_once.total_seconds(), pause_s=_PAUSE_S)):
        return True
    rest_s = (patience - at_once).total_seconds()
    return any(store.check(list(keys)) for _ in seconds_of(_processes(), rest_s, pause_s=_PAUSE_S))


def _processes() -> set[int]:
    """Return the published processes of this machine, without this one."""
    store = dist.distributed_c10d._get_default_store()
    told = [store.get(f"process/{number}").decode().split() for number in range(1, store.add("processes", 0) + 1)]
    return {int(pid) for pid, host in told if host == os.uname().nodename} - {os.getpid()}


def _once(what: str) -> str:
    """Return a new key: each call for the same `what` returns another one, in the same order on all ranks."""
    _num_published[what] += 1
    return f"{what}/{_num_published[what]}"


def all_publish(what: str, rank: int, members: Sequence[int]) -> bool:
    """Publish `what`, and return whether all `members` publish it soon after.

    Members must have published the same equally often before.
    """
    store = dist.distributed_c10d._get_default_store()
    key = _once(f"said/{what}/{list(members)}")
    store.set(f"{key}/{rank}", "")
    return _wait_for([f"{key}/{member}" for member in members], _PATIENCE)


def all_texts(what: str, said: str, rank: int, members: Sequence[int]) -> list[str]:
    """Publish the text `said` about `what`, and return the text of each of `members`. All of them must call it."""
    store = dist.distributed_c10d._get_default_store()
    key = _once(f"told/{what}/{list(members)}")
    store.set(f"{key}/{rank}", said)
    return [store.get(f"{key}/{member}").decode() for member in members]


class Board:
    """Notes of ranks to each other under one heading, which all of them must have used equally often before."""

    def __init__(self, heading: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._heading = _once(f"board/{heading}")

    def put(self, note: str, text: str = "") -> None:
        """Leave a note, with a text."""
        self._store.set(f"{self._heading}/{note}", text)

    def read(self, note: str) -> str:
        """Return the text of a note; waits for it."""
        return str(self._store.get(f"{self._heading}/{note}").decode())

    def has(self, note: str) -> bool:
        """Whether a rank has left this note."""
        return bool(self._store.check([f"{self._heading}/{note}"]))

    def lacking(self, notes: Sequence[str], patience: timedelta) -> list[str]:
        """Wait for all of `notes`; return the notes that are still missing after `patience`."""
        is_complete = _wait_for([f"{self._heading}/{note}" for note in notes], patience)
        return [] if is_complete else [note for note in notes if not self.has(note)]
