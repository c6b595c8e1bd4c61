"""Graphs are cut where buckets end, whatever they contain, and compute the same as before."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext

from ddp_impl.base.options import BucketCaps
from ddp_impl.base.telemetry import log
from ddp_impl.buckets.plan import ParameterSpec
from ddp_impl.compile.graph_split import AveragedParameters, SplitBackend, computations, parts, plan_split, split_graph
from ddp_impl.tests.compiled_models import (
    BIAS_BYTES,
    WEIGHT_BYTES,
    WIDTH,
    Calls,
    Recorder,
    assert_same,
    averaged_parameters,
    capture,
    gradients,
    layers,
)

#: Every bucket is one parameter.
TINY = BucketCaps(1, 1)


def plan_of(module: nn.Module, caps: BucketCaps, *inputs: Any, leave_out: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    gm, example_inputs = capture(module, *inputs)
    return plan_split(gm, example_inputs, averaged_parameters(module, leave_out), caps)


def split_of(module: nn.Module, caps: BucketCaps, backend: str = "aot_eager") -> tuple[SplitBackend, Recorder]:
    torch._dynamo.reset()
    recorder = Recorder(lookup_backend(backend))
    return SplitBackend(recorder, averaged_parameters(module), caps), recorder


def test_buckets_are_filled_from_the_end_of_the_graph_up_to_each_ones_cap() -> None:
    layer = BIAS_BYTES + WEIGHT_BYTES
    plan = plan_of(layers(5), BucketCaps(layer, 2 * layer), torch.ones(2, WIDTH))
    assert plan.buckets == (
        ("8.bias", "8.weight"),
        ("6.bias", "6.weight", "4.bias", "4.weight"),
        ("2.bias", "2.weight", "0.bias", "0.weight"),
    )
    assert plan.bucket_bytes == (layer, 2 * layer, 2 * layer)
    # linear 0, tanh 1, linear 2, tanh 3, linear 4 ... : parts begin at the first use of a bucket's last gradient
    assert plan.starts == (0, 4, 8)
    assert plan.moved_cuts == ()


def test_each_bucket_has_its_own_cap_when_a_list_is_given() -> None:
    layer = BIAS_BYTES + WEIGHT_BYTES
    caps = BucketCaps(2 * layer, 2 * layer, (2 * layer, layer))
    assert plan_of(layers(5), caps, torch.ones(2, WIDTH)).starts == (0, 2, 4, 6)


def test_a_large_cap_leaves_the_graph_whole() -> None:
    assert plan_of(layers(3), BucketCaps(10**6, 10**9), torch.ones(2, WIDTH)).starts == (0,)


def test_what_precedes_the_last_gradient_belongs_to_the_last_bucket() -> None:
    def body(module: Calls, x: Tensor) -> Any:
        x = (x * 2).sin().cos() + 1
        return module.b(module.a(x))

    assert plan_of(Calls(body), TINY, torch.ones(2, WIDTH)).starts == (0, 5)


def test_a_shared_parameter_is_ready_after_its_first_use() -> None:
    def body(module: Calls, x: Tensor) -> Any:
        return module.a(module.b(module.c(module.a(x))))

    plan = plan_of(Calls(body), TINY, torch.ones(2, WIDTH))
    assert [bucket[0] for bucket in plan.buckets] == ["b.bias", "b.weight", "c.bias", "c.weight", "a.bias", "a.weight"]
    assert plan.starts == (0, 1, 2)


def test_ignored_and_frozen_parameters_fill_no_bucket() -> None:
    model = layers(4)
    model[2].weight.requires_grad_(False)
    plan = plan_of(model, TINY, torch.ones(2, WIDTH), leave_out=("4.weight", "4.bias"))
    assert [name for bucket in plan.buckets for name in bucket] == [
        "6.bias", "6.weight", "2.bias", "0.bias", "0.weight"
    ]  # fmt: skip
    assert plan.starts == (0, 2, 6)


def test_a_parameter_whose_reduction_is_delayed_causes_no_cut() -> None:
    model = layers(3)
    gm, inputs = capture(model, torch.ones(2, WIDTH))
    named = averaged_parameters(model)
    specs = [ParameterSpec(s.index, s.name, s.num_bytes, s.kind, delayed=s.name.startswith("2.")) for s in named.specs]
    plan = plan_split(gm, inputs, AveragedParameters(list(model.parameters()), specs), TINY)
    assert plan.starts == (0, 4)


def test_buckets_of_different_dtypes_are_filled_side_by_side() -> None:
    model = layers(4)
    model[2].double(), model[6].double()

    def body(_: Any, x: Tensor) -> Any:
        x = model[2](model[0](x).double())
        return model[6](model[4](x.float()).double())

    holder = Calls(body)
    holder.layers = model
    caps = BucketCaps(2 * (BIAS_BYTES + WEIGHT_BYTES), 2 * (BIAS_BYTES + WEIGHT_BYTES))
    gm, inputs = capture(holder, torch.ones(2, WIDTH))
    plan = plan_split(gm, inputs, averaged_parameters(model), caps)
    assert plan.buckets == (
        ("6.bias", "6.weight"),  # a double layer fills the cap alone
        ("2.bias", "2.weight"),
        ("4.bias", "4.weight", "0.bias", "0.weight"),
    )


def test_parameters_are_found_inside_called_modules() -> None:
    model = layers(3)
    gm = fx.symbolic_trace(model)
    assert {node.op for node in computations(gm.graph)} == {"call_module"}
    backend = SplitBackend(Recorder(), averaged_parameters(model), TINY)
    backend(gm, [torch.ones(2, WIDTH)])
    assert backend.splits[0].starts == (0, 2, 4)


def test_parameters_are_found_as_attributes_and_through_methods() -> None:
    weight, bias = nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))
    root = nn.Module()
    root.inner = nn.Module()
    root.inner.weight, root.bias = weight, bias
    graph = fx.Graph()
    given = graph.placeholder("x")
    transposed = graph.call_method("t", (graph.get_attr("inner.weight"),))
    product = graph.call_function(torch.mm, (given,), {"mat2": transposed})
    total = graph.call_method("add", (product,), {"other": graph.get_attr("bias")})
    graph.output((total,))
    backend = SplitBackend(Recorder(), averaged_parameters(root), TINY)
    x = torch.ones(2, WIDTH)
    run = backend(fx.GraphModule(root, graph), [x])
    assert run(x)[0].tolist() == [[WIDTH + 1.0] * WIDTH] * 2
    (plan,) = backend.splits
    assert plan.buckets == (("bias",), ("inner.weight",))
    assert plan.starts == (0, 2)


def in_place_chain(module: Calls, x: Tensor) -> Any:
    """Compute with in-place operations only, one per parameter, after the first layer."""
    hidden = module.a(x) * 2
    hidden.add_(module.b.bias)
    hidden.mul_(module.c.bias)
    hidden.sub_(module.b.weight[0])
    return hidden.sum(0)


def test_a_part_that_would_return_nothing_is_extended() -> None:
    module = Calls(in_place_chain)
    gm, inputs = capture(module, torch.ones(2, WIDTH))
    plan = plan_split(gm, inputs, averaged_parameters(module), TINY)
    assert plan.moved_cuts
    split = split_graph(gm, plan)
    for _, part in parts(split):
        (output,) = part.graph.find_nodes(op="output")
        assert output.all_input_nodes, "a part returns nothing"
    for end, cut in plan.moved_cuts:
        assert cut < end
    assert "cut moved" in plan.table()


def test_items_stay_with_the_container_they_come_from() -> None:
    def body(module: Calls, x: Tensor) -> Any:
        left, right = torch.chunk(module.a(x), 2, dim=-1)
        x = torch.cat([left, left], -1)
        return module.b(x) + torch.cat([right, right], -1)

    module = Calls(body)
    gm, inputs = capture(module, torch.ones(2, WIDTH))
    split = split_graph(gm, plan_split(gm, inputs, averaged_parameters(module), TINY))
    assert len(list(parts(split))) == 2
    for _, part in parts(split):
        (output,) = part.graph.find_nodes(op="output")
        values = output.args[0] if isinstance(output.args[0], tuple) else (output.args[0],)
        assert all(isinstance(value.meta["example_value"], Tensor) for value in values)


def stochastic_depth(module: Calls, x: Tensor, rate: float) -> Any:
    survival = 1.0 - rate
    x = module.a(x) * survival
    x = module.b(x) / survival
    return module.c(x) * survival + rate


def keep_shape(module: Calls, x: Tensor) -> Any:
    shape = x.shape
    x = module.a(x).view(shape) * x.shape[0]
    left, right = module.b(x).view(shape).chunk(2, -1)
    return module.c(torch.cat([left, right], -1)).view(shape) + right.sum()


def checkpointed(module: Calls, x: Tensor) -> Any:
    x = torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(module.a(y)), x, use_reentrant=False)
    x = torch.utils.checkpoint.checkpoint(lambda y: torch.sin(module.b(y)), x, use_reentrant=False)
    return module.c(x)


def conditional(module: Calls, x: Tensor) -> Any:
    x = module.a(x)
    return module.c(torch.cond(x.sum() > 0, lambda y: module.b(y), lambda y: torch.sin(module.b(y)), (x,)))


def mapped(module: Calls, x: Tensor) -> Any:
    return module.c(torch.vmap(lambda row: module.b(module.a(row)))(x))


def regions(module: Calls, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = module.b(module.a(x))
    with torch.no_grad():
        shift = x.float().sum()
    return module.c(x.float()) + shift


def plain(module: Calls, x: Tensor) -> Any:
    return module.c(torch.relu(module.b(torch.relu(module.a(x)))))


EVERY_PUSH = (in_place_chain, checkpointed, conditional, mapped)
HARD_CASES: list[tuple[Callable[..., Tensor], tuple[float, ...], int]] = [
    (plain, (), 3),
    (in_place_chain, (), 3),
    (stochastic_depth, (0.25,), 3),
    (keep_shape, (), 3),
    (checkpointed, (), 3),
    (conditional, (), 3),
    (mapped, (), 2),  # the mapped part cannot be cut
    (regions, (), 3),
]


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("body", "more", "num_parts"),
    [one if one[0] in EVERY_PUSH else pytest.param(*one, marks=pytest.mark.nightly) for one in HARD_CASES],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_whatever_a_graph_contains_its_parts_compute_the_same(
    body: Callable[..., Tensor], more: tuple[float, ...], num_parts: int, dynamic: bool
) -> None:
    torch.manual_seed(0)
    module = Calls(body)
    backend, recorder = split_of(module, TINY)
    compiled = torch.compile(module, backend=backend, dynamic=dynamic, fullgraph=True)
    for number, batch in enumerate((2, 3, 5)):
        inputs = (torch.randn(batch, WIDTH), *(value + number / 8 for value in more))
        assert_same(gradients(module, compiled, *inputs), gradients(module, module, *inputs))
    assert {plan.num_parts for plan in backend.splits} == {num_parts}
    assert len(recorder.graphs) == num_parts * len(backend.splits)
    assert len(backend.splits) <= (2 if dynamic else 3)


def test_convolutions_keep_their_strides_across_parts() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    backend, recorder = split_of(model, TINY)
    x = torch.randn(2, 2, 8, 8).to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_same(gradients(model, compiled, x), gradients(model, model, x))
    last_inputs = [value for value in recorder.inputs[-1] if isinstance(value, Tensor) and value.dim() == 4]
    assert any(value.is_contiguous(memory_format=torch.channels_last) and value.shape[2] > 1 for value in last_inputs)


def test_compilers_of_parts_do_not_overwrite_what_others_left_for_their_backwards() -> None:
    contexts: list[TracingContext] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        context = TracingContext.get()
        assert context.aot_graph_name is None, "another part's"
        context.aot_graph_name = [f"part {len(contexts)}"]
        contexts.append(context)
        return gm.forward

    torch._dynamo.reset()
    model = layers(3)
    torch.compile(model, backend=SplitBackend(backend, averaged_parameters(model), TINY))(torch.ones(2, WIDTH))
    assert [context.aot_graph_name for context in contexts] == [["part 0"], ["part 1"], ["part 2"]]
    assert len({id(context.guards_context) for context in contexts}) == 1
    assert len({id(context.fake_mode) for context in contexts}) == 1


def test_a_graph_that_was_not_captured_by_dynamo_is_cut_too() -> None:
    model = layers(3)
    gm = fx.symbolic_trace(model)
    recorder = Recorder()
    x = torch.ones(2, WIDTH)
    truth = gradients(model, model, x)
    run = SplitBackend(recorder, averaged_parameters(model), TINY)(gm, [x])
    assert len(recorder.graphs) == 3
    assert_same(gradients(model, run, x), truth)


def test_an_error_of_a_parts_compiler_names_the_part() -> None:
    def refuses(gm: fx.GraphModule, _: Any) -> Any:
        if len(calls) == 1:
            raise ArithmeticError("no such kernel")
        calls.append(gm)
        return gm.forward

    calls: list[fx.GraphModule] = []
    model = layers(3)
    gm, inputs = capture(model, torch.ones(2, WIDTH))
    with pytest.raises(ArithmeticError, match="no such kernel") as raised:
        SplitBackend(refuses, averaged_parameters(model), TINY)(gm, inputs)
    (note,) = raised.value.__notes__
    assert "part 2 of 3" in note
    assert "bucket_cap_mb" in note


def test_a_graph_without_parameters_is_compiled_as_it_is() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    gm, inputs = capture(Doubles(), torch.ones(2))
    recorder = Recorder()
    backend = SplitBackend(recorder, averaged_parameters(layers(1)), TINY)
    assert backend(gm, inputs)(torch.ones(2))[0].tolist() == [2, 2]
    assert recorder.graphs == [gm]
    assert backend.splits[0].buckets == ()


def test_the_bucket_table_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    layer = BIAS_BYTES + WEIGHT_BYTES
    model = layers(3)
    gm, inputs = capture(model, torch.ones(2, WIDTH))
    with caplog.at_level(logging.DEBUG, log.name):
        SplitBackend(Recorder(), averaged_parameters(model), BucketCaps(layer, 2 * layer))(gm, inputs)
    assert "6 averaged parameters: 2 buckets, compiled in 2 parts" in caplog.text
    assert (
        """
bucket         bytes  parameters
     0            80  4.bias
                      4.weight
     1           160  2.bias
                      2.weight
                      0.bias
                      0.weight"""
        in caplog.text
    )


@st.composite
def random_programs(draw: st.DrawFn) -> fx.GraphModule:
    """Draw a straight-line program over a few parameters: pure and in-place operations, containers, sizes."""
    root = nn.Module()
    for index in range(draw(st.integers(1, 5))):
        root.register_parameter(f"p{index}", nn.Parameter(torch.full((2, WIDTH), 1.0 + index / 8)))
    names = [name for name, _ in root.named_parameters()]
    graph = fx.Graph()
    call = graph.call_function
    tensors = [call(torch.mul, (graph.placeholder("x"), graph.get_attr("p0")))]
    for _ in range(draw(st.integers(1, 14))):
        tensor = draw(st.sampled_from(tensors))
        kind = draw(st.sampled_from(["parameter", "parameter", "in place", "halves", "size"]))
        if kind == "parameter":
            result = call(torch.mul, (tensor, graph.get_attr(draw(st.sampled_from(names)))))
        elif kind == "in place":
            result = call(torch.add, (tensor, draw(st.sampled_from(tensors))))
            graph.call_method("add_", (result, graph.get_attr(draw(st.sampled_from(names)))))
        elif kind == "halves":
            halves = call(torch.chunk, (tensor, 2, -1))
            first = call(operator.getitem, (halves, 0))
            other = call(torch.sin, (draw(st.sampled_from(tensors)),))
            result = call(torch.cat, ((call(operator.getitem, (halves, 1)), first), -1))
            result = call(torch.add, (result, other))
        else:
            size = graph.call_method("size", (tensor,))
            result = graph.call_method("reshape", (draw(st.sampled_from(tensors)), size))
        tensors.append(result)
    graph.output((call(sum, (tensors,)),))
    return fx.GraphModule(root, graph)


@settings(max_examples=60, deadline=None)
@given(random_programs(), st.integers(1, 80), st.integers(1, 120))
def test_any_program_is_cut_into_parts_that_compute_the_same(gm: fx.GraphModule, first: int, others: int) -> None:
    averaged = averaged_parameters(gm)
    x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
    truth = gradients(gm, lambda: gm(x.clone())[0])
    num_nodes = len(computations(gm.graph))
    recorder = Recorder()
    backend = SplitBackend(recorder, averaged, BucketCaps(first, others))
    run = backend(gm, [x.clone()])
    assert_same(gradients(gm, lambda: run(x.clone())[0]), truth)
    (plan,) = backend.splits
    assert len(recorder.graphs) == plan.num_parts <= max(1, len(plan.buckets))
    assert list(plan.starts) == sorted(set(plan.starts))
    assert plan.starts[-1] < num_nodes
    for part in recorder.graphs:
        (output,) = part.graph.find_nodes(op="output")
        assert output.all_input_nodes
