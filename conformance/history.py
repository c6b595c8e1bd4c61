"""`Collective`: one collective as a rank issued it; a rank's history is a tuple of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: Operations between two ranks: the other ranks of the group do not take part.
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a rank issued.

    `index` counts the rank's collectives in this group from 0; `op` is torch's name (`all_reduce`, `broadcast`, ...);
    `shapes` and `dtypes` describe the tensors passed in; `reduce_op` is `sum`, `avg`, ... or empty; `root` is the root
    rank or -1; `phase` is what the program was doing (`construct`, `forward`, `backward`, ...); `step` counts the
    program's steps (-1 before the first); `sync` tells whether the program was outside `no_sync`; `finished` whether
    the subject or the program waited for it and it completed; `members` are the group's ranks, empty if unknown.
    """

    index: int
    op: str
    group: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    reduce_op: str = ""
    root: int = -1
    phase: str = ""
    step: int = -1
    sync: bool = True
    finished: bool = True
    started_ns: int = 0
    duration_ns: int = 0
    members: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements passed in, over all tensors."""
        total = 0
        for shape in self.shapes:
            product = 1
            for extent in shape:
                product *= extent
            total += product
        return total

    @property
    def signature(self) -> tuple[object, ...]:
        """What ranks must agree in for their collectives to match."""
        return (self.op, self.group, self.numel, self.dtypes, self.reduce_op, self.root)

    def describe(self) -> str:
        """Return e.g. `all_reduce #7 (4096 x float32, sum)`."""
        dtypes = "/".join(dict.fromkeys(self.dtypes)) or "no tensor"
        reduce_op = f", {self.reduce_op}" if self.reduce_op else ""
        return f"{self.op} #{self.index} ({self.numel} x {dtypes}{reduce_op})"


@dataclass(frozen=True, slots=True)
class Carried:
    """What one collective carried on a rank, in short: the first values it was `given`, and those that it `left`.

    `left` is empty while it has not finished. `issued_at` is the innermost line of Python code that is not torch's:
    that of the DDP, or of the program where the DDP is written in C++.
    """

    issued_at: str
    given: str
    left: str = ""


def by_member(histories: Mapping[int, Iterable[Collective]], group: str) -> dict[int, dict[int, Collective]]:
    """Return for every rank of `group` the collectives that it issued there, by index; point-to-point ones left out.

    A rank belongs to a group if it issued anything there, or if a collective of another rank names it as a member. All
    ranks belong to the default group.
    """
    issued = {rank: [one for one in history if one.group == group] for rank, history in histories.items()}
    named = {rank for history in issued.values() for one in history for rank in one.members}
    return {
        rank: {one.index: one for one in history if one.op not in _POINT_TO_POINT}
        for rank, history in issued.items()
        if history or rank in named or group == "default"
    }
