"""Finding out, inside a wrapped module's forward, that `torch.compile` is at work, and with whose backend.

`torch.compile(ddp)` gives the wrapped module no sign: Dynamo installs a frame callback for the thread and calls the
module. The wrapper's forward is excluded from capture (`runs_outside_graphs`), so it runs as ordinary Python with that
callback in place; the callback leads to the backend that the user chose. Dynamo's state is read and never changed. Why
this way and not another: `docs/decisions/compiled_ddp.md`. Sharded modules compile by `OwnGraphs` around that backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ddp_impl.torch_internals.compile import skip, wants_one_graph, without_autograd_cache, wrapped_callback

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


class OwnGraphs:
    """Compiles by `backend`, and neither reads nor writes the cache that AOTAutograd keeps on the disk.

    A graph that shards DTensors calls collectives by the names of their groups, which differ from rank to rank and from
    run to run. The cache knows a mesh by its shape alone: what one rank has written, another finds, and communicates
    over a group that is not its own, or fails because there is none of that name (pytorch/pytorch#188390, torch 2.13).
    Inductor's own cache knows the names and serves as before.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        """Take the backend that compiles."""
        self.backend = backend

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile `gm`; raises what the backend raises."""
        with without_autograd_cache():
            compiled: Callable[..., Any] = self.backend(gm, example_inputs, **options)
        return compiled

    def reset(self) -> None:
        """Reset the backend; `torch.compiler.reset` calls it."""
        if hasattr(self.backend, "reset"):
            self.backend.reset()
