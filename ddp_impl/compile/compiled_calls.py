"""Through what a wrapped module is called while `torch.compile` is at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_impl.compile.active_compiler import ActiveCompiler, compiler_of
from ddp_impl.compile.graph_parameters import AveragedParameters
from ddp_impl.compile.graph_split import SplitBackend, SplitPlan
from ddp_impl.options import BucketCaps

_MAX_NAMES = 20


class CompiledCalls:
    """The compiled forms of one wrapped module, one per backend that it is compiled with.

    Each is the product of an ordinary `torch.compile` with our backend around the user's, so guards, recompilation,
    stances and `torch.compiler.reset` work as for any module, and other modules that are compiled with the same
    backend are not affected.
    """

    def __init__(self, averaged: AveragedParameters, ignored: frozenset[str], caps: BucketCaps) -> None:
        """Take what DDP averages, the names it ignores, and the caps of its buckets."""
        self._averaged = averaged
        self._ignored = ignored
        self._caps = caps
        self._compiled: list[tuple[ActiveCompiler, SplitBackend, Callable[..., Any]]] = []

    @property
    def splits(self) -> list[SplitPlan]:
        """The plans of all graphs that were compiled, in that order per backend."""
        return [plan for _, backend, _ in self._compiled for plan in backend.splits]

    def callable_for(self, module: nn.Module, compiler: ActiveCompiler | None) -> Callable[..., Any]:
        """Return what forward calls in place of `module`; must be called with Dynamo disabled.

        `compiler` is what `torch.compile` is doing to the wrapper; None if nothing, and then a `module` that was
        compiled before it was wrapped is given its cuts all the same. Raises `RuntimeError` when the module has
        trainable parameters that are unknown to the wrapper.
        """
        inner = compiler_of(module)
        if inner is not None:
            compiler, module = (compiler or inner[0]), inner[1]
        if compiler is None:
            return module
        if compiler.backend is None:
            return self._compiled[-1][2] if self._compiled else module
        for known, _, call in self._compiled:
            if known == compiler:
                return call
        self._check_unchanged(module)
        backend = SplitBackend(compiler.backend, self._averaged, self._caps)
        call = torch.compile(module, backend=backend, fullgraph=compiler.fullgraph, dynamic=compiler.dynamic)
        self._compiled.append((compiler, backend, call))
        return call

    def _check_unchanged(self, module: nn.Module) -> None:
        unknown = self._averaged.not_averaged(module, self._ignored)
        if unknown:
            shown = ", ".join(unknown[:_MAX_NAMES]) + (" ..." if len(unknown) > _MAX_NAMES else "")
            raise RuntimeError(
                f"cannot compile: {len(unknown)} trainable parameters of the wrapped module were not there, or were "
                f"frozen, when it was wrapped, and would never be averaged: {shown}. Wrap the module after changing it."
            )
