"""What becomes of the Works that an operation gives: how the caller comes to know that the result is there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from conformance.programs.operations.calls import Issued, wait_for_device
from conformance.waiting.kept_waiting import own_seconds

#: So long a Work is left alone where it is waited for late.
_LATE_S = 0.005
_PAUSE_S = 0.0002
#: A timeout that nothing meets.
_FAR = timedelta(seconds=60)
#: Nothing that is due takes so long, where the machine lets the process have that time.
_PATIENCE_S = 3.0
#: After a wait in vain the scenario has failed; the next one in the same way is given less, those behind it little.
_SHORTER_S = {_PATIENCE_S: 0.5, 0.5: 0.1, 0.1: 0.1}
#: So long, and so many times in vain, a wrong result is looked at again: the right one may come later.
_LINGER_S, _MOST_IN_VAIN = 0.3, 3


#: By which the future alone tells that an operation is done.
OF_FUTURES = ("future", "future-polled", "value", "then", "then-late")


class Patience:
    """How long a rank waits for what is due, in one scenario: less, once it has waited in vain."""

    def __init__(self) -> None:
        self.way = ""
        self._seconds: dict[str, float] = {}
        self._lingers = _MOST_IN_VAIN

    def until(self, due: Callable[[], bool]) -> bool:
        """Whether something becomes true in time."""
        return any(due() for _ in own_seconds(self._seconds.get(self.way, _PATIENCE_S), pause_s=_PAUSE_S))

    def comes_late(self, due: Callable[[], bool]) -> bool:
        """Whether something is true a little later; it is not, and nobody waits, once it was not a few times."""
        if not self._lingers:
            return False
        is_late = comes_late(due)
        self._lingers -= not is_late
        return is_late

    def in_vain(self) -> float:
        """Return for how many seconds it was waited, and wait less in this `way` from now on."""
        waited = self._seconds.get(self.way, _PATIENCE_S)
        self._seconds[self.way] = _SHORTER_S[waited]
        return waited


def comes_late(due: Callable[[], bool]) -> bool:
    """Whether what is not true yet is so a little later."""
    time.sleep(_LINGER_S)
    return due()


def complete(
    issued: Issued,
    lifetime: str,
    barrier: Callable[[], None],
    patience: Patience,
    between: Callable[[], None] = lambda: None,
) -> str:
    """Wait as `lifetime` says until the result must be there; return what is wrong with a Work, empty if nothing is.

    `barrier` makes all ranks of the group wait for each other, by which a Work that was dropped is known to be done.
    Where Works are waited for twice, `between` is called after the first time.
    """
    works, patience.way = issued.works, lifetime
    if lifetime == "dropped":
        del issued, works
        barrier()
        return ""
    try:
        wrong = next(filter(None, (_WAYS[lifetime](work, patience) for work in works)), "")
        if lifetime == "wait-twice" and not wrong:
            between()
            wrong = next(filter(None, (_in_a_thread(work, patience, "a second wait()") for work in works)), "")
    except Exception:
        _see_done(works, patience)
        raise
    if wrong:
        _see_done(works, patience)
        return wrong
    if lifetime == "value":
        return _wrong_value([work.get_future().value() for work in works], issued.outputs, "the future holds")
    if lifetime == "result":
        return _wrong_value([_result(work) for work in works], issued.outputs, "result() gives")
    return ""


def _see_done(works: Sequence[Any], patience: Patience) -> None:
    """Let works end of which something is wrong, if they do: else they would be under way when others are tried."""
    for work in works:
        with contextlib.suppress(Exception):
            _in_a_thread(work, patience)


def _wrong_value(values: list[Any], outputs: tuple[Tensor, ...], says: str) -> str:
    """Return how what Works say differs from the outputs in their order, whole or in parts; nothing is as good."""
    held = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    if not held or torch.equal(came := _joined(held), wanted := _joined(outputs)):
        return ""
    if came.shape != wanted.shape or came.dtype != wanted.dtype:
        return f"{says} {len(held)} tensor(s) that are not the {len(outputs)} output(s) in their order"
    if len(held) > 1 and all(any(torch.equal(one, output) for output in outputs) for one in held):
        return f"{says} the outputs, but not in their order"
    first = int((came != wanted).nonzero()[0])
    return f"{says} {came[first].item()} as element {first}, where the output has {wanted[first].item()}"


def _result(work: Any) -> list[Tensor]:
    """Return what result() gives; nothing where it raises, as that of torch's own class and of some of gloo's do."""
    try:
        return list(work.result() or ())
    except RuntimeError:
        return []


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements; of complex numbers both parts, since torch's functions hand those on as real ones."""
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return torch.cat([tensor.reshape(-1) for tensor in real])


def _wait(work: Any, _: Patience, *timeout: timedelta) -> str:
    answer = work.wait(*timeout)
    return "" if answer is True else f"wait({'timeout' * len(timeout)}) returned {answer!r}, expected True"


def _wait_late(work: Any, patience: Patience) -> str:
    time.sleep(_LATE_S)
    if wrong := _wait(work, patience):
        return wrong
    wait_for_device()
    return "" if work.is_completed() else "is_completed() is False after wait()"


def _polled(work: Any, patience: Patience) -> str:
    if patience.until(work.is_completed):
        return "" if work.is_completed() else "is_completed() went back to False"
    return f"is_completed() was still False after {patience.in_vain():g} s, although every rank had called"


def _future(work: Any, patience: Patience) -> str:
    work.get_future()  # who asks again may be given another one: that of the first time is what others wait for
    work.get_future().wait()
    return ""


def _then(work: Any, patience: Patience) -> str:
    calls: list[int] = []

    def seen(future: Any) -> Any:
        calls.append(1)
        return future.value()  # on a device, what a future holds orders the stream of whoever waits for it

    work.get_future().then(seen).wait()
    return "" if len(calls) == 1 else f"a callback of the future ran {len(calls)} times"


def _future_polled(work: Any, patience: Patience) -> str:
    future = work.get_future()
    if patience.until(future.done):
        future.wait()  # returns at once; on a device it orders the stream that is going to read
        return ""
    return f"the future was still not done after {patience.in_vain():g} s, although every rank had called"


def _then_late(work: Any, patience: Patience) -> str:
    future = work.get_future()
    future.wait()
    calls: list[int] = []
    future.then(lambda done: calls.append(1)).wait()
    return "" if len(calls) == 1 else f"a callback that was added to a future that is done ran {len(calls)} times"


def _in_a_thread(work: Any, patience: Patience, what: str = "wait() in another thread") -> str:
    answers: list[str] = []

    def wait() -> None:
        try:
            answers.append(_wait(work, patience))
        except Exception as error:
            answers.append(f"{what} raised {type(error).__name__}: {error}")

    thread = threading.Thread(target=wait, daemon=True)  # one that hangs may not hold up the end of the process
    thread.start()
    if patience.until(lambda: bool(answers)):
        thread.join()
        return answers[0]
    return f"{what} did not return within {patience.in_vain():g} s"


_WAYS: dict[str, Callable[[Any, Patience], str]] = {
    "sync": _wait,
    "wait": _wait,
    "wait-late": _wait_late,
    "wait-twice": _wait,
    "wait-timeout": lambda work, patience: _wait(work, patience, _FAR),
    "polled": _polled,
    "future": _future,
    "future-polled": _future_polled,
    "value": _future,
    "result": _wait,
    "then-late": _then_late,
    "then": _then,
    "inputs-dropped": _wait,
    "thread": _in_a_thread,
}
