"""Cutting a captured forward graph where DDP's buckets end, so that compiled backwards overlap with communication.

A graph compiled whole hands out all gradients at the end of one opaque backward. Of parts that end where buckets
do, each compiled on its own, the reducer's hooks see a bucket's gradients while the parts before it still compute. The
cuts come from the planner of the eager reducer, given the order in which the graph's backward completes gradients.

A cut is moved towards the beginning where it would leave a part from which nothing is used elsewhere, or would separate
a container of tensors, or a context, from its users: compilers take and return tensors and integers. Other numbers are
computed again in every part that uses them. What comes before the last gradient stays in the last bucket's part.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.split_module import split_module

from ddp_impl.base.options import BucketCaps
from ddp_impl.base.telemetry import graph_log, log_cuts
from ddp_impl.buckets.plan import ParameterSpec, plan_for_order
from ddp_impl.torch_internals.compile import (
    GLOBAL_STATE,
    FakeTensorMode,
    TracingContext,
    detect_fake_mode,
    inherit_parameter_sources,
    set_source,
    source_of,
    trace_structured,
    tracing,
)
from ddp_impl.torch_internals.tensors import is_bound_to_transform

#: Nodes that compute nothing: they belong to no part of a split graph.
_SOURCES = ("placeholder", "get_attr", "output")


class AveragedParameters:
    """The parameters that DDP averages, found again in a graph by identity.

    A backend refers to it weakly: Dynamo keeps a backend with what it compiled, for as long as the parameters live. A
    weak reference to a parameter would forbid `torch.utils.swap_tensors`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], specs: Sequence[ParameterSpec]) -> None:
        """Take parameters and what planning knows of them, in one order: `specs[i].index == i`."""
        if [spec.index for spec in specs] != list(range(len(parameters))):
            raise ValueError("expected one spec per parameter, in order")
        self._parameters = tuple(parameters)  # alive, so that no other tensor has the id of one
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
        """Return the names of trainable parameters that came after wrapping: neither averaged nor ignored."""
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
    """Return for each averaged parameter in the graph the position of its first use, as computations count.

    There its gradient becomes complete: parameters become ready in order of decreasing position.
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
    """Return parameter indices in the order in which a backward completes their gradients."""
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
    """Whether compilers take `value` as an input: an integer, or a tensor that is bound to no function transform."""
    if isinstance(value, Tensor):
        return not is_bound_to_transform(value)
    return isinstance(value, torch.SymInt) or type(value) is int


#: A Dynamo backend: takes a graph and example inputs, returns what runs it.
CompilerBackend = Callable[..., Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Where a graph is cut, and for the sake of which buckets.

    `starts`: positions of parts' first computations, from 0. `buckets`: names of parameters, in launch order.
    `moved_cuts`: as (where the bucket ends, where the cut is).
    """

    starts: tuple[int, ...]
    buckets: tuple[tuple[str, ...], ...]
    bucket_bytes: tuple[int, ...]
    moved_cuts: tuple[tuple[int, int], ...] = ()

    @property
    def num_parts(self) -> int:
        """How many graphs are compiled."""
        return len(self.starts)

    def summary(self) -> str:
        """Return in one line how many buckets and parts there are."""
        num_averaged = sum(map(len, self.buckets))
        return (
            f"DistributedDataParallel: graph with {num_averaged} averaged parameters: {len(self.buckets)} buckets, "
            f"compiled in {self.num_parts} parts"
        )

    def table(self) -> str:
        """Return the buckets as text, one line per parameter."""
        width = max((len(name) for bucket in self.buckets for name in bucket), default=0)
        lines = [f"{'bucket':>6}  {'bytes':>12}  {'parameters':<{width}}".rstrip()]
        for index, (bucket, num_bytes) in enumerate(zip(self.buckets, self.bucket_bytes, strict=True)):
            for place, name in enumerate(bucket):
                lines.append(f"{index:>6}  {num_bytes:>12}  {name}" if place == 0 else f"{'':>6}  {'':>12}  {name}")
        lines += [f"cut moved from computation {end} to {cut}" for end, cut in self.moved_cuts]
        return "\n".join(lines)


def plan_split(
    gm: fx.GraphModule, example_inputs: Sequence[Any], averaged: AveragedParameters, caps: BucketCaps
) -> SplitPlan:
    """Decide where to cut `gm`; changes nothing. Parameters whose reduction is delayed anyway cause no cut."""
    uses = {
        index: position
        for index, position in first_uses(gm, example_inputs, averaged).items()
        if not averaged.specs[index].delayed
    }
    order = ready_order(uses)
    specs = specs_of(averaged, order)
    plan = plan_for_order(specs, range(len(specs)), caps)
    ends = [min(uses[order[place]] for place in bucket) for bucket in plan.buckets]
    starts, moved = _place_cuts(computations(gm.graph), ends)
    return SplitPlan(
        starts=starts,
        buckets=tuple(tuple(specs[place].name for place in bucket) for bucket in plan.buckets),
        bucket_bytes=tuple(sum(specs[place].num_bytes for place in bucket) for bucket in plan.buckets),
        moved_cuts=moved,
    )


def _place_cuts(nodes: Sequence[fx.Node], ends: Sequence[int]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the starts of the parts and the cuts that were moved, given where buckets end."""
    first_gradient = min(ends, default=0)
    glued = _glued(nodes)
    starts: list[int] = []
    moved: list[tuple[int, int]] = []
    part: set[fx.Node] = set()
    position = len(nodes)
    for end in sorted(set(ends), reverse=True):
        if end >= position:
            continue  # an earlier cut was moved beyond this bucket's end
        while position > end:
            position -= 1
            part.add(nodes[position])
        while position > 0 and (glued[position] or not _is_used_outside(part)):
            position -= 1
            part.add(nodes[position])
        if position <= first_gradient:
            break
        if position != end:
            moved.append((end, position))
        starts.append(position)
        part = set()
    return (0, *reversed(starts)), tuple(moved)


def _is_used_outside(part: set[fx.Node]) -> bool:
    return any(user not in part for node in part for user in node.users)


def _glued(nodes: Sequence[fx.Node]) -> list[bool]:
    """Return for each position whether no cut may be made just before it."""
    position_of = {node: position for position, node in enumerate(nodes)}
    open_until = 0
    glued = []
    for position, node in enumerate(nodes):
        closes_a_context = not node.all_input_nodes and not node.users and node.target not in GLOBAL_STATE
        glued.append(position <= open_until or closes_a_context)
        if node.users and node.target not in GLOBAL_STATE and not _may_be_cut_off(value_of(node)):
            open_until = max([open_until, *(position_of[user] for user in node.users if user in position_of)])
    return glued


def _may_be_cut_off(value: Any) -> bool:
    return crosses(value) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether `value` is made of numbers only, so that computing it twice costs and changes nothing."""
    if isinstance(value, (torch.SymBool, torch.SymFloat, torch.SymInt, bool, float, int, torch.dtype, torch.device)):
        return True
    return isinstance(value, tuple) and all(_is_plain(item) for item in value)


def split_graph(gm: fx.GraphModule, plan: SplitPlan) -> fx.GraphModule:
    """Return a graph that calls one submodule per part of `plan`, in the original order; `gm` is used up."""
    part_of: dict[fx.Node, int] = {}
    part = -1
    starts = set(plan.starts)
    for position, node in enumerate(computations(gm.graph)):
        part += position in starts
        part_of[node] = part
    _compute_numbers_where_used(gm.graph, part_of)
    split = split_module(gm, gm, part_of.__getitem__, keep_original_order=True)
    for _, submodule in parts(split):
        inherit(submodule, gm)
    return split


def parts(split: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """Yield the calls of a split graph with the modules that they call, in order."""
    for node in split.graph.find_nodes(op="call_module"):
        yield node, cast(fx.GraphModule, split.get_submodule(str(node.target)))


def _compute_numbers_where_used(graph: fx.Graph, part_of: dict[fx.Node, int]) -> None:
    # From the end: a copy is a user of what it is computed from, and that comes before it.
    for node in reversed(list(part_of)):
        value = value_of(node)
        if crosses(value) or not _is_plain(value):
            continue
        users_elsewhere: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if user in part_of and part_of[user] != part_of[node]:
                users_elsewhere.setdefault(part_of[user], []).append(user)
        for part, users in users_elsewhere.items():
            with graph.inserting_before(min(users)):
                copied = graph.node_copy(node)
            part_of[copied] = part
            for user in users:
                user.replace_input_with(node, copied)


class Around:
    """A Dynamo backend around the user's `backend`, which is reset with it."""

    def __init__(self, backend: CompilerBackend) -> None:
        self.backend = backend

    def reset(self) -> None:
        """Reset the user's backend; `torch.compiler.reset` calls it."""
        if hasattr(self.backend, "reset"):
            self.backend.reset()


class SplitBackend(Around):
    """A Dynamo backend that cuts graphs where buckets end, by `splits`, and compiles the parts by `backend`."""

    def __init__(self, backend: CompilerBackend, averaged: AveragedParameters, caps: BucketCaps) -> None:
        super().__init__(backend)
        self.averaged = averaged
        self.caps = caps
        self.splits: list[SplitPlan] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile `gm`; what `backend` raises is raised on, with a note on which part it was given."""
        fake_mode = _ensure_values(gm, example_inputs)
        plan = plan_split(gm, example_inputs, self.averaged, self.caps)
        self.splits.append(plan)
        log_cuts(plan.summary(), plan.table())
        if plan.num_parts == 1:
            return self.backend(gm, example_inputs, **options)
        graph_log.debug("graph before it is split\n%s", gm.graph)
        split = split_graph(gm, plan)
        log_artifacts(split, plan)
        given = dict(zip(split.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
        for number, (call, part) in enumerate(list(parts(split))):
            compiled = self._compile(part, _inputs_of(split, call, part, given, fake_mode), options, number, plan)
            split.delete_submodule(str(call.target))
            split.add_submodule(str(call.target), compiled)
        split.recompile()
        return split

    def _compile(
        self, part: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], number: int, plan: SplitPlan
    ) -> nn.Module:
        (output,) = part.graph.find_nodes(op="output")
        returns_one = not isinstance(output.args[0], tuple)
        if returns_one:  # compilers expect graphs that return tuples
            output.args = ((output.args[0],),)
            part.recompile()
        try:
            with _own_tracing_context():
                compiled = self.backend(part, inputs, **options)
        except Exception as error:
            error.add_note(
                f"This was part {number + 1} of {plan.num_parts} of a graph that DistributedDataParallel cut at its "
                "bucket boundaries. If the backend cannot compile parts, raise bucket_cap_mb until there is one."
            )
            raise
        return _CompiledPart(compiled, returns_one)


class _CompiledPart(nn.Module):
    def __init__(self, compiled: Callable[..., Any], returns_one: bool) -> None:
        super().__init__()
        self._compiled = compiled
        self._returns_one = returns_one

    def forward(self, *inputs: Any) -> Any:
        outputs = self._compiled(*inputs)
        return outputs[0] if self._returns_one else outputs


@contextlib.contextmanager
def _own_tracing_context() -> Iterator[None]:
    """Give each part a tracing context of its own, on which compilers leave what its backward needs."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    with tracing(copy.copy(context)):
        yield


def _ensure_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> FakeTensorMode | None:
    """Make sure that computations carry example values; return the mode of the fake ones if there was no trace."""
    if TracingContext.try_get() is not None:
        return None
    mode: FakeTensorMode | None = detect_fake_mode(example_inputs)
    if mode is None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(gm, mode).propagate(*example_inputs)
    return mode


def _inputs_of(
    split: fx.GraphModule,
    call: fx.Node,
    part: fx.GraphModule,
    given: dict[fx.Node, Any],
    fake_mode: FakeTensorMode | None,
) -> list[Any]:
    """Return example inputs of `part`: the graph's own where it has them, else the traced values of what crosses."""
    inputs = []
    sources = cast("tuple[fx.Node, ...]", call.args)
    for source, placeholder in zip(sources, part.graph.find_nodes(op="placeholder"), strict=True):
        if source in given:
            value = given[source]
        elif source.op == "get_attr":
            value = attribute(split, str(source.target))
        else:
            value = value_of(placeholder)
        if fake_mode is not None and isinstance(value, Tensor):
            value = fake_mode.from_tensor(value)
        inputs.append(value)
    return inputs


def log_artifacts(split: fx.GraphModule, plan: SplitPlan) -> None:
    """Log the parts of a graph, for those who ask for graphs."""
    graph_log.debug("graph after it was split\n%s", split.graph)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "ddp_split_graph", "encoding": "string"},
        payload_fn=lambda: f"{plan.table()}\n\n{split.print_readable(print_output=False)}",
    )
    for node, part in parts(split):
        graph_log.debug("%s\n%s", node.target, part.graph)
