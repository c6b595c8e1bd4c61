"""`Noticed`: the traces of one backward in a wrapper; `Backwards`: ends a backward for all wrappers of a rank."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import Variable


@dataclass
class Noticed:
    """What a wrapper has noticed of one backward: parameters with a new gradient, and the outputs that it reached.

    It reached an output of a `synchronised` forward or of a `local` one, under `no_sync`. With `may_bring_nothing` it
    reached an output of a synchronised forward that used no parameter.
    """

    brought: set[Tensor] = field(default_factory=set)
    synchronised: bool = False
    local: bool = False
    may_bring_nothing: bool = False

    def reached_output(self, *, synchronised: bool, used_a_parameter: bool) -> None:
        """Note that the backward reached an output of the wrapper."""
        self.synchronised |= synchronised
        self.local |= not synchronised
        self.may_bring_nothing |= synchronised and not used_a_parameter

    @property
    def is_reached(self) -> bool:
        """Whether it reached any output of the wrapper."""
        return self.synchronised or self.local or self.may_bring_nothing


class Ending(Protocol):
    """A wrapper at the end of a backward."""

    noticed: Noticed

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the module's parameters."""

    @property
    def takes_part(self) -> bool:
        """Whether the backward belongs to this wrapper."""

    def bring_gradients(self) -> Any:
        """Bring this rank's gradients to a meeting, and return it."""

    def take_means(self, meeting: Any) -> None:
        """Take the means from the meeting."""


class Backwards:
    """Notices the end of a backward of this rank, for all wrappers of the rank.

    All wrappers bring their gradients before any of them takes a mean: two wrappers that share a parameter both bring
    the rank's own gradient. They do it in the order of their construction, because the order in which gradients become
    ready may differ between ranks (pytorch/pytorch#72843).
    """

    def __init__(self) -> None:
        self._built: list[weakref.ref[Ending]] = []
        self._is_noticed = False

    def add(self, wrapper: Ending) -> None:
        """Add a wrapper, by a weak reference."""
        self._built.append(weakref.ref(wrapper))

    def remove(self, wrapper: Ending) -> None:
        """Remove a wrapper: it takes part in no further backward."""
        self._built.remove(weakref.ref(wrapper))

    @property
    def _wrappers(self) -> list[Ending]:
        return [wrapper for each in self._built if (wrapper := each()) is not None]

    def forget(self) -> None:
        """Forget the noticed backward, which is over or has raised; call it when none runs."""
        self._is_noticed = False
        for wrapper in self._wrappers:
            wrapper.noticed = Noticed()

    def reached(self) -> None:
        """Note that the running backward concerns a wrapper, so that its end is noticed."""
        if not self._is_noticed:
            self._is_noticed = True
            Variable._execution_engine.queue_callback(self._is_over)

    def _is_over(self) -> None:
        reached = {parameter for one in self._wrappers if one.noticed.is_reached for parameter in one.parameters()}
        for wrapper in self._wrappers:
            if not wrapper.noticed.is_reached:
                wrapper.noticed.brought -= reached  # a shared parameter belongs to the reached wrapper
        ending = [wrapper for wrapper in self._wrappers if wrapper.takes_part]
        meetings = [wrapper.bring_gradients() for wrapper in ending]
        self.forget()
        for wrapper, meeting in zip(ending, meetings, strict=True):
            wrapper.take_means(meeting)
