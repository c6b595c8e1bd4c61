"""Through what the wrapper calls its module while `torch.compile` is at work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_impl.compile.active_compiler import ActiveCompiler, compiler_of
from ddp_impl.compile.fusion import FusedBucket, Fusion
from ddp_impl.compile.graph_parameters import AveragedParameters
from ddp_impl.compile.graph_split import SplitBackend, SplitPlan
from ddp_impl.compile.in_graph import InGraphBackend, InGraphReducer
from ddp_impl.compile.own_graphs import OwnGraphs
from ddp_impl.compile.who_averages import InGraph, Reduction, reduction_of, wanted_reduction
from ddp_impl.messages import enumerate_names
from ddp_impl.options import BucketCaps
from ddp_impl.tensor_parallel import is_distributed
from ddp_impl.torch_internals import Unsupported, fusion_passes


class CompiledCalls:
    """The compiled forms of one wrapped module, one per backend that it is compiled with.

    Each is the product of an ordinary `torch.compile` with our backend around the user's, so guards, recompilation,
    stances and `torch.compiler.reset` work as for any module, and other modules that are compiled with the same
    backend are not affected.
    """

    def __init__(self, averaged: AveragedParameters, ignored: frozenset[str], caps: BucketCaps) -> None:
        """Take what DDP averages, the names it ignores, and the caps of its buckets."""
        self._reduction: Reduction | None = None
        self._fusion: Fusion | None = None
        self.averaged = averaged
        self._ignored = ignored
        self._caps = caps
        self._compiled: list[tuple[_Key, Any, Callable[..., Any]]] = []
        self._current: Callable[..., Any] | None = None
        self.averages_in_graph = False
        self._reducers: dict[tuple[Fusion, torch.dtype | None], InGraphReducer] = {}

    @contextlib.contextmanager
    def for_one_forward(
        self, module: nn.Module, compiler: ActiveCompiler | None, averages: Callable[[], InGraph | None]
    ) -> Iterator[None]:
        """Choose what `current` returns while the block runs; `averages` tells how a compiled backward averages."""
        answer = None if compiler is None else averages()
        self._current = self.callable_for(module, compiler, answer)
        self.averages_in_graph = answer is not None
        try:
            yield
        finally:
            self._current, self.averages_in_graph = None, False

    def current(self, module: nn.Module) -> Callable[..., Any]:
        """Return what this forward calls in place of `module`: itself, if nobody has chosen."""
        return module if self._current is None else self._current

    @property
    def reduction(self) -> Reduction:
        """How graphs are compiled if nothing speaks against it: what was set here, or else the user's configuration."""
        return wanted_reduction() if self._reduction is None else self._reduction

    @reduction.setter
    def reduction(self, value: Reduction | None) -> None:
        self._reduction = value

    @property
    def fusion(self) -> Fusion:
        """How in-graph averages are fused. Unless it was set, Inductor's list of passes for DDP decides, as in torch.

        `torch._inductor.config._fuse_ddp_communication_passes` names a pass that concatenates (its default) or one that
        coalesces; naming neither leaves one collective per gradient. Equal on every rank.
        """
        if self._fusion is not None:
            return self._fusion
        passes = fusion_passes()
        for fusion, name in ((Fusion.CONCAT, "concat"), (Fusion.COALESCED, "coalesced")):
            if any(name in each for each in passes):
                return fusion
        return Fusion.NONE

    @fusion.setter
    def fusion(self, value: Fusion | None) -> None:
        self._fusion = value

    @property
    def splits(self) -> list[SplitPlan]:
        """The plans of all graphs that were compiled in parts, in that order per backend."""
        return [
            plan for _, backend, _ in self._compiled if isinstance(backend, SplitBackend) for plan in backend.splits
        ]

    @property
    def fused(self) -> list[tuple[FusedBucket, ...]]:
        """The buckets of all backward graphs that average in graph, in the order of compilation per backend."""
        return [
            fused for _, backend, _ in self._compiled if isinstance(backend, InGraphBackend) for fused in backend.fused
        ]

    def callable_for(
        self, module: nn.Module, compiler: ActiveCompiler | None, in_graph: InGraph | None = None
    ) -> Callable[..., Any]:
        """Return what forward calls in place of `module`; must be called with Dynamo disabled.

        `compiler` is what `torch.compile` is doing to the wrapper; None if nothing, and then a `module` that was
        compiled before it was wrapped is given its cuts all the same. With `in_graph`, the backward of what is
        returned averages; otherwise the reducer has to. Raises `RuntimeError` when the module has trainable parameters
        that are unknown to the wrapper.
        """
        inner = compiler_of(module)
        if inner is not None:
            compiler, module = (compiler or inner[0]), inner[1]
        if compiler is None:
            return module
        reduction = reduction_of(self.reduction, in_graph)
        fusion = Fusion.NONE if in_graph is None else self.fusion
        key = _Key(compiler, reduction, fusion, None if in_graph is None else in_graph.wire_dtype)
        if in_graph is not None:
            self._reducer_for(in_graph)  # the group may be another one than when it was compiled
        for known, _, call in self._compiled:
            if known.serves(key):
                return call
        if compiler.backend is None:
            return module
        self._check_unchanged(module)
        backend, call = self._compile(module, compiler, compiler.backend, reduction, in_graph)
        self._compiled.append((key, backend, call))
        return call

    def _compile(
        self,
        module: nn.Module,
        compiler: ActiveCompiler,
        compile_graph: Callable[..., Any],
        reduction: Reduction,
        in_graph: InGraph | None,
    ) -> tuple[Any, Callable[..., Any]]:
        backend: Any
        if in_graph is not None:
            backend = InGraphBackend(compile_graph, self._reducer_for(in_graph))
        elif reduction is Reduction.WHOLE:
            backend = compile_graph
        else:
            backend = SplitBackend(compile_graph, self.averaged, self._caps)
        is_sharded = any(map(is_distributed, module.parameters()))
        call = torch.compile(
            module,
            dynamic=compiler.dynamic,
            backend=OwnGraphs(backend) if is_sharded else backend,
            fullgraph=in_graph is not None or compiler.fullgraph,
        )
        return backend, _explaining(call) if in_graph is not None else call

    def _reducer_for(self, in_graph: InGraph) -> InGraphReducer:
        key = (self.fusion, in_graph.wire_dtype)
        if key not in self._reducers:
            self._reducers[key] = InGraphReducer(self.averaged, self._caps, in_graph.group, *key)
        reducer = self._reducers[key]
        reducer.refer_to(in_graph.group)
        return reducer

    def _check_unchanged(self, module: nn.Module) -> None:
        unknown = self.averaged.not_averaged(module, self._ignored)
        if unknown:
            raise RuntimeError(
                f"cannot compile: {len(unknown)} trainable parameters of the wrapped module were not there, or were "
                f"frozen, when it was wrapped, and would never be averaged: {enumerate_names(unknown)}. Wrap "
                "the module after changing it."
            )


@dataclass(frozen=True, slots=True)
class _Key:
    compiler: ActiveCompiler
    reduction: Reduction
    fusion: Fusion
    wire_dtype: torch.dtype | None

    def serves(self, wanted: _Key) -> bool:
        """Whether what was compiled under this key does what is wanted: any compiler does if none may be used."""
        if self.reduction is not wanted.reduction:
            return False
        fusion = (self.fusion, self.wire_dtype)
        if self.reduction is Reduction.IN_GRAPH and fusion != (wanted.fusion, wanted.wire_dtype):
            return False
        return wanted.compiler.backend is None or self.compiler == wanted.compiler


def _explaining(call: Callable[..., Any]) -> Callable[..., Any]:
    def call_as_one_graph(*inputs: Any, **kwargs: Any) -> Any:
        try:
            return call(*inputs, **kwargs)
        except Unsupported as error:
            error.add_note(
                "DistributedDataParallel averages gradients in the compiled backward only if the module is captured as "
                "one graph. Without changing the module: leave the reduction to the reducer "
                "(torch._dynamo.config.optimize_ddp = True)."
            )
            raise

    return call_as_one_graph
