"""Which gradients an iteration awaits, which of them arrived, how often and in which order; no torch in it.

One array, `due`, holds the truth: how many gradients a parameter still has to bring. When an entry
becomes zero, the parameter is done and its bucket counts down, so none is counted twice. The hook of a parameter, the
reducer's hot path, does that itself where an entry is 1 (`hooks`), and reports everything else. Entries are negative
as long as the reducer wants every gradient reported: until the first of a backward, and in an iteration to learn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final


class Arrivals:
    """Counts the gradients of one iteration, per parameter and per bucket; hooks hold on to the first three lists.

    `due[i]`: how many gradients parameter i still has to bring, negated while the hook must report them.
    `bucket_of[i]`: the index of its bucket. `pending[b]`: how many parameters of bucket b are due. `order`: parameters
    in the order of their first gradients, in the last iteration to learn from; `ready_ns`: when, in the backward.
    `learnt[i]`: how many gradients i brings in every iteration of a static graph. `num_to_learn_from`: iterations left
    until buckets can be planned; `learns`: this is one, and reports every gradient.
    """

    def __init__(self, num_parameters: int) -> None:
        self.due: Final = [0] * num_parameters
        self.bucket_of: Final = [0] * num_parameters
        self.pending: Final[list[int]] = []
        self.order: Final[list[int]] = []
        self.ready_ns: Final[list[int]] = []
        self.learnt: tuple[int, ...] | None = None
        self.num_to_learn_from = 0
        self.learns = False
        self._times_arrived: Final = [0] * num_parameters  # in an iteration that is learnt from
        self._num_arrived = 0
        self._may_repeat = False
        self._due_when_armed: Final = [0] * num_parameters
        self._pending_when_armed: Final[list[int]] = []

    def forget(self, num_to_learn_from: int) -> None:
        """Expect nothing, and learn the order from the next `num_to_learn_from` iterations."""
        self.disarm()
        self.order.clear()
        self.ready_ns.clear()
        self.learnt = None
        self.num_to_learn_from = num_to_learn_from
        self.learns = num_to_learn_from > 0

    def regroup(self, bucket_of: Sequence[int], num_buckets: int) -> None:
        """Count by these buckets from now on."""
        self.disarm()
        self.bucket_of[:] = bucket_of
        self.pending[:] = [0] * num_buckets
        self._plan_iterations()

    def arm(self, *, static: bool) -> None:
        """Expect one gradient of every parameter, or with a learnt static graph as many as it brings."""
        self._may_repeat = static
        self.due[:] = self._due_when_armed
        self.pending[:] = self._pending_when_armed
        if self.learns:
            self._times_arrived[:] = [0] * len(self.due)
            self._num_arrived = 0

    def take(self, index: int, ready_ns: int = 0) -> bool:
        """Count a gradient reported `ready_ns` after the backward began; return whether its bucket is full now."""
        due = self.due
        if self.learns:
            self._remember(index, ready_ns)
            if self._may_repeat:
                return False  # `conclude` will know how often it arrived
        elif due[index] < 0:
            due[:] = map(abs, due)
        left = due[index]
        if abs(left) > 1:
            due[index] = left - 1
            return False
        if left == 0:
            return False
        due[index] = 0
        bucket = self.bucket_of[index]
        self.pending[bucket] -= 1
        return self.pending[bucket] == 0

    def exclude(self, absent: Iterable[int]) -> list[int]:
        """Await nothing of the parameters `absent`; return the full buckets, also those without any use."""
        full = {self.bucket_of[index] for index in absent if self._await_no_more(index)}
        full.update(bucket for bucket, size in enumerate(self._pending_when_armed) if size == 0)
        return sorted(full)

    def conclude(self) -> list[int]:
        """Await nothing any more; return the parameters without a gradient. A static graph learns its counts here."""
        if self._may_repeat and self.learns:
            self.learnt, self.learns = tuple(self._times_arrived), False
            self._plan_iterations()
            absent = [index for index, times in enumerate(self.learnt) if times == 0]
        else:
            absent = [index for index in self.missing if not self.arrived_in_part(index)]
        self.disarm()
        return absent

    def report_next(self) -> None:
        """Have the hooks report the next gradient: a backward has ended, and another one will bring what is missing."""
        self.due[:] = [-abs(left) for left in self.due]

    def end_iteration(self) -> None:
        """Expect nothing until the next one."""
        self.due[:] = [0] * len(self.due)
        self.pending[:] = [0] * len(self.pending)
        if self.num_to_learn_from:
            self.num_to_learn_from -= 1
            self.learns = self.num_to_learn_from > 0 and self.learnt is None

    def disarm(self) -> None:
        """Expect nothing: gradients that arrive are local."""
        self.due[:] = [0] * len(self.due)
        self.pending[:] = [0] * len(self.pending)

    @property
    def missing(self) -> list[int]:
        """The parameters that have brought no gradient, or fewer than a static graph has learnt."""
        arrived = self._times_arrived if self.learns else [0] * len(self.due)
        return [index for index, left in enumerate(self.due) if left and not arrived[index]]

    def arrived_in_part(self, index: int) -> bool:
        """Whether a parameter has brought some gradients, but fewer than a static graph has learnt."""
        return 0 < abs(self.due[index]) < abs(self._due_when_armed[index])

    @property
    def never_used(self) -> list[int]:
        """The parameters of which a static graph has learnt that they get no gradient."""
        return [index for index, times in enumerate(self.learnt or ()) if times == 0]

    def _await_no_more(self, index: int) -> bool:
        """Await nothing more of a parameter; return whether this made its bucket full. The hook does the same."""
        if self.due[index] == 0:
            return False
        self.due[index] = 0
        bucket = self.bucket_of[index]
        self.pending[bucket] -= 1
        return self.pending[bucket] == 0

    def _remember(self, index: int, ready_ns: int) -> None:
        if self._num_arrived == 0:
            self.order.clear()
            self.ready_ns.clear()
        self._num_arrived += 1
        if not self._times_arrived[index]:
            self.order.append(index)
            self.ready_ns.append(ready_ns)
        self._times_arrived[index] += 1

    def _plan_iterations(self) -> None:
        self._due_when_armed[:] = [-times for times in self.learnt or [1] * len(self.due)]
        self._pending_when_armed[:] = [0] * len(self.pending)
        for index, left in enumerate(self._due_when_armed):
            self._pending_when_armed[self.bucket_of[index]] += left != 0
