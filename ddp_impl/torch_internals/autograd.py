"""What autograd and its engine tell: a backward that runs, that ends or raises, what it will bring."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import FrameType, TracebackType
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch.autograd import Variable
from torch.autograd.graph import Node

from ddp_impl.torch_internals.compile import keep_out_of_graphs
from ddp_impl.torch_internals.names import DISTRIBUTED_AUTOGRAD, PROFILER, needed_for, required

__all__ = ["compiled_autograd"]

#: Returns the number of the backward that this thread runs, -1 outside of any; one within another has its own.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
#: Whether a profiler runs.
profiler_runs: Callable[[], bool] = needed_for(PROFILER, "torch.autograd._profiler_enabled", instead=lambda: False)


def shown_to_profilers(name: str) -> AbstractContextManager[Any]:
    """Return a context that a profiler shows as an event of this name, at no cost while none runs."""
    return torch.autograd.profiler.record_function(name) if profiler_runs() else contextlib.nullcontext()


class WhenBackwardEnds:
    """Calls `ended` when the backward that runs now is over, or `broke_off(exception, traceback)` if it raised.

    torch has no public call for it. Autograd throws its callbacks away when a backward raises, and tells no more.
    """

    __slots__ = ("_broke_off", "_ended")

    def __init__(
        self, ended: Callable[[], None], broke_off: Callable[[BaseException | None, TracebackType | None], None]
    ) -> None:
        self._ended, self._broke_off = ended, broke_off
        Variable._execution_engine.queue_callback(self)

    @keep_out_of_graphs
    def __call__(self) -> None:
        """Take the report that the backward is over; threads of autograd may keep this object for a moment longer."""
        ended = self._ended
        self._ended = self._broke_off = _nothing
        ended()

    @keep_out_of_graphs
    def __del__(self) -> None:
        """Take it that the backward raised, unless it is over."""
        if self._broke_off is not _nothing and not sys.is_finalizing():
            self._broke_off(*_raised_below(sys._getframe().f_back))


def _nothing(*_: object) -> None:
    """Take any report and do nothing: holds nobody."""


def _raised_below(frame: FrameType | None) -> tuple[BaseException | None, TracebackType | None]:
    """Return what Python code raised on its way up to `frame`, which runs C++ code; None for what Python does not know.

    C++ holds the exception, but the garbage collector knows it. Its traceback begins right below `frame`, or below none
    in a thread of torch's. Before Python 3.12 both are apart: the exception is the one that only C++ refers to. Young
    objects are enough: of all there may be millions.
    """
    young = gc.get_objects(0) + gc.get_objects(1)
    begins = [item for item in young if type(item) is TracebackType and item.tb_frame.f_back is frame]
    if not begins:
        return None, None
    parts = list(_parts(begins[-1]))
    errors = [item for item in young if issubclass(type(item), BaseException)]
    found = [error for error in errors if any(error.__traceback__ is part for part in parts)]
    if not found:
        apart = [error for error in errors if error.__traceback__ is None]
        young.clear()
        errors.clear()
        apart.append(BaseException())  # which nobody else refers to
        *num_references, of_this_list = map(sys.getrefcount, apart)
        found = [error for error, num in zip(apart, num_references, strict=False) if num == of_this_list + 1]
    return found[0] if len(found) == 1 else None, begins[-1]


def _parts(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def in_backward() -> bool:
    """Whether this thread runs a backward; torch has no public way to ask."""
    return current_backward() != -1


def brought_by_backward(nodes: Sequence[Node], *, captured: bool = False) -> list[bool]:
    """Return to which of these accumulation nodes the backward that runs now will come; a look into a set for each.

    None with `torch.autograd.grad` or torch.distributed.autograd, nor with compiled autograd unless its `captured`
    backwards are meant, too; a backward of a node may add some.
    """
    if not captured and in_compiled_backward():
        return [False] * len(nodes)
    try:
        return list(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # the engine is asked for a leaf whose gradient it captures
        return [False] * len(nodes)


def in_compiled_backward() -> bool:
    """Whether compiled autograd has captured the backward that runs now, or is being compiled."""
    return compiled_autograd.in_compiled_autograd_region


@cache
def _rpc_api() -> Any:
    """Return the module that knows the agent of torch.distributed.rpc, imported where it is first asked for."""
    if not torch.distributed.rpc.is_available():
        return None
    from torch.distributed.rpc import api

    return api


def current_distributed_context_id() -> int | None:
    """Return the id of this thread's torch.distributed.autograd context, which torch tells its opener only; or None."""
    api = _rpc_api()
    if api is None or not api._is_current_rpc_agent_set():
        return None
    current_context = required(DISTRIBUTED_AUTOGRAD, "torch._C._distributed_autograd._current_context")
    try:
        return int(current_context()._context_id())
    except RuntimeError:  # the only way to ask: there is none
        return None
