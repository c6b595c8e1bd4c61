"""`FinishCheck`: whether every rank has finished its last backward, so that something else may follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddp_impl.autograd.threads import BackwardEnds
from ddp_impl.base import messages
from ddp_impl.reducer.absences import Absences
from ddp_impl.reducer.iteration import Backward
from ddp_impl.reducer.reducer_parts import ReducerParts
from ddp_impl.reducer.reducer_state import Phase
from ddp_impl.reducer.reduction import BucketReduction
from ddp_impl.wire.peers import in_lines


class FinishCheck:
    """Finds out that a backward has begun here, or on another rank, and that its reduction will not be complete.

    `raised_early`: this rank's last backward raised before its first gradient came. Another's may have raised after it:
    only that one cannot go on, and this one would wait for it.
    """

    def __init__(
        self,
        parts: ReducerParts,
        reduction: BucketReduction,
        absences: Absences,
        ends: BackwardEnds,
        refused: Callable[[], None],
    ) -> None:
        """Call `refused` where a rank has refused what the others took for averages."""
        self.raised_early = False
        self._parts = parts
        self._reduction = reduction
        self._absences = absences
        self._ends = ends
        self._refused = refused

    @contextmanager
    def between_backwards(self, backward: Backward, what: str) -> Iterator[None]:
        """Let the block wait for `what` of other ranks; all communication outside of backward goes here.

        Raises `ReductionError` where the last `backward` is not finished: ranks that wait for it would meet the block's
        collectives instead.
        """
        self.check(backward)
        with self._reduction.peers.awaiting("forward", what):
            yield

    def check(self, backward: Backward) -> None:
        """Raise `ReductionError` unless the last `backward` is finished; it names parameters that are missing."""
        self._ends.wait()
        parts, peers = self._parts, self._reduction.peers
        if lost := peers.lost or peers.lost_by_another():
            raise parts.error(lost)
        phase, rank = parts.state.phase, parts.state.rank
        if parts.state.is_unfinished:
            if phase is not Phase.INCOMPLETE:
                raise parts.error(messages.aborted(rank))
            backward.told_missing = True
            raise self._absences.some_missing()
        if phase in (Phase.IDLE, Phase.ARMED) and parts.usage.refused_before():
            self._refused()
            raise parts.error(messages.others_refused_before(rank) + peers.exchange(messages.FOLLOWS))
        if self.raised_early:
            words = [word for word in peers.words() or () if word.unfinished]
            self.raised_early = bool(words)
            if words:
                raise parts.error(messages.aborted(rank) + in_lines(words))
