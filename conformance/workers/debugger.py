"""Lets a person debug a rank at a terminal: where its code calls `breakpoint()`, and where it has raised.

The other ranks go on until they must wait for it. If one raises, it waits, too: the harness would end them all soon.
"""

import contextlib
import pdb
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from conformance.waiting.limits import LOOK_S


@contextlib.contextmanager
def debugged_at(terminal: str, rank: int, over: Path) -> Iterator[None]:
    """Open a debugger of this rank at the device `terminal` for what the block does; makes the file `over` at the end.

    A rank's own input and output are not the terminal's.
    """
    with open(terminal) as keys, open(terminal, "w") as screen:

        def stop(*_: object, **__: object) -> None:
            print(f"\nrank {rank} stops at breakpoint(); it goes on with `c`", file=screen, flush=True)
            pdb.Pdb(stdin=keys, stdout=screen).set_trace(sys._getframe(1))

        with _breakpoints(stop):
            try:
                yield
            except Exception as error:
                print(f"\nrank {rank} raised {type(error).__name__}: {error}; leave with `q`", file=screen, flush=True)
                debugger = pdb.Pdb(stdin=keys, stdout=screen)
                debugger.reset()
                debugger.interaction(None, error.__traceback__)
                raise
            finally:
                over.touch()


@contextlib.contextmanager
def debugged_elsewhere(over: Path) -> Iterator[None]:
    """Pass by what calls `breakpoint()`; if the block raises, wait until the file `over` is there."""
    with passing_breakpoints():
        try:
            yield
        except Exception:
            while not over.exists():
                time.sleep(LOOK_S)
            raise


def passing_breakpoints() -> AbstractContextManager[None]:
    """Return a block in which `breakpoint()` does nothing."""
    return _breakpoints(lambda *_, **__: None)


@contextlib.contextmanager
def _breakpoints(hook: Any) -> Iterator[None]:
    before, sys.breakpointhook = sys.breakpointhook, hook
    try:
        yield
    finally:
        sys.breakpointhook = before
