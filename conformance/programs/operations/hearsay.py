"""What ranks tell each other through the default group's store, whatever state its backend is in.

Who waits for another rank does not count what the machine kept that one waiting for a processor.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from conformance.waiting.kept_waiting import seconds_of

#: So long a rank waits for what the others say of the same thing: longer than one of them may poll in vain before it.
_PATIENCE = timedelta(seconds=8)
#: So long nobody asks whether a processor was free: most have said by then what others wait for.
_AT_ONCE = timedelta(seconds=0.5)
_PAUSE_S = 0.0005
_said: Counter[str] = Counter()


def introduce() -> None:
    """Let the others know which process this rank is, so that they can see what keeps it waiting."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process/{store.add('processes', 1)}", f"{os.getpid()} {os.uname().nodename}")


def _wait_for(keys: Sequence[str], patience: timedelta) -> bool:
    """Whether somebody has said all that these keys are for, soon enough."""
    store = dist.distributed_c10d._get_default_store()
    at_once = min(patience, _AT_ONCE)
    # The store's own wait in vain takes a whole second, whatever it is given.
    if any(store.check(list(keys)) for _ in seconds_of((), at_once.total_seconds(), pause_s=_PAUSE_S)):
        return True
    rest_s = (patience - at_once).total_seconds()
    return any(store.check(list(keys)) for _ in seconds_of(_processes(), rest_s, pause_s=_PAUSE_S))


def _processes() -> set[int]:
    """Return which processes of this machine have introduced themselves, less this one, which does nothing but wait."""
    store = dist.distributed_c10d._get_default_store()
    told = [store.get(f"process/{number}").decode().split() for number in range(1, store.add("processes", 0) + 1)]
    return {int(pid) for pid, host in told if host == os.uname().nodename} - {os.getpid()}


def _once(what: str) -> str:
    """Return a key that nobody has had: in the same process the next time for the same, it is another one."""
    _said[what] += 1
    return f"{what}/{_said[what]}"


def all_say(what: str, rank: int, members: Sequence[int]) -> bool:
    """Say `what`, and return whether all `members` have said so soon after.

    A rank that does not call it says nothing. Members must have said the same equally often before.
    """
    store = dist.distributed_c10d._get_default_store()
    key = _once(f"said/{what}/{list(members)}")
    store.set(f"{key}/{rank}", "")
    return _wait_for([f"{key}/{member}" for member in members], _PATIENCE)


def told(what: str, said: str, rank: int, members: Sequence[int]) -> list[str]:
    """Say something about `what`, and return what each of the `members` says about it. All of them must call it."""
    store = dist.distributed_c10d._get_default_store()
    key = _once(f"told/{what}/{list(members)}")
    store.set(f"{key}/{rank}", said)
    return [store.get(f"{key}/{member}").decode() for member in members]


class Board:
    """Notes that ranks leave each other under one heading, which all of them must have used equally often before."""

    def __init__(self, heading: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._heading = _once(f"board/{heading}")

    def put(self, note: str) -> None:
        """Leave a note."""
        self._store.set(f"{self._heading}/{note}", "")

    def tell(self, note: str, said: str) -> None:
        """Leave a note with a text."""
        self._store.set(f"{self._heading}/{note}", said)

    def read(self, note: str) -> str:
        """Return the text of a note that somebody has left."""
        return str(self._store.get(f"{self._heading}/{note}").decode())

    def has(self, note: str) -> bool:
        """Whether somebody has left this note."""
        return bool(self._store.check([f"{self._heading}/{note}"]))

    def lacking(self, notes: Sequence[str], patience: timedelta) -> list[str]:
        """Wait for all of `notes`; return those that are still missing after `patience`."""
        is_complete = _wait_for([f"{self._heading}/{note}" for note in notes], patience)
        return [] if is_complete else [note for note in notes if not self.has(note)]
