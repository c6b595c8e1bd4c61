"""Finding out, inside a wrapped module's forward, that `torch.compile` is at work, and with whose backend.

`torch.compile(ddp)` tells the wrapped module nothing: Dynamo installs a frame callback for the thread and calls the
module. The wrapper's forward is excluded from capture (`runs_outside_graphs`), so it runs as ordinary Python with that
callback in place; the callback leads to the backend that the user chose. This file is the only one that reads Dynamo's
private state, and it changes none of it. Why this way and not another: `docs/decisions/compiled_ddp.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.decorators import skip as _skip
from torch._dynamo.eval_frame import OptimizedModule

# Dynamo wraps the user's backend in layers, each of which refers to the next by one of these (by version of torch).
_LINKS = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")

#: What intercepts the frames of this thread: None when nothing is being compiled. A C function: asking costs a few ns
#: in every forward, and is no frame that could itself be intercepted.
frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback

_Function = Callable[..., Any]


def runs_outside_graphs(function: _Function) -> _Function:
    """Let `function` run as it is under `torch.compile`, while what it calls is captured and compiled.

    `torch.compiler.disable(recursive=False)` is meant to do this, but as of torch 2.13 it marks a wrapper and lets the
    function itself be captured, which breaks `fullgraph=True`.
    """
    return _skip(function)


@dataclass(frozen=True, slots=True)
class ActiveCompiler:
    """What the user asked `torch.compile` for: a backend, one graph or several, static or dynamic shapes.

    `backend` is None while Dynamo may only run what is compiled already. `dynamic` is None where the surrounding
    compilation decides.
    """

    backend: Callable[..., Any] | None
    fullgraph: bool = False
    dynamic: bool | None = None


def in_compiled_backward() -> bool:
    """Whether compiled autograd has captured the backward that runs now, or is being compiled."""
    return compiled_autograd.in_compiled_autograd_region


def compiler_of(module: torch.nn.Module) -> tuple[ActiveCompiler, torch.nn.Module] | None:
    """Return, for a module that `torch.compile` returned, how it is compiled and the original module; else None."""
    if not isinstance(module, OptimizedModule):
        return None
    context = module.dynamo_ctx
    callback: Any = getattr(context, "callback", None)
    if not callable(callback):
        return None
    described = compiler_behind(callback)
    compiler = ActiveCompiler(described.backend, described.fullgraph, getattr(context, "_dynamic", None))
    return compiler, module._orig_mod


def compiler_behind(callback: Any) -> ActiveCompiler:
    """Return what a thread's frame callback (`frame_callback()`, not None) compiles with; call with Dynamo disabled."""
    fullgraph = False
    if not callable(callback):
        return ActiveCompiler(None)
    while True:
        fullgraph = fullgraph or bool(getattr(callback, "_one_graph", False))
        following = next((getattr(callback, link) for link in _LINKS if hasattr(callback, link)), None)
        if following is None:
            return ActiveCompiler(callback, fullgraph)
        callback = following
