"""Gradients averaged inside the compiled backward: the collectives are nodes of its graph, where compilers see them.

`InGraphBackend` passes every averaged parameter of a forward graph through `average_in_backward` and compiles it with
the user's backend; between tracing and code generation `fusion` fuses the averages that the backward graph asks for.
Inductor and what `aot_autograd` builds let us in there; with any other backend the reducer averages. The graph must be
the only one of the forward and use all averaged parameters: all ranks must make the same collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from ddp_impl.base.messages import enumerate_names
from ddp_impl.base.options import BucketCaps
from ddp_impl.compile.averaging import GroupAlias, Nobody, average_in_backward
from ddp_impl.compile.fusion import FusedBucket, Fusion, FusionRules, fuse
from ddp_impl.compile.graph_split import (
    Around,
    AveragedParameters,
    CompilerBackend,
    copied,
    first_uses,
    parameter_inputs,
    ready_order,
)
from ddp_impl.torch_internals.compile import (
    AotAutograd,
    FakeTensor,
    aot_autograd,
    aot_eager_arguments,
    default_partition,
    inductor_compiler,
    set_source,
    without_autograd_cache,
)
from ddp_impl.wire.collectives import size_of


class InGraphReducer:
    """What the graphs of a module refer to: its group and divisor, which may change, and its fusion rules."""

    def __init__(
        self,
        averaged: AveragedParameters,
        caps: BucketCaps,
        group: dist.ProcessGroup,
        fusion: Fusion = Fusion.CONCAT,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.averaged = averaged
        self._caps, self._fusion, self._wire_dtype = caps, fusion, wire_dtype
        self.rules: FusionRules | None = None  # until ranks have agreed on an order
        self.divisor = torch.tensor(float(size_of(group)), device="cpu")
        self.group = GroupAlias(group)
        self._members, self._nobody = group, Nobody()
        weakref.finalize(self, self.group.forget)

    def refer_to(self, group: dist.ProcessGroup) -> None:
        """Average over `group` from now on, in what is compiled already too."""
        self._members = group

    def follow(self, order: Sequence[int]) -> bool:
        """Fill buckets in `order`, rank 0's; return whether what is compiled already does. Equal on every rank."""
        if self.rules is None:
            self.rules = FusionRules(self.averaged.specs, tuple(order), self._caps, self._fusion, self._wire_dtype)
        return self.rules.order == tuple(order)

    def take_effect(self, averages: bool) -> None:
        """Let the graphs that run from now on average, or leave their gradients as they are. Not collective."""
        group = self._members if averages else self._nobody
        if self.group.refer_to(group):
            self.divisor.data.fill_(size_of(group))  # data: graphs saved it in forward, and need the value of now


class InGraphBackend(Around):
    """A Dynamo backend that has gradients averaged in the backward graphs of `backend`; `fused`: their buckets."""

    def __init__(
        self,
        backend: CompilerBackend,
        reducer: InGraphReducer,
        agree: Callable[[Sequence[int]], Sequence[int] | None],
        begins: Callable[[], None],
    ) -> None:
        """Take `agree(order)`, which returns rank 0's order or None, and what `begins` before a forward graph runs."""
        super().__init__(backend)
        self._agree, self._begins = agree, begins
        self.reducer = reducer
        self.fused: list[tuple[FusedBucket, ...]] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile `gm`; raises `RuntimeError`, naming parameters, if it uses some of those averaged and not all."""
        uses = first_uses(gm, example_inputs, self.reducer.averaged)
        if not uses:
            return self.backend(gm, example_inputs, **options)
        self._check_all_present(uses)
        if self.reducer.rules is None:
            order = ready_order(uses)
            self.reducer.follow(self._agree(order) or order)
        backend = with_backward_pass(self.backend, self.fuse, repr(self.reducer.rules))
        if backend is self.backend:
            return self.backend(gm, example_inputs, **options)
        gm = copied(gm)
        self._insert_averages(gm, example_inputs)
        divisor = self.reducer.divisor
        compiled = backend(gm, [*example_inputs, divisor], **options)

        def run(*inputs: Any) -> Any:
            self._begins()
            return compiled(*inputs, divisor)

        return run

    def _insert_averages(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        graph = gm.graph
        inputs = parameter_inputs(gm, example_inputs, self.reducer.averaged)
        last_input = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_before(last_input.next):
            divisor = graph.placeholder("ddp_divisor")
            divisor.meta["example_value"] = _fake_like(inputs, self.reducer.divisor)
            set_source(divisor, None)
        with graph.inserting_before(divisor.next):
            for node, spec in inputs.items():
                users = list(node.users)
                averaged = graph.call_function(
                    average_in_backward, (node, divisor, self.reducer.group.name, spec.index)
                )
                averaged.meta.update({key: node.meta[key] for key in ("example_value", "val") if key in node.meta})
                for user in users:
                    user.replace_input_with(node, averaged)
        gm.recompile()

    def _check_all_present(self, present: Collection[int]) -> None:
        missing = [spec.name for spec in self.reducer.averaged.specs if spec.index not in present]
        if missing:
            raise RuntimeError(
                "gradients can be averaged in the compiled backward only if one graph uses every parameter, but "
                f"{len(missing)} of {len(self.reducer.averaged.specs)} are not used in this graph: "
                f"{enumerate_names(missing)}. Wrap the module with find_unused_parameters=True, or leave the reduction "
                "to the reducer (torch._dynamo.config.optimize_ddp = True)."
            )

    def fuse(self, gm: fx.GraphModule) -> None:
        """Put the reductions of a backward graph where its gradients are there, fused into buckets."""
        rules = {self.reducer.group.name: self.reducer.rules} if self.reducer.rules is not None else {}
        fused = fuse(gm.graph, rules)
        if fused:
            self.fused.append(fused)
            gm.recompile()


def with_backward_pass(
    backend: CompilerBackend, graph_pass: Callable[[fx.GraphModule], None], identity: str
) -> CompilerBackend:
    """Return `backend` with `graph_pass`, known by `identity`, changing backward graphs; itself if it cannot."""
    name = getattr(backend, "compiler_name", None)
    function = getattr(backend, "compiler_fn", backend)
    if name == "inductor" and hasattr(backend, "config"):
        return _inductor_with(graph_pass, identity, backend.config)
    if name == "aot_eager":
        return _aot_with(graph_pass, aot_eager_arguments())
    if isinstance(function, AotAutograd):
        return _aot_with(graph_pass, function.kwargs)
    return backend


def _inductor_with(
    graph_pass: Callable[[fx.GraphModule], None], identity: str, config: dict[str, Any]
) -> CompilerBackend:
    compile_fx, partitioned_by = inductor_compiler()

    def compile_with_pass(
        gm: fx.GraphModule, example_inputs: Sequence[Any], config_patches: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        patches = {**config, **(config_patches or {})}
        patches.update(partitioned_by(partial(_partition, graph_pass), identity, patches))
        with without_autograd_cache():  # it knows graphs before they are partitioned
            return compile_fx(gm, list(example_inputs), config_patches=patches)

    return compile_with_pass


def _aot_with(graph_pass: Callable[[fx.GraphModule], None], arguments: dict[str, Any]) -> CompilerBackend:
    partition = arguments.get("partition_fn", default_partition)
    backend: CompilerBackend = aot_autograd(**{**arguments, "partition_fn": partial(_partition, graph_pass, partition)})
    return backend


def _partition(
    graph_pass: Callable[[fx.GraphModule], None], partition: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    forward, backward = partition(*args, **options)
    graph_pass(backward)
    return forward, backward


def _fake_like(inputs: dict[fx.Node, Any], tensor: Tensor) -> Tensor:
    for node in inputs:
        value = node.meta.get("example_value")
        if isinstance(value, FakeTensor):
            return value.fake_mode.from_tensor(tensor)
    return tensor
