"""What becomes of the Works that an operation gives: how the caller comes to know that the result is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from conformance.kept_waiting import own_seconds
from conformance.programs.operations.calls import Issued

#: So long a Work is left alone where it is waited for late.
_LATE_S = 0.005
_PAUSE_S = 0.0002
#: Nothing that is due takes so long, where the machine lets the process have that time.
_PATIENCE_S = 3.0


def complete(issued: Issued, lifetime: str, barrier: Callable[[], None]) -> str:
    """Wait as `lifetime` says until the result must be there; return what is wrong with a Work, empty if nothing is.

    `barrier` makes all ranks of the group wait for each other, by which a Work that was dropped is known to be done.
    """
    works = issued.works
    if lifetime == "dropped":
        del issued, works
        barrier()
        return ""
    for work in works:
        if wrong := _WAYS[lifetime](work):
            return wrong
    if lifetime == "value":
        return _wrong_value([work.get_future().value() for work in works], issued.outputs)
    return ""


def _wrong_value(values: list[Any], outputs: tuple[Tensor, ...]) -> str:
    """Return how what futures hold differs from the outputs in their order, whole or in parts; nothing is as good."""
    held = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    if not held or torch.equal(_joined(held), _joined(outputs)):
        return ""
    return f"the future holds {len(held)} tensor(s) that are not the {len(outputs)} output(s) in their order"


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements; of complex numbers both parts, since torch's functions hand those on as real ones."""
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return torch.cat([tensor.reshape(-1) for tensor in real])


def _wait(work: Any) -> str:
    answer = work.wait()
    return "" if answer is True else f"wait() returned {answer!r}, expected True"


def _wait_late(work: Any) -> str:
    time.sleep(_LATE_S)
    if wrong := _wait(work):
        return wrong
    return "" if work.is_completed() else "is_completed() is False after wait()"


def _wait_twice(work: Any) -> str:
    return _wait(work) or _in_a_thread(work, "a second wait()")


def _polled(work: Any) -> str:
    for _ in own_seconds(_PATIENCE_S, pause_s=_PAUSE_S):
        if work.is_completed():
            return "" if work.is_completed() else "is_completed() went back to False"
    return f"is_completed() was still False after {_PATIENCE_S:g} s, although every rank had called"


def _future(work: Any) -> str:
    work.get_future().wait()
    return ""


def _then(work: Any) -> str:
    calls: list[int] = []
    work.get_future().then(lambda future: calls.append(1)).wait()
    return "" if len(calls) == 1 else f"a callback of the future ran {len(calls)} times"


def _future_polled(work: Any) -> str:
    future = work.get_future()
    for _ in own_seconds(_PATIENCE_S, pause_s=_PAUSE_S):
        if future.done():
            return ""
    return f"the future was still not done after {_PATIENCE_S:g} s, although every rank had called"


def _then_late(work: Any) -> str:
    future = work.get_future()
    future.wait()
    calls: list[int] = []
    future.then(lambda done: calls.append(1)).wait()
    return "" if len(calls) == 1 else f"a callback that was added to a future that is done ran {len(calls)} times"


def _in_a_thread(work: Any, what: str = "wait() in another thread") -> str:
    answers: list[str] = []

    def wait() -> None:
        try:
            answers.append(_wait(work))
        except Exception as error:
            answers.append(f"{what} raised {type(error).__name__}: {error}")

    thread = threading.Thread(target=wait, daemon=True)  # one that hangs may not hold up the end of the process
    thread.start()
    for _ in own_seconds(_PATIENCE_S, pause_s=_PAUSE_S):
        if answers:
            thread.join()
            return answers[0]
    return f"{what} did not return within {_PATIENCE_S:g} s"


_WAYS: dict[str, Callable[[Any], str]] = {
    "sync": _wait,
    "wait": _wait,
    "wait-late": _wait_late,
    "wait-twice": _wait_twice,
    "polled": _polled,
    "future": _future,
    "future-polled": _future_polled,
    "value": _future,
    "then-late": _then_late,
    "then": _then,
    "inputs-dropped": _wait,
    "thread": _in_a_thread,
}
