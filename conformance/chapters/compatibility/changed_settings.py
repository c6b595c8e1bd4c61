"""A process in which no mode, flag or setting is the usual one.

A DDP that sets one back to its usual value, such as the default dtype after a cast, changes nothing where it is usual.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

#: A setting's name, what reads it, what sets it, and a value that it usually does not have.
_Setting = tuple[str, Callable[[], Any], Callable[[Any], Any], Any]
#: Flags without which there is no training, and flags that change another one, which does not change back.
_NO_CHANGE = (
    "grad_enabled", "fwd_grad_enabled", "multithreading_enabled", "autocast_enabled", "autocast_cpu_enabled",
    "cublas_allow_tf32", "cudnn_allow_tf32",
)  # fmt: skip


def _settings() -> Iterator[_Setting]:
    yield "default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float64
    yield "number of threads", torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1
    yield "subnormal numbers", _flushes_subnormals, torch.set_flush_denormal, True
    yield "mask of files", _umask, os.umask, 0o027
    yield "working directory", os.getcwd, os.chdir, "/"
    yield "garbage collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable(), False
    yield "sizes of generations", gc.get_threshold, lambda sizes: gc.set_threshold(*sizes), (500, 9, 9)
    yield "recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, sys.getrecursionlimit() + 100
    yield "switch interval", sys.getswitchinterval, sys.setswitchinterval, 0.004
    yield "timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout, 77.0
    yield "level of logging", lambda: logging.root.level, logging.root.setLevel, logging.ERROR
    yield "signal handler", partial(signal.getsignal, signal.SIGUSR2), partial(signal.signal, signal.SIGUSR2), _take
    errors = dict.fromkeys(("divide", "over", "under", "invalid"), "ignore")
    yield "errors of NumPy", np.geterr, lambda chosen: np.seterr(**chosen), errors
    yield "warnings filters", lambda: list(warnings.filters), _set_filters, [("once", None, Warning, None, 0)]
    for name in ("excepthook", "displayhook", "unraisablehook"):
        yield name, partial(getattr, sys, name), partial(setattr, sys, name), _take
    for name in dir(torch._C):
        stem = name.removeprefix("_set_")
        read = getattr(torch._C, f"_get_{stem}", None)
        if stem != name and stem not in _NO_CHANGE and read is not None and isinstance(_value(read), bool):
            yield f"torch flag {stem}", read, getattr(torch._C, name), not read()


def _set_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]


def _value(read: Callable[[], Any]) -> Any:
    """Return what `read` does, None where torch refuses to say."""
    with contextlib.suppress(Exception):
        return read()
    return None


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _flushes_subnormals() -> bool:
    return bool(torch.tensor(5e-324, dtype=torch.float64) * 1.0 == 0)


def _take(*_: Any) -> None:
    """Stand for a handler or a hook of the user's."""


@contextlib.contextmanager
def all_changed() -> Iterator[list[str]]:
    """Give every setting another value in the block; at its end the list has what was changed there, if anything."""
    changed: list[str] = []
    others: list[tuple[str, Callable[[], Any], Any]] = []
    with contextlib.ExitStack() as back:
        for name, read, change, other in _settings():
            usual = read()
            with contextlib.suppress(RuntimeError):  # this processor has no other value
                change(other)
                back.callback(change, usual)
                others.append((name, read, other))
        yield changed
        changed += [f"{name}: {other} before, {read()} after" for name, read, other in others if read() != other]
