"""What coroutines raise, and what a signal does to them: it arrives as it would without them."""

import os
import signal
from collections.abc import Iterator
from typing import Never

import pytest
import trio

from conformance.waiting import loop


class Ended(BaseException):
    """What a handler raises."""


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Handle two signals as the command line does: the first raises, and none is heard after it."""
    seen: list[int] = []

    def handle(signum: int, frame: object) -> None:
        seen.append(signum)
        raise Ended

    before = {one: signal.signal(one, handle) for one in (signal.SIGINT, signal.SIGTERM)}
    yield seen
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_everything_and_is_handled_when_all_has_ended(handled: list[int], signum: int) -> None:
    cleaned_up: list[str] = []

    async def sleeps() -> None:
        try:
            await trio.sleep_forever()
        finally:
            os.kill(os.getpid(), signum)  # one that is impatient does no harm
            cleaned_up.append(f"before {handled}")

    async def ends() -> None:
        os.kill(os.getpid(), signum)

    with pytest.raises(Ended):
        loop.run(loop.together, sleeps, ends)
    assert (cleaned_up, handled) == (["before []"], [signum])
    with pytest.raises(Ended):
        os.kill(os.getpid(), signum)  # it is handled as before


def test_what_one_raises_comes_by_itself_and_ends_the_others() -> None:
    ended: list[str] = []

    async def raises() -> Never:
        raise ValueError("as asked")

    async def waits() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("waits")

    with pytest.raises(ValueError, match="as asked"):
        loop.run(loop.together, waits, lambda: loop.together(raises))
    assert ended == ["waits"]


def test_what_ends_the_process_is_graver_than_an_error() -> None:
    async def raises() -> Never:
        raise ValueError

    async def is_interrupted() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(loop.together, is_interrupted, raises)


def test_results_come_in_order() -> None:
    async def after(seconds: float) -> float:
        await trio.sleep(seconds)
        return seconds

    assert loop.run(loop.together, lambda: after(0.01), lambda: after(0.0)) == [0.01, 0.0]
