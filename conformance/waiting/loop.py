"""Waiting for several things at once: trio runs the coroutines, by a clock that stands still while the machine does."""

import signal
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

import trio

from conformance.waiting import machine_time

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class MachineClock(trio.abc.Clock):
    """The clock of `machine_time`: seconds in which nobody could listen do not count."""

    def start_clock(self) -> None:
        """Do nothing: the clock has no beginning."""

    def current_time(self) -> float:
        """Return the present moment; whoever asks listens."""
        machine_time.resume()
        return machine_time.now()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return for how long to sleep before the clock is looked at again."""
        return machine_time.sleeps(deadline - self.current_time())


def run(function: Callable[[*Arguments], Awaitable[Result]], *arguments: *Arguments) -> Result:
    """Return what the coroutine function returns; raises what it raises, also in a nursery, by itself.

    A signal whose handler raises, as that of Ctrl-C does, cancels everything first; the handler is called when all has
    ended. Signals that come later are ignored until then.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handlers: dict[int, Any] = {one: found for one in _ENDING if callable(found := signal.getsignal(one))}
    arrived: list[int] = []
    tokens: list[trio.lowlevel.TrioToken] = []
    everything = trio.CancelScope()

    def end(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        for one in handlers:
            signal.signal(one, signal.SIG_IGN)
        for token in tokens:
            token.run_sync_soon(everything.cancel)

    async def main() -> Result:
        tokens.append(trio.lowlevel.current_trio_token())
        with everything:
            if arrived:
                everything.cancel()
            return await function(*arguments)
        raise KeyboardInterrupt

    for one in handlers if is_main else ():
        signal.signal(one, end)
    try:
        return trio.run(main, clock=MachineClock())
    except BaseExceptionGroup as group:
        raise _gravest(group) from None
    finally:
        for one, handler in handlers.items() if is_main else ():
            signal.signal(one, handler)
        for one in arrived[:1]:
            handlers[one](one, None)


async def together(*functions: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Return what the coroutine functions return, which run at once; raises what one of them raises, by itself."""
    results: list[Any] = [None] * len(functions)

    async def keep(place: int) -> None:
        results[place] = await functions[place]()

    try:
        async with trio.open_nursery() as nursery:
            for place in range(len(functions)):
                nursery.start_soon(keep, place)
                await trio.lowlevel.checkpoint()  # they begin in this order
    except BaseExceptionGroup as group:
        raise _gravest(group) from None
    return results


def _gravest(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one of the exceptions in the group: what ends a process, else an error, else that it was cancelled."""
    leaves: list[BaseException] = []
    inner: list[BaseException] = [group]
    while inner:
        one = inner.pop(0)
        if isinstance(one, BaseExceptionGroup):
            inner.extend(one.exceptions)
        else:
            leaves.append(one)
    return min(leaves, key=lambda one: (isinstance(one, trio.Cancelled), isinstance(one, Exception)))
