"""Where a captured forward graph uses the parameters that DDP averages, and when their gradients will be complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ddp_impl.buckets.plan import ParameterSpec
from ddp_impl.torch_internals.compile import inherit_parameter_sources, set_source, source_of
from ddp_impl.torch_internals.tensors import is_bound_to_transform

#: Nodes that compute nothing: they belong to no part of a split graph.
_SOURCES = ("placeholder", "get_attr", "output")


class AveragedParameters:
    """The parameters that DDP averages, found again in a graph by identity.

    Whatever is not among them (ignored or frozen parameters, buffers, inputs) is no concern of bucketing.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], specs: Sequence[ParameterSpec]) -> None:
        """Take parameters and what planning knows of them, in one order: `specs[i].index == i`."""
        if [spec.index for spec in specs] != list(range(len(parameters))):
            raise ValueError("expected one spec per parameter, in order")
        self.parameters = tuple(parameters)
        self.specs = tuple(specs)
        self._spec_of = {id(parameter): spec for parameter, spec in zip(parameters, specs, strict=True)}

    def find(self, tensor: Any) -> ParameterSpec | None:
        """Return the spec of the parameter that `tensor` is, or is a cast of (mixed precision); None if of none."""
        spec = self._spec_of.get(id(tensor))
        if spec is not None or not isinstance(tensor, Tensor) or tensor.grad_fn is None:
            return spec
        origin = tensor.grad_fn.next_functions[0][0] if len(tensor.grad_fn.next_functions) == 1 else None
        return self._spec_of.get(id(getattr(origin, "variable", None)))

    def among(self, tensors: Iterable[Any]) -> Iterator[ParameterSpec]:
        """Yield the specs of those of `tensors` that are averaged."""
        for tensor in tensors:
            spec = self.find(tensor)
            if spec is not None:
                yield spec

    def not_averaged(self, module: nn.Module, ignored: Iterable[str]) -> list[str]:
        """Return the names of trainable parameters of `module` that are neither averaged nor ignored.

        There are some only if the module was changed after it was wrapped.
        """
        left_out = set(ignored)
        return [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and self.find(parameter) is None and name not in left_out
        ]


def computations(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of `graph` that compute something, in order."""
    return [node for node in graph.nodes if node.op not in _SOURCES]


def parameter_inputs(
    gm: fx.GraphModule, example_inputs: Sequence[Any], averaged: AveragedParameters
) -> dict[fx.Node, ParameterSpec]:
    """Return the nodes that stand for averaged parameters: inputs of the graph, as Dynamo makes them, or attributes."""
    inputs = [
        *zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True),
        *((node, attribute(gm, str(node.target))) for node in gm.graph.find_nodes(op="get_attr")),
    ]
    found = {node: averaged.find(value) for node, value in inputs}
    return {node: spec for node, spec in found.items() if spec is not None}


def first_uses(gm: fx.GraphModule, example_inputs: Sequence[Any], averaged: AveragedParameters) -> dict[int, int]:
    """Return for each averaged parameter in the graph (by index) the position of its first use.

    Positions count computations. A gradient is complete when the backward of the *first* use is over, so parameters
    become ready in order of decreasing position. Parameters are found as inputs and attributes of the graph, and inside
    called modules.
    """
    spec_of_node = parameter_inputs(gm, example_inputs, averaged)
    found: dict[int, int] = {}
    for position, node in enumerate(computations(gm.graph)):
        used = [spec_of_node[source] for source in node.all_input_nodes if source in spec_of_node]
        if node.op == "call_module":
            used += averaged.among(gm.get_submodule(str(node.target)).parameters())
        for spec in used:
            found.setdefault(spec.index, position)
    return found


def ready_order(uses: dict[int, int]) -> list[int]:
    """Return parameter indices in the order in which a backward completes their gradients.

    Parameters that one node uses first come in reverse order of registration, the usual guess.
    """
    return sorted(uses, key=lambda index: (-uses[index], -index))


def specs_of(averaged: AveragedParameters, indices: Sequence[int]) -> list[ParameterSpec]:
    """Return specs of the parameters `indices`, renumbered by their place in `indices`."""
    return [dataclasses.replace(averaged.specs[index], index=place) for place, index in enumerate(indices)]


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of `gm` to change, with the facts that Dynamo leaves for compilers; Dynamo needs the original."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    inherit(copy, gm)
    return copy


def inherit(gm: fx.GraphModule, origin: fx.GraphModule) -> None:
    """Give `gm`, a copy or a part of `origin`, the facts that Dynamo leaves for compilers beside the graph itself."""
    gm.meta = origin.meta
    inherit_parameter_sources(gm, origin)
    sources = {node.name: source_of(node) for node in origin.graph.find_nodes(op="placeholder")}
    for node in gm.graph.find_nodes(op="placeholder"):
        set_source(node, sources.get(node.name))


def attribute(module: nn.Module, target: str) -> Any:
    """Return what a `get_attr` node with this target refers to."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def value_of(node: fx.Node) -> Any:
    """Return the example value that tracing left on `node`: fake tensors, symbolic numbers; None if it left none."""
    value = node.meta.get("example_value")
    return node.meta.get("val") if value is None else value


def crosses(value: Any) -> bool:
    """Whether every compiler takes `value` as an input and gives it as an output: tensors and integers only.

    Tensors inside of a function transform (vmap, grad) are bound to its level, which ends within the graph.
    """
    if isinstance(value, Tensor):
        return not is_bound_to_transform(value)
    return isinstance(value, torch.SymInt) or type(value) is int
