"""What ranks tell each other through the default group's store, whatever state its backend is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

#: So long a rank waits for what the others say of the same thing: longer than one of them may poll in vain before it.
_PATIENCE = timedelta(seconds=8)
_said: Counter[str] = Counter()


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
    try:
        store.wait([f"{key}/{member}" for member in members], _PATIENCE)
    except RuntimeError:
        return False
    return True


def told(what: str, said: str, rank: int, members: Sequence[int]) -> list[str]:
    """Say something about `what`, and return what each of the `members` says about it. All of them must call it."""
    store = dist.distributed_c10d._get_default_store()
    key = _once(f"told/{what}/{list(members)}")
    store.set(f"{key}/{rank}", said)
    return [store.get(f"{key}/{member}").decode() for member in members]


class Board:
    """Notes that ranks leave each other under one heading, which all of them must have used equally often before."""

    def __init__(self, heading: str) -> None:
        """Begin an empty board; nobody waits."""
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
        try:
            self._store.wait([f"{self._heading}/{note}" for note in notes], patience)
        except RuntimeError:
            return [note for note in notes if not self.has(note)]
        return []
