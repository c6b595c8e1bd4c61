"""`Backwards`: what the wrappers of a rank do when a backward is over."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.autograd import Variable


class Ending(Protocol):
    """A wrapper, as the end of a backward concerns it."""

    @property
    def takes_part(self) -> bool:
        """Whether the backward that is over is one of this wrapper's."""

    def bring_gradients(self) -> Any:
        """Bring what this rank has."""

    def take_means(self, meeting: Any) -> None:
        """Take what all ranks' make."""

    def forget_backward(self) -> None:
        """Forget what was noticed of the last backward."""


class Backwards:
    """One rank's backwards: what its wrappers do when one is over. Wrappers of a rank share it.

    All wrappers bring their gradients before any of them hands out a mean, each what the backward has left: two that
    share a parameter both take the rank's own gradient. They do it in the order in which they were built, whatever the
    order in which their gradients came, which is another on every rank (pytorch/pytorch#72843).
    """

    def __init__(self) -> None:
        self._built: list[weakref.ref[Ending]] = []
        self._is_noticed = False

    def add(self, wrapper: Ending) -> None:
        """Add a wrapper, which lives as long as somebody else holds it, or a parameter of its."""
        self._built.append(weakref.ref(wrapper))

    def remove(self, wrapper: Ending) -> None:
        """Let a wrapper take part in none."""
        self._built.remove(weakref.ref(wrapper))

    @property
    def _wrappers(self) -> list[Ending]:
        return [wrapper for each in self._built if (wrapper := each()) is not None]

    def forget(self) -> None:
        """Begin anew: no backward runs, so one that was noticed and has not ended has raised."""
        self._is_noticed = False
        for wrapper in self._wrappers:
            wrapper.forget_backward()

    def reached(self) -> None:
        """Take part at the end of the backward that runs now."""
        if not self._is_noticed:
            self._is_noticed = True
            Variable._execution_engine.queue_callback(self._is_over)

    def _is_over(self) -> None:
        self._is_noticed = False
        ending = [wrapper for wrapper in self._wrappers if wrapper.takes_part]
        meetings = [wrapper.bring_gradients() for wrapper in ending]
        for wrapper in self._wrappers:
            wrapper.forget_backward()
        for wrapper, meeting in zip(ending, meetings, strict=True):
            wrapper.take_means(meeting)
