"""Finding out, inside a wrapped module's forward, that `torch.compile` is at work, and with whose backend.

`torch.compile(ddp)` gives the wrapped module no sign: Dynamo installs a frame callback for the thread and calls the
module. The wrapper's forward is excluded from capture (`runs_outside_graphs`), so it runs as ordinary Python with that
callback in place; the callback leads to the backend that the user chose. Dynamo's state is read and never changed. Why
this way and not another: `docs/decisions/compiled_ddp.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddp_impl.torch_internals.compile import skip, wants_one_graph, wrapped_callback

_Function = Callable[..., Any]


def runs_outside_graphs(function: _Function) -> _Function:
    """Let `function` run as it is under `torch.compile`, while what it calls is captured and compiled.

    `torch.compiler.disable(recursive=False)` is meant to do this, but as of torch 2.13 it marks a wrapper and lets the
    function itself be captured, which breaks `fullgraph=True`.
    """
    return skip(function)


@dataclass(frozen=True, slots=True)
class ActiveCompiler:
    """The arguments that the user gave `torch.compile`: a backend, and whether there must be one graph.

    `backend` is None while Dynamo may only run what is compiled already.
    """

    backend: Callable[..., Any] | None
    fullgraph: bool = False


def compiler_behind(callback: Any) -> ActiveCompiler:
    """Return what a thread's frame callback (`frame_callback()`, not None) compiles with; call with Dynamo disabled."""
    fullgraph = False
    if not callable(callback):
        return ActiveCompiler(None)
    while True:
        fullgraph = fullgraph or wants_one_graph(callback)
        following = wrapped_callback(callback)
        if following is None:
            return ActiveCompiler(callback, fullgraph)
        callback = following
