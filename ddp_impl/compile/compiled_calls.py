"""Through what the wrapper calls its module while `torch.compile` is at work, and who averages the gradients then.

Whatever is compiled while a forward of the wrapper runs is compiled by our backend around its own. `torch.compile(ddp)`
gives no sign: Dynamo installs a frame callback for the thread, which leads to the user's backend, and calls the module.
The wrapper's forward is excluded from capture and runs with that callback in place. Dynamo's state is read and never
changed (docs/decisions/compiled_ddp.md). Sharded modules compile by `OwnGraphs` around that backend.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from ddp_impl.base import messages
from ddp_impl.base.messages import enumerate_names
from ddp_impl.base.nested_tensors import is_distributed
from ddp_impl.base.options import BucketCaps, ReducerOptions
from ddp_impl.base.telemetry import log
from ddp_impl.buckets.comm_hooks import wire_format
from ddp_impl.compile.fusion import FusedBucket, Fusion
from ddp_impl.compile.graph_split import Around, AveragedParameters, SplitBackend, SplitPlan
from ddp_impl.compile.in_graph import InGraphBackend, InGraphReducer
from ddp_impl.torch_internals.compile import (
    Unsupported,
    captures_frames,
    exchanging_callbacks,
    fusion_passes,
    is_compiled,
    optimize_ddp,
    skip,
    wants_one_graph,
    with_backend,
    without_autograd_cache,
    wrapped_callback,
)

_Function = Callable[..., Any]


def runs_outside_graphs(function: _Function) -> _Function:
    """Let `function` run as it is under `torch.compile`, and capture what it calls; `disable` breaks fullgraph."""
    return skip(function)


@dataclass(frozen=True, slots=True)
class ActiveCompiler:
    """The arguments of `torch.compile`; `backend` is None while Dynamo may only run what is compiled already."""

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


class OwnGraphs(Around):
    """Compiles by `backend` without AOTAutograd's cache on the disk, which knows a mesh by its shape.

    It would return graphs that communicate over another rank's groups (pytorch/pytorch#188390, torch 2.13).
    """

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile `gm`."""
        with without_autograd_cache():
            compiled: Callable[..., Any] = self.backend(gm, example_inputs, **options)
        return compiled


class WhereAveraged(enum.Enum):
    """How the graphs of a compiled module are compiled, for the sake of who averages the gradients."""

    #: The reducer, from hooks; graphs are cut where buckets end, so that it can begin before the backward is over.
    SPLIT = "split"
    #: The reducer, from hooks, after the backward of a graph that is compiled whole.
    WHOLE = "whole"
    #: The compiled backward itself.
    IN_GRAPH = "in_graph"


@dataclass(frozen=True, slots=True)
class InGraph:
    """What an average inside a graph depends on: whose ranks take part, and what gradients are cast to on the way."""

    group: dist.ProcessGroup
    wire_dtype: torch.dtype | None = None


def wanted_reduction() -> WhereAveraged:
    """Return what `torch._dynamo.config.optimize_ddp` asks for, in torch's values. Equal on every rank."""
    wanted = optimize_ddp()
    if isinstance(wanted, str) and wanted.startswith("python_reducer"):
        return WhereAveraged.IN_GRAPH
    return WhereAveraged.WHOLE if wanted in (False, "no_optimization") else WhereAveraged.SPLIT


def in_graph(
    wanted: WhereAveraged, averaged: AveragedParameters, options: ReducerOptions, group: dist.ProcessGroup, *,
    reducer_must: bool, comm_hook: tuple[Any, Any] | None, param_dtype: torch.dtype | None,
) -> InGraph | None:  # fmt: skip
    """Return how the compiled backward averages if it can do what is `wanted`; None: the reducer averages.

    All arguments are equal on every rank. `reducer_must`: for a reason beside the options. `comm_hook`: (state, hook)
    as registered. `param_dtype`: what mixed precision computes in. A graph knows only dense gradients, of which none
    must be reduced after the others. It does only the plain average and those comm hooks that cast.
    """
    wire = wire_format(comm_hook, group)
    casts_otherwise = param_dtype is not None and options.reduce_dtype is not param_dtype
    reducer_must = reducer_must or options.find_unused_parameters or options.static_graph or options.finalizes_by_hand
    if wanted is not WhereAveraged.IN_GRAPH or reducer_must or wire is None or casts_otherwise:
        return None
    if any(spec.sparse or spec.delayed for spec in averaged.specs):
        return None
    return InGraph(group, wire.dtype or param_dtype)


def reduction_of(wanted: WhereAveraged, answer: InGraph | None) -> WhereAveraged:
    """Return how graphs are compiled, given what `in_graph` answered; split if the reducer has to average."""
    if answer is not None:
        return WhereAveraged.IN_GRAPH
    return WhereAveraged.SPLIT if wanted is WhereAveraged.IN_GRAPH else wanted


class CompiledCalls:
    """The compiled forms of one wrapped module, and the backends that compile them: one around each of the user's.

    Other modules that are compiled with the same backend are not affected, nor what is compiled outside of forwards.
    """

    def __init__(
        self,
        averaged: AveragedParameters,
        ignored: frozenset[str],
        caps: BucketCaps,
        agree: Callable[[Sequence[int] | None], Sequence[int] | None],
    ) -> None:
        """Take what DDP averages and ignores, the caps, and `agree(order)`: collective, rank 0's or None."""
        self.averaged = averaged
        self._ignored = ignored
        self._caps = caps
        self.agree = agree
        self._calls: list[tuple[ActiveCompiler, Callable[..., Any]]] = []
        self.backends: list[tuple[tuple[Any, _Aim], Any, Any]] = []  # ours, and what Dynamo is given of it
        self.callbacks: weakref.WeakKeyDictionary[Any, dict[_Aim, Any]] = weakref.WeakKeyDictionary()
        self._reducers: dict[tuple[Fusion, torch.dtype | None], InGraphReducer] = {}
        self._forward: _Forward | None = None
        self._warned: set[str] = set()
        # What the ranks of a group have agreed on: rank 0's order, or None if not all average in graph.
        self._agreed: tuple[dist.ProcessGroup, Sequence[int] | None] | None = None
        self.averages_in_graph: InGraphReducer | None = None

    def for_one_forward(
        self, module: nn.Module, compiler: ActiveCompiler | None, averages: Callable[[], InGraph | None]
    ) -> AbstractContextManager[None]:
        """Compile for this forward what is compiled in the block; enter it at once, with Dynamo disabled."""
        self._forward = _Forward(module, compiler, averages)
        self.averages_in_graph = None
        return exchanging_callbacks(self.exchanged, self._forward_is_over)

    def _forward_is_over(self) -> None:
        self._forward = None

    def current(self, module: nn.Module) -> Callable[..., Any]:
        """Return what this forward calls in place of `module`; `RuntimeError` for parameters that came later."""
        forward = self._forward
        if forward is None or not self.is_whole:
            return module
        call = module if forward.compiler is None else self._callable_for(module, forward.compiler)
        self._find_aim(forward)
        if forward.in_graph is None:
            return call
        return functools.partial(self._call_as_one_graph, forward, forward.in_graph.group, call)

    @property
    def is_whole(self) -> bool:
        """Whether this forward calls a module that is compiled as a whole, not parts of it or nothing at all."""
        forward = self._forward
        return forward is not None and (forward.compiler is not None or is_compiled(forward.module))

    @property
    def reduction(self) -> WhereAveraged:
        """How graphs are compiled if nothing speaks against it."""
        return wanted_reduction()

    @property
    def fusion(self) -> Fusion:
        """How in-graph averages are fused: as Inductor's passes for DDP say. Equal on every rank."""
        passes = fusion_passes()
        for fusion, name in ((Fusion.CONCAT, "concat"), (Fusion.COALESCED, "coalesced")):
            if any(name in each for each in passes):
                return fusion
        return Fusion.NONE

    @property
    def splits(self) -> list[SplitPlan]:
        """The plans of all graphs that were compiled in parts, in that order per backend."""
        return [plan for _, backend, _ in self.backends if isinstance(backend, SplitBackend) for plan in backend.splits]

    @property
    def fused(self) -> list[tuple[FusedBucket, ...]]:
        """The buckets of all backward graphs that average in graph, in the order of compilation per backend."""
        return [
            fused for _, backend, _ in self.backends if isinstance(backend, InGraphBackend) for fused in backend.fused
        ]

    def _callable_for(self, module: nn.Module, compiler: ActiveCompiler) -> Callable[..., Any]:
        """Return `module` as compiled by `compiler`, itself if that may compile nothing and has not."""
        for known, call in self._calls:
            if compiler.backend is None or known == compiler:
                return call
        if compiler.backend is None:
            return module
        call = torch.compile(module, backend=compiler.backend, fullgraph=compiler.fullgraph)
        self._calls.append((compiler, call))
        return call

    def exchanged(self, callback: Any) -> Any:
        """Return the callback with which a function that is called in this forward has its frames compiled."""
        forward = self._forward
        if forward is None or not captures_frames(callback):
            return callback
        aim = self._find_aim(forward)
        known = self.callbacks.setdefault(callback, {})
        if aim not in known:
            backend = compiler_behind(callback).backend
            ours = self.backend_for(backend, aim, forward.module)
            one_graph = aim.reduction is WhereAveraged.IN_GRAPH
            known[aim] = callback if ours is backend else with_backend(callback, ours, one_graph=one_graph)
        return known[aim]

    def _find_aim(self, forward: _Forward) -> _Aim:
        """Return what is compiled for in this forward."""
        if forward.aim is None:
            answer = forward.averages()
            if answer is not None and not self.is_whole:
                self._warn_once(messages.IN_GRAPH_NEEDS_THE_WHOLE)
                answer = None
            if answer is not None and self._agreed == (answer.group, None):
                answer = None
            if answer is not None:
                self._reducer_for(answer)  # the group may be another one than when it was compiled
            forward.in_graph = answer
            fusion = Fusion.NONE if answer is None else self.fusion
            wire_dtype = None if answer is None else answer.wire_dtype
            forward.aim = _Aim(reduction_of(self.reduction, answer), fusion, wire_dtype)
        return forward.aim

    def backend_for(self, backend: Any, aim: _Aim, module: nn.Module) -> Any:
        """Return our backend around the user's: the same one if that is all there is to do, or is one of ours."""
        if any(given is backend for _, _, given in self.backends):
            return backend
        key = (backend, aim)
        for known, _, given in self.backends:
            if known == key:
                return given
        self._check_unchanged(module)
        ours = backend
        if aim.reduction is WhereAveraged.IN_GRAPH:
            averages = self._reducers[aim.fusion, aim.wire_dtype]
            begin = functools.partial(_weakly(self._begin_in_graph), averages)
            ours = InGraphBackend(backend, averages, _weakly(self._agree), begin)
        elif aim.reduction is WhereAveraged.SPLIT:
            ours = SplitBackend(backend, weakref.proxy(self.averaged), self._caps)
        given = OwnGraphs(ours) if any(map(is_distributed, module.parameters())) else ours
        if given is not backend:
            self.backends.append((key, ours, given))
        return given

    def _reducer_for(self, in_graph: InGraph) -> InGraphReducer:
        key = (self.fusion, in_graph.wire_dtype)
        if key not in self._reducers:
            self._reducers[key] = InGraphReducer(weakref.proxy(self.averaged), self._caps, in_graph.group, *key)
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

    def _call_as_one_graph(
        self, forward: _Forward, group: dist.ProcessGroup, call: Callable[..., Any], *inputs: Any, **kwargs: Any
    ) -> Any:
        """Run a forward that averages in its graph, or split graphs if a rank cannot capture it as one."""
        try:
            return call(*inputs, **kwargs)
        except Unsupported as error:
            if self._agreed is not None and self._agreed[0] is group:
                error.add_note(messages.IN_GRAPH_NO_MORE)
                raise
            self._agreed = group, self.agree(None)
            self._warn_once(messages.in_graph_breaks(str(error).partition("\n")[0]))
        except _OthersSplitError:
            self._warn_once(messages.IN_GRAPH_BREAKS_ELSEWHERE)
        except _OtherOrderError:
            self._reducers.clear()
            self.callbacks.clear()
            self.backends = [entry for entry in self.backends if not isinstance(entry[1], InGraphBackend)]
        forward.aim = forward.in_graph = None
        return call(*inputs, **kwargs)

    def _agree(self, order: Sequence[int]) -> Sequence[int] | None:
        """Return what the ranks of this forward's group agree on, the first of them with this rank's `order`."""
        if self._forward is None or self._forward.in_graph is None:
            return order
        group = self._forward.in_graph.group
        if self._agreed is None or self._agreed[0] is not group:
            self._agreed = group, self.agree(order)
        return self._agreed[1]

    def _begin_in_graph(self, averages: InGraphReducer) -> None:
        """Take note that a graph runs whose backward averages as `averages` says, when all ranks have one."""
        if self._forward is None or self._forward.in_graph is None or averages.rules is None:
            return
        order = self._agree(averages.rules.order)
        if order is None:
            raise _OthersSplitError
        if not averages.follow(order):
            raise _OtherOrderError
        self.averages_in_graph = averages

    def forget_answer(self) -> None:
        """Ask the ranks anew whether all have one graph; all ranks of the group must call it."""
        self._agreed = None

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)


def _weakly(method: _Function) -> _Function:
    """Return `method` without its object, which Dynamo would keep with the graph, and which lives while that runs."""
    weak = weakref.WeakMethod(method)
    return lambda *arguments: weak()(*arguments)  # type: ignore[misc]


class _OthersSplitError(Exception):
    """Another rank cannot capture its forward as one graph."""


class _OtherOrderError(Exception):
    """The graph was compiled for another order of gradients, rank 0's of a group that is no more."""


@dataclass(slots=True)
class _Forward:
    """A forward that runs; `aim` and `in_graph` (how its graph averages, None if not at all) are found when needed."""

    module: nn.Module
    compiler: ActiveCompiler | None
    averages: Callable[[], InGraph | None]
    aim: _Aim | None = None
    in_graph: InGraph | None = None


@dataclass(frozen=True, slots=True)
class _Aim:
    """What graphs are compiled for."""

    reduction: WhereAveraged
    fusion: Fusion
    wire_dtype: torch.dtype | None
