"""Fusing the averages of single gradients in a backward graph into few collectives that overlap with it.

The graph calls `ddp_impl::average_gradient` once per gradient. `fuse` replaces these calls, bucket by bucket, as
`Fusion` says. Gradients share a collective if they have one process group, dtype and device, and belong to one model,
whose group has a name of its own. A bucket is reduced as soon as its last gradient is there, but in the order of the
plan, which is equal on all ranks even if their graphs are not; its result is waited for where it is first used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from ddp_impl.base.options import BucketCaps
from ddp_impl.buckets.plan import ParameterSpec, plan_for_order
from ddp_impl.compile.averaging import average_gradient  # noqa: F401 - registers the operator
from ddp_impl.compile.graph_split import value_of
from ddp_impl.torch_internals.compile import detect_fake_mode
from ddp_impl.torch_internals.tensors import foreach_div_operator, functional_collectives

aten = torch.ops.aten
AVERAGE = torch.ops.ddp_impl.average_gradient.default


class Fusion(enum.Enum):
    """How the gradients of a bucket are reduced together."""

    CONCAT = "concat"  # copied into one tensor, which is divided, reduced and split
    COALESCED = "coalesced"  # divided where they are, in one operation
    NONE = "none"  # one collective each


@dataclass(frozen=True, slots=True)
class FusionRules:
    """How the gradients of one model are fused, in rank 0's `order`; equal on every rank."""

    specs: tuple[ParameterSpec, ...]
    order: tuple[int, ...]
    caps: BucketCaps
    fusion: Fusion = Fusion.CONCAT
    wire_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class FusedBucket:
    """A bucket of a fused graph: of which group, of what dtype (on the wire), with which parameters."""

    group: str
    dtype: torch.dtype
    names: tuple[str, ...]
    num_bytes: int
    num_collectives: int


@dataclass(frozen=True, slots=True)
class _Gradient:
    spec: ParameterSpec
    call: fx.Node
    value: Tensor

    @property
    def source(self) -> fx.Node:
        return cast(fx.Node, self.call.args[0])


def fuse(graph: fx.Graph, rules: Mapping[str, FusionRules]) -> tuple[FusedBucket, ...]:
    """Replace the averages in `graph` as the `rules` of their group's name say; return what was fused."""
    gradients: dict[str, list[_Gradient]] = {}
    for node in graph.find_nodes(op="call_function", target=AVERAGE):
        _, _, group, index = node.args
        if group in rules:
            value = cast(Tensor, value_of(node))
            gradients.setdefault(group, []).append(_Gradient(rules[group].specs[index], node, value))
    fused: list[FusedBucket] = []
    for group, members in gradients.items():
        fused += Fuser(graph, group, rules[group]).fuse(members)
    graph.lint()
    return tuple(fused)


def plan_buckets(rules: FusionRules, present: Sequence[tuple[ParameterSpec, Tensor]]) -> list[list[int]]:
    """Return buckets as places in `present`: in rank 0's order, by kind, up to the caps."""
    ordered = sorted(range(len(present)), key=lambda place: rules.order.index(present[place][0].index))
    specs = []
    for number, place in enumerate(ordered):
        spec, value = present[place]
        kind = (str(rules.wire_dtype or value.dtype), str(value.device))
        specs.append(dataclasses.replace(spec, index=number, kind=kind, sparse=False))
    plan = plan_for_order(specs, range(len(specs)), rules.caps)
    return [[ordered[number] for number in bucket] for bucket in plan.buckets]


class Fuser:
    """Rewrites one graph for one model."""

    def __init__(self, graph: fx.Graph, group: str, rules: FusionRules) -> None:
        self.graph = graph
        self._group = group
        self._rules = rules
        self._emit = {
            Fusion.CONCAT: self._concat,
            Fusion.COALESCED: self._coalesced,
            Fusion.NONE: self._one_by_one,
        }[rules.fusion]

    def fuse(self, gradients: list[_Gradient]) -> list[FusedBucket]:
        """Put one reduction for each bucket of `gradients` into the graph."""
        self._fake_mode = detect_fake_mode([gradient.value for gradient in gradients]) or contextlib.nullcontext()
        fused = []
        cursor: fx.Node | None = None  # where the collective before this one was issued
        for places in plan_buckets(self._rules, [(gradient.spec, gradient.value) for gradient in gradients]):
            bucket = [gradients[place] for place in places]
            cursor = self.after(bucket, cursor)
            with self.graph.inserting_before(cursor.next):  # in this way, what is added keeps its order
                cursor = self._emit(bucket)
            wire_dtype = self._rules.wire_dtype or bucket[0].value.dtype
            fused.append(
                FusedBucket(
                    group=self._group,
                    dtype=wire_dtype,
                    names=tuple(gradient.spec.name for gradient in bucket),
                    num_bytes=sum(gradient.value.numel() for gradient in bucket) * wire_dtype.itemsize,
                    num_collectives=len(bucket) if self._rules.fusion is Fusion.NONE else 1,
                )
            )
        return fused

    def after(self, bucket: Sequence[_Gradient], cursor: fx.Node | None) -> fx.Node:
        """Return the node after which the bucket can be reduced: its gradients are there, and it is its turn."""
        latest = max([gradient.source for gradient in bucket] + ([] if cursor is None else [cursor]))
        inputs = self.graph.find_nodes(op="placeholder")
        return max(latest, inputs[-1]) if inputs else latest

    def _concat(self, bucket: Sequence[_Gradient]) -> fx.Node:
        flat = [self._call(aten.reshape.default, gradient.source, [-1]) for gradient in bucket]
        together = flat[0] if len(flat) == 1 else self._call(aten.cat.default, flat)
        scaled = self._call(aten.div.Tensor, self._cast(together, self._rules.wire_dtype), self._divisor(bucket))
        reduced = self._call(functional_collectives.all_reduce.default, scaled, "sum", self._group)
        with self.graph.inserting_before(min(user for gradient in bucket for user in gradient.call.users)):
            waited = self._call(functional_collectives.wait_tensor.default, reduced)
            whole = self._cast(waited, bucket[0].value.dtype)
            sizes = [gradient.value.numel() for gradient in bucket]
            parts = self._items(self._call(aten.split_with_sizes.default, whole, sizes), len(bucket))
            for gradient, part in zip(bucket, parts, strict=True):
                self._replace(gradient, self._call(aten.reshape.default, part, list(gradient.value.shape)))
        return reduced

    def _coalesced(self, bucket: Sequence[_Gradient]) -> fx.Node:
        sources = [self._cast(gradient.source, self._rules.wire_dtype) for gradient in bucket]
        divided = self._items(self._call(foreach_div_operator, sources, self._divisor(bucket)), len(bucket))
        scaled = [self._cast(node, value_of(source).dtype) for node, source in zip(divided, sources, strict=True)]
        together = self._call(functional_collectives.all_reduce_coalesced.default, scaled, "sum", self._group)
        reduced = self._items(together, len(bucket))
        self._wait_for_each(bucket, reduced)
        return reduced[-1]

    def _one_by_one(self, bucket: Sequence[_Gradient]) -> fx.Node:
        reduced = []
        for gradient in bucket:
            cast = self._cast(gradient.source, self._rules.wire_dtype)
            divided = self._call(aten.div.Tensor, cast, gradient.call.args[1])
            scaled = self._cast(divided, value_of(cast).dtype)
            reduced.append(self._call(functional_collectives.all_reduce.default, scaled, "sum", self._group))
        self._wait_for_each(bucket, reduced)
        return reduced[-1]

    def _wait_for_each(self, bucket: Sequence[_Gradient], reduced: Sequence[fx.Node]) -> None:
        for gradient, tensor in zip(bucket, reduced, strict=True):
            with self.graph.inserting_before(min(gradient.call.users)):
                waited = self._call(functional_collectives.wait_tensor.default, tensor)
                self._replace(gradient, self._cast(waited, gradient.value.dtype))

    def _cast(self, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        # Also after divisions: a gradient without dimensions takes the dtype of the divisor, which has none either.
        value = value_of(node)
        if dtype is None or value.dtype == dtype:
            return node
        return self._call(torch.ops.prims.convert_element_type.default, node, dtype)

    def _items(self, container: fx.Node, count: int) -> list[fx.Node]:
        return [self._call(operator.getitem, container, place) for place in range(count)]

    def _divisor(self, bucket: Sequence[_Gradient]) -> fx.Node:
        (divisor,) = {gradient.call.args[1] for gradient in bucket}  # one model, one divisor
        return cast(fx.Node, divisor)

    def _replace(self, gradient: _Gradient, average: fx.Node) -> None:
        gradient.call.replace_all_uses_with(average)
        self.graph.erase_node(gradient.call)

    def _call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, value_of)
        with self._fake_mode:
            node.meta["val"] = target(*values)
        return node
