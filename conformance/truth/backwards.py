"""`Noticed`: what a wrapper notices of a backward; `Backwards`: what a rank's wrappers do when one is over."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import Variable


@dataclass
class Noticed:
    """What a wrapper has noticed of one backward: the parameters to which it brought a gradient, and where it came.

    It came to an output of a `synchronised` forward, to one of a `local` forward, under `no_sync`. It may bring nothing
    and be the wrapper's all the same: an output of a synchronised forward that used no parameter.
    """

    brought: set[Tensor] = field(default_factory=set)
    synchronised: bool = False
    local: bool = False
    may_bring_nothing: bool = False

    def came_to_output(self, *, synchronised: bool, used_a_parameter: bool) -> None:
        """Note that it came to an output of the wrapper's."""
        self.synchronised |= synchronised
        self.local |= not synchronised
        self.may_bring_nothing |= synchronised and not used_a_parameter

    @property
    def is_reached(self) -> bool:
        """Whether it came to an output of the wrapper's, of whatever forward."""
        return self.synchronised or self.local or self.may_bring_nothing


class Ending(Protocol):
    """What a wrapper does at the end of a backward."""

    noticed: Noticed

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return those of the module."""

    @property
    def takes_part(self) -> bool:
        """Whether the backward that is over is one of this wrapper's."""

    def bring_gradients(self) -> Any:
        """Bring this rank's gradients; what this returns is for `take_means`."""

    def take_means(self, meeting: Any) -> None:
        """Take the means; `meeting` is what `bring_gradients` returned."""


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
        """Forget the backward that was noticed: it is over, or has raised. To be called when none runs."""
        self._is_noticed = False
        for wrapper in self._wrappers:
            wrapper.noticed = Noticed()

    def reached(self) -> None:
        """Note that the backward that runs now concerns a wrapper, so that its end is noticed."""
        if not self._is_noticed:
            self._is_noticed = True
            Variable._execution_engine.queue_callback(self._is_over)

    def _is_over(self) -> None:
        reached = {parameter for one in self._wrappers if one.noticed.is_reached for parameter in one.parameters()}
        for wrapper in self._wrappers:
            if not wrapper.noticed.is_reached:
                wrapper.noticed.brought -= reached  # they are of one that was reached
        ending = [wrapper for wrapper in self._wrappers if wrapper.takes_part]
        meetings = [wrapper.bring_gradients() for wrapper in ending]
        self.forget()
        for wrapper, meeting in zip(ending, meetings, strict=True):
            wrapper.take_means(meeting)
