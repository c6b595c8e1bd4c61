"""`LocalBackward`: the backward of forwards under `no_sync`, where the reducer awaits a synchronised one, too."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from ddp_impl.autograd import backwards
from ddp_impl.autograd.threads import BackwardEnds
from ddp_impl.reducer.parameter_usage import ParameterUsage
from ddp_impl.reducer.reducer_state import Phase, ReducerState
from ddp_impl.torch_internals.autograd import WhenBackwardEnds, in_compiled_backward


class Awaiting(backwards.Participant, Protocol):
    """The reducer that awaits the synchronised one."""

    state: ReducerState
    usage: ParameterUsage

    def check_finished(self) -> None:
        """Raise when the last reduction is not complete."""

    def refuse_compiled_backward(self) -> None:
        """Raise when nobody would hear of the end of the backward that runs now."""


class LocalBackward:
    """Keeps the gradients of a backward that is not to be averaged apart from those that the reducer awaits.

    `came`: the parameters whose gradients such a backward has brought; None while none runs. `is_reached`: one that has
    come to an output runs, or one within it; known where other wrappers share a parameter, and ask. `num_triggers`: how
    often the user has asked for a reduction by hand, after a forward under `no_sync`. `is_orphan`: the wrapper is gone.
    """

    def __init__(self, reducer: Awaiting, ends: BackwardEnds, shared: Callable[[], Collection[int]]) -> None:
        """Keep nothing yet; `ends` is told when such a backward is over. `shared` tells what others have, too."""
        self.came: list[int] | None = None
        self.is_reached = False
        self.num_triggers = 0
        self.is_orphan = False
        self._reducer = reducer
        self._ends = ends
        self._shared = shared

    def begin(self, num_triggers: int) -> None:
        """Take the report that a backward has come to an output of a forward under `no_sync`.

        While nothing is expected, gradients are local anyway; once a synchronised backward runs, this is a part of it.
        So is one that was triggered by hand after its forward, when there were `num_triggers`.
        """
        if num_triggers != self.num_triggers:
            return
        state = self._reducer.state
        if state.phase is Phase.INCOMPLETE or (state.num_launched and state.phase is Phase.BROKEN):
            self._reducer.check_finished()  # gradients may live in buckets that are in flight
        if state.phase in (Phase.ARMED, Phase.PROBED):
            self._begin()
        if self._shared() and not self.is_reached and not in_compiled_backward():
            self.is_reached = True
            WhenBackwardEnds(self._leave, lambda *_: self._leave())

    def _begin(self) -> list[int]:
        if self.came is None:
            self._reducer.refuse_compiled_backward()
            self.came = []
            self._ends.call(self._is_over, lambda *_: self._is_over())
        return self.came

    def is_anothers(self, index: int) -> bool:
        """Whether the gradient of a parameter is another wrapper's, which has the parameter, too.

        This one awaits a backward, and the one that runs now has come to an output of another, but to none of this one.
        Where it comes to one later, it averages everything (`give_up`). Once the wrapper is gone, a backward is the
        user's own unless it has come to an output that is left.
        """
        awaits = self._reducer.state.phase in (Phase.ARMED, Phase.PROBED)
        return awaits and (self.is_orphan or (index in self._shared() and backwards.is_anothers(self._reducer)))

    def take(self, index: int) -> None:
        """Keep the gradient of a parameter local: it has come in such a backward, which begins now if none runs."""
        self._begin().append(index)

    def give_up(self) -> list[int]:
        """Return what has come: a synchronised backward runs through both, and averages everything."""
        came, self.came = self.came or [], None
        return came

    def _leave(self) -> None:
        self.is_reached = False

    def _is_over(self) -> None:
        self._reducer.usage.used_locally.update(self.came or ())
        self.came = None
