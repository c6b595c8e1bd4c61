"""How a caller uses the Works of an operation to learn that the result is complete."""

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
from conformance.waiting.kept_waiting import process_seconds

#: The delay of a late wait.
_LATE_S = 0.005
_PAUSE_S = 0.0002
#: A timeout that never expires.
_FAR = timedelta(seconds=60)
#: No completion takes so long while the process has a processor.
_PATIENCE_S = 3.0
#: After a wait in vain the scenario has failed; later waits in the same way are shorter.
_SHORTER_S = {_PATIENCE_S: 0.5, 0.5: 0.1, 0.1: 0.1}
#: After how long, and how many times in vain, a wrong result is compared again: it may be unfinished.
_LINGER_S, _MOST_IN_VAIN = 0.3, 3


#: Lifetimes in which only the future reports completion.
OF_FUTURES = ("future", "future-polled", "value", "then", "then-late")


class Patience:
    """How long a rank waits for a completion in one scenario: less after a wait in vain."""

    def __init__(self) -> None:
        self.way = ""
        self._seconds: dict[str, float] = {}
        self._lingers = _MOST_IN_VAIN

    def until(self, due: Callable[[], bool]) -> bool:
        """Whether `due` becomes true in time."""
        return any(due() for _ in process_seconds(self._seconds.get(self.way, _PATIENCE_S), pause_s=_PAUSE_S))

    def comes_late(self, due: Callable[[], bool]) -> bool:
        """Whether `due` is true a little later; False without a wait after a few failures."""
        if not self._lingers:
            return False
        is_late = comes_late(due)
        self._lingers -= not is_late
        return is_late

    def in_vain(self) -> float:
        """Return the seconds of the last wait, and shorten the next in this `way`."""
        waited = self._seconds.get(self.way, _PATIENCE_S)
        self._seconds[self.way] = _SHORTER_S[waited]
        return waited


def comes_late(due: Callable[[], bool]) -> bool:
    """Whether `due` is true a little later."""
    time.sleep(_LINGER_S)
    return due()


def complete(
    issued: Issued, lifetime: str, barrier: Callable[[], None], patience: Patience,
    between: Callable[[], None] = lambda: None,
) -> str:  # fmt: skip
    """Wait for the result by `lifetime`; return what is wrong with a Work, as a clause, empty if nothing is.

    `barrier` makes all ranks of the group wait for each other, which completes a dropped Work. `between` is called
    between the two waits of `wait-twice`.
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
    """Wait for wrong works, which would otherwise be in flight during the next cell."""
    for work in works:
        with contextlib.suppress(Exception):
            _in_a_thread(work, patience)


def _wrong_value(values: list[Any], outputs: tuple[Tensor, ...], says: str) -> str:
    """Return how the tensors of Works differ from the outputs in their order; Works without tensors are right."""
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
    """Return result(); nothing if it raises, as in torch's own class and some of gloo's."""
    try:
        return list(work.result() or ())
    except RuntimeError:
        return []


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements; of complex numbers both parts, because torch's functions pass them on as real ones."""
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
    work.get_future()  # a second call may return another future
    work.get_future().wait()
    return ""


def _then(work: Any, patience: Patience) -> str:
    calls: list[int] = []

    def seen(future: Any) -> Any:
        calls.append(1)
        return future.value()  # on a device, a future's value orders the waiting stream

    work.get_future().then(seen).wait()
    return "" if len(calls) == 1 else f"a callback of the future ran {len(calls)} times"


def _future_polled(work: Any, patience: Patience) -> str:
    future = work.get_future()
    if patience.until(future.done):
        future.wait()  # returns at once; on a device it orders the reading stream
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

    thread = threading.Thread(target=wait, daemon=True)  # if it hangs, the process must end
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
