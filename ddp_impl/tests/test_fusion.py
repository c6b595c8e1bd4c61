"""Fused graphs compute the same averages with as few collectives as the plan says, and merge nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from ddp_impl.base.options import BucketCaps
from ddp_impl.buckets.plan import ParameterSpec
from ddp_impl.compile.averaging import GroupAlias
from ddp_impl.compile.fusion import AVERAGE, FusedBucket, Fusion, FusionRules, fuse
from ddp_impl.tests.ranks import group_of_one
from ddp_impl.torch_internals.tensors import functional_collectives as collective

WORLD_SIZE = 4.0


@pytest.fixture(scope="module")
def names() -> Iterator[tuple[str, str]]:
    """Give two names of a group of one rank, as two wrapped modules would have."""
    with group_of_one() as group:
        first, second = GroupAlias(group), GroupAlias(group)
        try:
            yield first.name, second.name
        finally:
            first.forget()
            second.forget()


class BackwardGraph:
    """A graph as a compiler sees it: a chain of computations, each of which yields a gradient that is averaged."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.divisor = self._input("divisor", torch.tensor(WORLD_SIZE))
        self.tangent = self._input("tangent", torch.tensor(3.0))
        self.inputs = [torch.tensor(WORLD_SIZE), torch.tensor(3.0)]
        self.outputs: list[fx.Node] = []
        self.position = self.tangent

    def _input(self, name: str, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def compute(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]))
        return node

    def gradient(self, group: str, index: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        """Add the gradient of parameter `index`: the chain so far, times its index plus one."""
        self.position = self.compute(torch.ops.aten.mul.Tensor, self.position, 2.0)
        grown = self.compute(torch.ops.aten.add.Tensor, self._full(shape, index, dtype), self.position)
        typed = self.compute(torch.ops.prims.convert_element_type.default, grown, dtype)
        self.outputs.append(self.compute(AVERAGE, typed, self.divisor, group, index))

    def _full(self, shape: tuple[int, ...], index: int, dtype: torch.dtype) -> fx.Node:
        return self.compute(torch.ops.aten.full.default, list(shape), float(index + 1))

    def finished(self) -> fx.GraphModule:
        self.graph.output(tuple(self.outputs))
        return fx.GraphModule({}, self.graph)


def specs_for(shapes: list[tuple[int, ...]], item_bytes: int = 4) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(index, f"p{index}", torch.Size(shape).numel() * item_bytes, ("float32", "cpu"))
        for index, shape in enumerate(shapes)
    )


def rules_for(specs: tuple[ParameterSpec, ...], *rest: Any) -> FusionRules:
    return FusionRules(specs, tuple(reversed(range(len(specs)))), *rest)


def count(gm: fx.GraphModule, target: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


def positions(gm: fx.GraphModule, target: Any) -> list[int]:
    return [place for place, node in enumerate(gm.graph.nodes) if node.target is target]


SHAPES: list[tuple[int, ...]] = [(3,), (2, 3), (), (4, 1), (5,)]


def backward_of(group: str, shapes: list[tuple[int, ...]] = SHAPES) -> tuple[fx.GraphModule, list[Tensor]]:
    backward = BackwardGraph()
    for index in reversed(range(len(shapes))):
        backward.gradient(group, index, shapes[index])
    return backward.finished(), backward.inputs


@pytest.mark.parametrize("wire_dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fusion", list(Fusion))
def test_the_averages_are_the_same(names: tuple[str, str], fusion: Fusion, wire_dtype: torch.dtype | None) -> None:
    gm, inputs = backward_of(names[0])
    truth = gm(*inputs)
    rules = rules_for(specs_for(SHAPES), BucketCaps(8, 24), fusion, wire_dtype)
    fused = fuse(gm.graph, {names[0]: rules})
    gm.recompile()
    assert count(gm, AVERAGE) == 0
    for expected, actual in zip(truth, gm(*inputs), strict=True):
        assert actual.dtype is expected.dtype
        assert torch.equal(actual, expected)  # small numbers, exact in every dtype
    assert {bucket.dtype for bucket in fused} == {wire_dtype or torch.float32}


def reduced_sizes(gm: fx.GraphModule) -> list[int]:
    nodes = gm.graph.find_nodes(op="call_function", target=collective.all_reduce.default)
    return [node.meta["val"].numel() for node in nodes]


def test_buckets_are_those_of_the_plan_whatever_the_order_in_the_graph(names: tuple[str, str]) -> None:
    backward = BackwardGraph()
    for index in (2, 0, 4, 1, 3):
        backward.gradient(names[0], index, SHAPES[index])
    gm = backward.finished()
    fused = fuse(gm.graph, {names[0]: rules_for(specs_for(SHAPES), BucketCaps(20, 20))})
    # 5, 4, 1, 6 and 3 numbers of 4 bytes, from the last registered to the first; a bucket closes at 20 bytes
    assert [bucket.names for bucket in fused] == [("p4",), ("p3", "p2"), ("p1",), ("p0",)]
    assert [bucket.num_bytes for bucket in fused] == [20, 20, 24, 12]
    assert reduced_sizes(gm) == [5, 5, 6, 3]


def test_a_list_of_caps_is_used(names: tuple[str, str]) -> None:
    gm, _ = backward_of(names[0])
    fused = fuse(gm.graph, {names[0]: rules_for(specs_for(SHAPES), BucketCaps(36, 36, (36, 4)))})
    assert [bucket.names for bucket in fused] == [("p4", "p3"), ("p2",), ("p1",), ("p0",)]


@pytest.mark.parametrize("fusion", list(Fusion))
def test_collectives_are_issued_early_and_waited_for_late(names: tuple[str, str], fusion: Fusion) -> None:
    gm, _ = backward_of(names[0])
    fuse(gm.graph, {names[0]: rules_for(specs_for(SHAPES), BucketCaps(1, 1), fusion)})
    computations = positions(gm, torch.ops.aten.full.default)
    launches = positions(gm, collective.all_reduce.default) + positions(gm, collective.all_reduce_coalesced.default)
    waits = positions(gm, collective.wait_tensor.default)
    assert launches[0] < computations[1], "the first gradient is reduced before the second is computed"
    assert max(computations) < max(launches) < min(waits)


def test_an_average_that_is_used_in_the_graph_is_waited_for_there(names: tuple[str, str]) -> None:
    backward = BackwardGraph()
    backward.gradient(names[0], 1, (2,))
    norm = backward.compute(torch.ops.aten.abs.default, backward.outputs[0])
    backward.position = backward.compute(torch.ops.aten.sum.default, norm)
    backward.gradient(names[0], 0, (2,))
    gm = backward.finished()
    truth = gm(*backward.inputs)
    fuse(gm.graph, {names[0]: rules_for(specs_for([(2,), (2,)]), BucketCaps(1, 1))})
    gm.recompile()
    assert all(torch.equal(a, b) for a, b in zip(gm(*backward.inputs), truth, strict=True))
    assert positions(gm, collective.wait_tensor.default)[0] < positions(gm, torch.ops.aten.abs.default)[0]


def test_models_and_dtypes_are_never_merged_and_have_their_own_divisors_and_caps(names: tuple[str, str]) -> None:
    backward = BackwardGraph()
    other_divisor = backward.graph.placeholder("other_divisor")
    other_divisor.meta["val"] = torch.tensor(2.0)
    for index in reversed(range(4)):
        backward.gradient(names[0], index, (3,), torch.float64 if index % 2 else torch.float32)
        backward.gradient(names[1], index, (3,))
        backward.outputs[-1].args = (backward.outputs[-1].args[0], other_divisor, names[1], index)
    gm = backward.finished()
    inputs = [*backward.inputs, torch.tensor(2.0)]
    truth = gm(*inputs)
    first = rules_for(specs_for([(3,)] * 4), BucketCaps(100, 100))
    second = rules_for(specs_for([(3,)] * 4), BucketCaps(24, 24), Fusion.COALESCED)
    fused = fuse(gm.graph, {names[0]: first, names[1]: second})
    gm.recompile()
    assert all(torch.equal(a, b) for a, b in zip(gm(*inputs), truth, strict=True))
    assert [(bucket.group, bucket.dtype, bucket.names) for bucket in fused] == [
        (names[0], torch.float64, ("p3", "p1")),
        (names[0], torch.float32, ("p2", "p0")),
        (names[1], torch.float32, ("p3", "p2")),
        (names[1], torch.float32, ("p1", "p0")),
    ]


def test_other_collectives_and_models_without_rules_are_left_alone(names: tuple[str, str]) -> None:
    backward = BackwardGraph()
    backward.gradient(names[0], 0, (3,))
    backward.gradient(names[1], 0, (3,))
    partial = backward.compute(torch.ops.aten.mul.Tensor, backward.position, 2.0)
    foreign = backward.compute(collective.all_reduce.default, partial, "sum", names[1])
    backward.outputs.append(backward.compute(collective.wait_tensor.default, foreign))
    gm = backward.finished()
    before = str(foreign.args), [user.target for user in foreign.users]
    fuse(gm.graph, {names[0]: rules_for(specs_for([(3,)]), BucketCaps(1, 1))})
    assert (str(foreign.args), [user.target for user in foreign.users]) == before
    assert count(gm, AVERAGE) == 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_dtype_and_cap_gives_the_same_averages(names: tuple[str, str], data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8))
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])) for _ in shapes]
    backward = BackwardGraph()
    for index in data.draw(st.permutations(range(len(shapes)))):
        backward.gradient(names[0], index, shapes[index], dtypes[index])
    gm = backward.finished()
    truth = gm(*backward.inputs)
    fusion = data.draw(st.sampled_from(list(Fusion)))
    caps = BucketCaps(data.draw(st.integers(0, 60)), data.draw(st.integers(0, 90)))
    fused = fuse(gm.graph, {names[0]: rules_for(specs_for(shapes), caps, fusion)})
    gm.recompile()
    for expected, actual in zip(truth, gm(*backward.inputs), strict=True):
        assert actual.dtype is expected.dtype
        assert torch.equal(actual, expected)
    assert sorted(name for bucket in fused for name in bucket.names) == sorted(f"p{i}" for i in range(len(shapes)))
    launches = count(gm, collective.all_reduce.default) + count(gm, collective.all_reduce_coalesced.default)
    assert launches == sum(bucket.num_collectives for bucket in fused)
    assert all(isinstance(bucket, FusedBucket) for bucket in fused)
