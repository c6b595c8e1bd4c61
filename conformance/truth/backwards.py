"""`Backwards`: what the wrappers of a rank do when a backward is over."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.autograd import Variable


class Ending(Protocol):
    """What a wrapper does at the end of a backward. `is_local`: it came to an output of a forward within `no_sync`."""

    is_local: bool

    def another_is_local(self) -> None:
        """Take note that it came to one of another wrapper's."""

    @property
    def takes_part(self) -> bool:
        """Whether the backward that is over is one of this wrapper's."""

    def bring_gradients(self) -> Any:
        """Bring this rank's gradients; what this returns is for `take_means`."""

    def take_means(self, meeting: Any) -> None:
        """Take the means; `meeting` is what `bring_gradients` returned."""

    def forget_backward(self) -> None:
        """Forget what was noticed of the last backward."""


class Backwards:
    """Notices that a backward of this rank is over, and tells the rank's wrappers, which share it.

    All wrappers bring their gradients before any of them takes a mean: two that share a parameter both bring the rank's
    own gradient. They do it in the order in which they were built, because the order in which gradients come may differ
    between ranks (pytorch/pytorch#72843).
    """

    def __init__(self) -> None:
        self._built: list[weakref.ref[Ending]] = []
        self._is_noticed = False

    def add(self, wrapper: Ending) -> None:
        """Add a wrapper; this does not keep it alive."""
        self._built.append(weakref.ref(wrapper))

    def remove(self, wrapper: Ending) -> None:
        """Let a wrapper take part in no backward from now on."""
        self._built.remove(weakref.ref(wrapper))

    @property
    def _wrappers(self) -> list[Ending]:
        return [wrapper for each in self._built if (wrapper := each()) is not None]

    def forget(self) -> None:
        """Forget a backward that was noticed and has not ended: it has raised. To be called when none runs."""
        self._is_noticed = False
        for wrapper in self._wrappers:
            wrapper.forget_backward()

    def reached(self) -> None:
        """Note that the backward that runs now concerns a wrapper, so that its end is noticed."""
        if not self._is_noticed:
            self._is_noticed = True
            Variable._execution_engine.queue_callback(self._is_over)

    def _is_over(self) -> None:
        self._is_noticed = False
        if any(wrapper.is_local for wrapper in self._wrappers):
            for wrapper in self._wrappers:
                wrapper.another_is_local()
        ending = [wrapper for wrapper in self._wrappers if wrapper.takes_part]
        meetings = [wrapper.bring_gradients() for wrapper in ending]
        for wrapper in self._wrappers:
            wrapper.forget_backward()
        for wrapper, meeting in zip(ending, meetings, strict=True):
            wrapper.take_means(meeting)
