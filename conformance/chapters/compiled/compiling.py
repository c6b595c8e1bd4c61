"""How a scenario compiles what it wraps: its arguments say how, and torch's public functions do it.

Any program runs compiled in a `CompilingContext`, whose `wrap` returns the wrapped module under `torch.compile`. The
truth stays what it was: compilation changes no number.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from conformance.errors import ScenarioError
from conformance.observation import Facts
from conformance.programs import RankContext, observing_warnings
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies

#: What tracing and code generation import, seconds of it.
PRELOAD = ("torch._dynamo.testing", "torch._inductor.compile_fx")

#: Who averages the gradients -> value of `torch._dynamo.config.optimize_ddp`, torch's switch for all DDPs.
REDUCTIONS: dict[str, Any] = {"split": True, "whole": False, "in_graph": "python_reducer"}
#: Ways to fuse in-graph averages -> Inductor's passes of `_fuse_ddp_communication_passes`, torch's switch for it.
FUSIONS = {
    "concat": ["fuse_ddp_with_concat_op", "schedule_comm_wait"],
    "coalesced": ["fuse_ddp_with_coalesced_op", "schedule_comm_wait"],
}
#: Functional collectives that reduce, as nodes of graphs are called.
REDUCTIONS_IN_GRAPHS = frozenset(
    f"_c10d_functional.{name}.default"
    for name in ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_")
)
#: What an ordinary training owes, when it is compiled, besides its own facts; and the requirement that asks for it.
QUIET: Facts = {"warnings": []}
OF_WARNINGS = {"warnings": ("GRAD-07",)}
WAYS = ("wrapper", "in_place", "before", "inner", "function", "backward")
BACKENDS = ("eager", "aot_eager", "inductor", "callable", "watched")


@dataclass(frozen=True)
class CompileOrder:
    """The content of a scenario's argument `compile`.

    `backend`: the name of one of torch's, "callable" (a function of the user's that runs graphs as they are) or
    "watched" (one built by `aot_autograd`). `way`: `torch.compile(ddp)` ("wrapper"), `ddp.compile()` ("in_place"),
    `DDP(torch.compile(module))` ("before"), `ddp.module.compile()` ("inner"), a compiled function that calls the
    wrapped module ("function"), or nothing but backwards ("backward", with `compiled_autograd`). `reduction` and
    `fusion` are keys of the tables above. `compiled_autograd`: backwards run inside torch's context for compiling them,
    which torch's own in-graph reduction asks for, as one graph only if `whole_backward`.
    """

    backend: str = "watched"
    way: str = "wrapper"
    reduction: str = "split"
    fusion: str = "concat"
    fullgraph: bool = False
    dynamic: bool | None = None
    compiled_autograd: bool = False
    whole_backward: bool = True

    @staticmethod
    def of(scenario: Scenario) -> CompileOrder:
        """Read the order of a scenario; raises `ScenarioError` for values that make no sense."""
        given = dict(scenario.arguments.get("compile", {}))
        if unknown := sorted(set(given) - {entry.name for entry in fields(CompileOrder)}):
            raise ScenarioError(f"{scenario.id}: unknown compile argument(s): {', '.join(unknown)}")
        order = CompileOrder(**given)
        for name, known in (("backend", BACKENDS), ("way", WAYS), ("reduction", REDUCTIONS), ("fusion", FUSIONS)):
            if getattr(order, name) not in known:
                raise ScenarioError(f"{scenario.id}: compile {name} must be one of {', '.join(known)}")
        return order


class GraphWatch:
    """What the compiler received: the graphs that Dynamo captured, and those for which it generated code."""

    def __init__(self) -> None:
        self.captured: list[torch.fx.GraphModule] = []
        self.generated: list[torch.fx.GraphModule] = []

    def backend(self, name: str) -> Any:
        """Return the backend called `name`, which reports here if it is one of ours."""
        if name == "callable":
            return self._run_as_it_is
        if name == "watched":
            from torch._dynamo.backends.common import aot_autograd

            return aot_autograd(fw_compiler=self._generate_forward, bw_compiler=self._generate)
        return name

    @property
    def num_captured(self) -> int:
        """How many graphs the backend was given; for one of torch's, how many Dynamo captured since its reset."""
        return len(self.captured) or int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    @property
    def num_compiled(self) -> int:
        """How many graphs code was made for in forward; for one of torch's backends, how many its AOTAutograd had."""
        return len(self.captured) or int(torch._dynamo.utils.counters["aot_autograd"]["total"])

    def num_reductions(self) -> int:
        """Return how many reductions are nodes of graphs that code was generated for."""
        return sum(str(node.target) in REDUCTIONS_IN_GRAPHS for graph in self.generated for node in graph.graph.nodes)

    def _run_as_it_is(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.captured.append(graph)
        return graph.forward

    def _generate_forward(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.captured.append(graph)
        return self._generate(graph, example_inputs)

    def _generate(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        self.generated.append(graph)
        return make_boxed_func(graph.forward)


class OwnSequence(nn.Sequential):
    """A sequence of layers in a class of ours: Dynamo does not start a capture in frames of torch's own classes."""

    def forward(self, hidden: Any) -> Any:
        for layer in self:
            hidden = layer(hidden)
        return hidden


class _CompiledFunction:
    """A compiled function that calls a wrapped module; the wrapped module answers for every other attribute."""

    def __init__(self, model: nn.Module, compile_: Callable[..., Any]) -> None:
        self.model = model
        self._call = compile_(lambda *inputs, **options: model(*inputs, **options))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self._call(*inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class CompilingContext(RankContext):
    """A `RankContext` that compiles every module it wraps, as an order says; facts and phases are those of `ctx`."""

    def __init__(self, ctx: RankContext, order: CompileOrder, watch: GraphWatch) -> None:
        self.__dict__.update(ctx.__dict__)
        self.uncompiled = ctx
        self._order = order
        self._watch = watch

    def build_model(self) -> nn.Module:
        """Return the fixture's model, as an instance of a class that is not torch's."""
        module = super().build_model()
        if type(module) is nn.Sequential:
            module.__class__ = OwnSequence
        return module

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Return the subject around `module`, compiled: something to call that has the subject's methods."""
        way = self._order.way
        if way == "before":
            return super().wrap(self.compile(module), **options)
        wrapped = super().wrap(module, **options)
        if way == "in_place":
            wrapped.compile(**self.keywords())
        elif way == "inner":
            wrapped.module.compile(**self.keywords())  # type: ignore[union-attr]
        elif way == "function":
            return _CompiledFunction(wrapped, self.compile)
        return self.compile(wrapped) if way == "wrapper" else wrapped

    def compile(self, call: Any) -> Any:
        return torch.compile(call, **self.keywords())

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Announce the phase; compile a backward if the order says so."""
        with super().phase(name, step), self._compiled_autograd() if name == "backward" else contextlib.nullcontext():
            yield

    def _compiled_autograd(self) -> Any:
        if not self._order.compiled_autograd:
            return contextlib.nullcontext()
        compiler = torch.compile(backend=self._watch.backend(self._order.backend), fullgraph=self._order.whole_backward)
        return torch._dynamo.compiled_autograd._enable(compiler)

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile`, or of a module's `compile()`, that the order asks for."""
        order = self._order
        return {"backend": self._watch.backend(order.backend), "fullgraph": order.fullgraph, "dynamic": order.dynamic}


@contextlib.contextmanager
def compiling(ctx: RankContext) -> Iterator[tuple[CompilingContext, GraphWatch]]:
    """Provide a context that compiles what it wraps, with torch's compiler settings as the scenario orders.

    It resets torch's compiler before and after the block, and restores torch's settings. Inductor keeps generated code
    in its usual cache, so that ranks and scenarios share it. Observes `warnings`. Every rank must enter it.
    """
    order = CompileOrder.of(ctx.scenario)
    if order.backend == "inductor" and (reason := _no_code_generation()):
        ctx.unsupported(reason)
    watch = GraphWatch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fresh_compiler())
        stack.enter_context(torch._dynamo.config.patch(optimize_ddp=REDUCTIONS[order.reduction]))
        stack.enter_context(_inductor_settings(order))
        stack.enter_context(observing_warnings(ctx))
        yield CompilingContext(ctx, order, watch), watch


@contextlib.contextmanager
def _fresh_compiler() -> Iterator[None]:
    environment, limit = dict(os.environ), sys.getrecursionlimit()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with _without_progress_bars():
            yield
    finally:
        torch._dynamo.reset()
        os.environ.clear()  # Inductor writes the folder of its cache there
        os.environ.update(environment)
        sys.setrecursionlimit(limit)  # which Inductor raises


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep torch's progress bars, which are not displayed here, from starting a monitor thread that never ends."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield
        return
    before, tqdm.monitor_interval = tqdm.monitor_interval, 0
    try:
        yield
    finally:
        tqdm.monitor_interval = before


@contextlib.contextmanager
def _inductor_settings(order: CompileOrder) -> Iterator[None]:
    import torch._inductor.config as settings

    # In a forked process there is no pool of compilers. The other two are torch's own to set; they are put back.
    with settings.patch(
        compile_threads=1, _fuse_ddp_communication=False, _fuse_ddp_communication_passes=FUSIONS[order.fusion]
    ):
        yield


def _no_code_generation() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler, which Inductor needs to generate code for a CPU"
    return ""


def graphs(least: int, most: int) -> Satisfies:
    """Return what a number of graphs satisfies."""
    return Satisfies(f"{least} to {most} graphs", _is_between, (least, most))


def _is_between(got: int, least: int, most: int) -> bool:
    return least <= got <= most
