"""Threads of autograd's own in a reducer: one at a time, and until the last of them has let go of a backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ddp_impl.torch_internals.autograd import WhenBackwardEnds, in_backward

_Arguments = ParamSpec("_Arguments")
_Owner = TypeVar("_Owner")

#: Held by the one of autograd's threads, of which there is one for each device, that is in a reducer; all reducers have
#: the same, because one has another send.
_thread_in_reducers = threading.RLock()

#: How long autograd's threads may take to drop a backward that raised: what they run at that moment.
_DROPPED_WITHIN_S = 10.0


def one_thread_at_a_time(owner: object, *names: str) -> None:
    """Let a thread of autograd wait in these methods of `owner` while another is in a reducer.

    To be called where parameters are on several devices, for each of which autograd has a thread; where there is one,
    nothing is to be paid for it, and compiled autograd would stumble over a lock.
    """
    for name in names:
        setattr(owner, name, _alone(getattr(owner, name)))


def _alone(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    @wraps(method)
    def alone(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        with _thread_in_reducers:
            method(*args, **kwargs)

    return alone


def without_grad(
    method: Callable[Concatenate[_Owner, _Arguments], None],
) -> Callable[Concatenate[_Owner, _Arguments], None]:
    """Let nothing of `method` be recorded by autograd: mostly nothing is in a backward, and to ask costs less."""

    @wraps(method)
    def unrecorded(self: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if not torch.is_grad_enabled():
            method(self, *args, **kwargs)
            return
        with torch.no_grad():
            method(self, *args, **kwargs)

    return unrecorded


class BackwardEnds:
    """Tells when autograd's threads have let go of the last backward.

    Where threads of autograd's own run a backward (`drops_late`), they drop one that raised a moment after its caller
    has caught the exception.
    """

    def __init__(self, *, drops_late: bool) -> None:
        """Wait for nothing."""
        self._drops_late = drops_late
        self._is_over: threading.Event | None = None

    def call(self, ended: Callable[[], None], raised: Callable[..., None]) -> None:
        """Have one of the two called when the backward that runs now is over."""
        over = self.next()

        def report(call: Callable[..., None], *arguments: Any) -> None:
            try:
                call(*arguments)
            finally:
                over()

        WhenBackwardEnds(partial(report, ended), partial(report, raised))

    def next(self) -> Callable[[], None]:
        """Return what is to be called when the backward that runs now is over, which `wait` waits for."""
        if not self._drops_late:
            return lambda: None
        self._is_over = threading.Event()
        return self._is_over.set

    def wait(self) -> None:
        """Wait until it is known how the last backward ended; outside of a backward."""
        if self._is_over is not None and not in_backward():
            self._is_over.wait(_DROPPED_WITHIN_S)
