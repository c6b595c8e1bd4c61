"""Contexts that a training loop may have around forward, backward and more, which must not affect a DDP."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

_T = TypeVar("_T")
_Context = Callable[[], contextlib.AbstractContextManager[Any]]


class _PassesOn(TorchDispatchMode):
    """A mode that changes nothing, like one that counts or logs operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _PassesCallsOn(TorchFunctionMode):
    """A mode that changes nothing, like one that counts or logs calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _saved_elsewhere() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autograd saves copies, as offloading does."""
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda saved: saved)


def _anomaly() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


_AROUND_FORWARD: Mapping[str, _Context] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly": _anomaly,
    "saved_tensors": _saved_elsewhere,
    "dispatch_mode": _PassesOn,
}
_AROUND_BACKWARD: Mapping[str, _Context] = {"anomaly": _anomaly, "dispatch_mode": _PassesOn}
_AROUND_ALL: Mapping[str, _Context] = {"anomaly": _anomaly, "function_mode": _PassesCallsOn}


class Surroundings:
    """The context `around`, of `training.AROUND`, of forwards and backwards of one training.

    With `thread` all forwards run in one thread and all backwards in another, because autograd runs nodes that one
    thread created in a fixed order.
    """

    def __init__(self, around: str) -> None:
        self._around = around
        self._threads = {"forward": ThreadPoolExecutor(1), "backward": ThreadPoolExecutor(1)}

    def __enter__(self) -> Surroundings:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def forward(self, call: Callable[[], _T]) -> _T:
        """Return `call()`, run in the context of a forward."""
        return self._run("forward", _AROUND_FORWARD, call)

    def backward(self, call: Callable[[], _T]) -> _T:
        """Return `call()`, run in the context of a backward."""
        return self._run("backward", _AROUND_BACKWARD, call)

    def _run(self, phase: str, contexts: Mapping[str, _Context], call: Callable[[], _T]) -> _T:
        if self._around == "thread":
            return self._threads[phase].submit(call).result()
        with contexts.get(self._around, contextlib.nullcontext)():
            return call()


@contextlib.contextmanager
def _loader_workers() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # on plain ranks
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)  # torch's loader sets one, once
    batches = iter(DataLoader(TensorDataset(torch.arange(4)), num_workers=2, multiprocessing_context="fork"))
    try:
        next(batches)
        yield
        next(batches)
    finally:
        del batches
        signal.signal(signal.SIGCHLD, handler)


def run_within(around: str, call: Callable[[], _T]) -> _T:
    """Return `call()`, run in `anomaly`, `function_mode`, a new `thread`, beside `loader_workers`, or in no context.

    Workers of a data loader are forks of this process, which live while `call` runs.
    """
    if around == "thread":
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()
    if around == "loader_workers":
        with _loader_workers():
            return call()
    with _AROUND_ALL.get(around, contextlib.nullcontext)():
        return call()
