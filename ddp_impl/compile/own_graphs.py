"""A Dynamo backend for sharded modules: torch's cache of graphs must not give one rank those of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ddp_impl.torch_internals.compile import without_autograd_cache


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
