"""What a training loop may have around forward, backward and more: none of it is a DDP's business."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_T = TypeVar("_T")
_Context = Callable[[], contextlib.AbstractContextManager[Any]]


class _PassesOn(TorchDispatchMode):
    """Sees every operation, as what counts or logs them does, and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        return func(*args, **(kwargs or {}))


class _PassesCallsOn(TorchFunctionMode):
    """Sees every call of torch, as what counts or logs them does, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call."""
        return func(*args, **(kwargs or {}))


def _saved_elsewhere() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autograd saves copies of what it saves, as offloading does."""
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


def run_forward(around: str, forward: Callable[[], _T]) -> _T:
    """Return what `forward` returns, run within `around`, of `training.AROUND`; `thread`: in a thread of its own."""
    return _run(around, _AROUND_FORWARD, forward)


def run_backward(around: str, backward: Callable[[], _T]) -> _T:
    """Return what `backward` returns, run within what of `around` goes with a backward."""
    return _run(around, _AROUND_BACKWARD, backward)


def run_within(around: str, call: Callable[[], _T]) -> _T:
    """Return what `call` returns, of whatever phases, run within `anomaly`, `function_mode`, `thread` or nothing."""
    return _run(around, _AROUND_ALL, call)


def _run(around: str, contexts: Mapping[str, _Context], call: Callable[[], _T]) -> _T:
    if around == "thread":
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()
    with contexts.get(around, contextlib.nullcontext)():
        return call()
