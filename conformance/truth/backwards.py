"""`Backwards`: what the wrappers of a rank do when a backward is over."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from torch import nn
from torch.autograd import Variable


class Ending(Protocol):
    """What a wrapper does at the end of a backward."""

    @property
    def is_reached(self) -> bool:
        """Whether the backward came to an output of this wrapper's, of whatever forward."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return those of the module."""

    def leave(self, parameters: Collection[nn.Parameter]) -> None:
        """Take the gradients of these for another wrapper's, as long as the backward came to no output of this one."""

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
        reached = {parameter for one in self._wrappers if one.is_reached for parameter in one.parameters()}
        for wrapper in self._wrappers:
            if not wrapper.is_reached:
                wrapper.leave(reached)
        ending = [wrapper for wrapper in self._wrappers if wrapper.takes_part]
        meetings = [wrapper.bring_gradients() for wrapper in ending]
        for wrapper in self._wrappers:
            wrapper.forget_backward()
        for wrapper, meeting in zip(ending, meetings, strict=True):
            wrapper.take_means(meeting)
