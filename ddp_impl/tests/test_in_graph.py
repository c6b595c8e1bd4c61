"""Gradients averaged in the compiled backward are right, in as many collectives as planned, in every situation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from conformance.backends.gloo import GLOO
from conformance.recorder.group import init_process_group
from conformance.recorder.recorder import Recorder as CollectiveRecorder
from ddp_impl import DistributedDataParallel
from ddp_impl.base.errors import ReductionError
from ddp_impl.compile.compiled_calls import WhereAveraged
from ddp_impl.compile.fusion import Fusion
from ddp_impl.tests.compiled_models import (
    BIAS_BYTES,
    WEIGHT_BYTES,
    WIDTH,
    Calls,
    Recorder,
    assert_same,
    average_in_graph,
    gradients,
    layers,
)
from ddp_impl.torch_internals.compile import inductor_compiler

LAYER_BYTES = BIAS_BYTES + WEIGHT_BYTES
ONE_LAYER_MB = LAYER_BYTES / 2**20


@pytest.fixture
def recorder() -> Iterator[CollectiveRecorder]:
    torch._dynamo.reset()
    recorder = CollectiveRecorder()
    init_process_group(GLOO, recorder, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield recorder
    finally:
        dist.destroy_process_group()


def wrap(model: nn.Module, fusion: Fusion = Fusion.CONCAT, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": ONE_LAYER_MB, **options})
    average_in_graph(ddp, fusion)
    return ddp


def issued(recorder: CollectiveRecorder) -> list[tuple[str, str]]:
    return [(entry.op, entry.dtypes[0]) for entry in recorder.history() if entry.phase == "backward"]


def backward(recorder: CollectiveRecorder, output: Tensor) -> None:
    recorder.entered("backward", 0, True)
    output.sum().backward()
    recorder.entered("observe", 0, True)


@pytest.mark.parametrize(
    "fullgraph", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["graphs", "fullgraph"]
)
@pytest.mark.parametrize("fusion", list(Fusion))
def test_the_backward_issues_what_the_plan_says(recorder: CollectiveRecorder, fusion: Fusion, fullgraph: bool) -> None:
    model = layers(12)
    ddp = wrap(model, fusion, bucket_cap_mb=7 * LAYER_BYTES / 2**20)
    call = torch.compile(ddp, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        model.zero_grad()
        recorder.start()
        backward(recorder, call(torch.ones(2, WIDTH)))
        operation = "all_reduce_coalesced" if fusion is Fusion.COALESCED else "all_reduce"
        expected = 24 if fusion is Fusion.NONE else 2  # 12 layers of two gradients, 7 to a bucket
        assert issued(recorder) == [(operation, "float32")] * expected
        assert all(entry.finished for entry in recorder.history())
    (buckets,) = ddp._compiled_calls.fused
    assert [len(bucket.names) for bucket in buckets] == [14, 10]
    assert sum(bucket.num_collectives for bucket in buckets) == expected


def whole_step(ddp: DistributedDataParallel) -> Callable[..., Any]:
    def step(x: Tensor) -> Any:
        return ddp(x) + 0

    return step


@pytest.mark.parametrize("prepare", [lambda ddp: ddp, whole_step], ids=["wrapper", "step"])
def test_gradients_are_right_and_shapes_may_vary(recorder: CollectiveRecorder, prepare: Callable[..., Any]) -> None:
    model = layers(3)
    twin = copy.deepcopy(model)
    ddp = wrap(model)
    call = torch.compile(prepare(ddp), backend="aot_eager")
    for batch in (2, 3, 4, 5):
        x = torch.randn(batch, WIDTH)
        assert_same(gradients(model, call, x), gradients(twin, twin, x))
    assert len(ddp._compiled_calls.fused) == 2  # for 2, and for any
    assert ddp._compiled_calls.splits == [], "the reducer was asked to help"


def test_in_evaluation_and_without_compilation_nothing_is_averaged_in_graphs(recorder: CollectiveRecorder) -> None:
    model = layers(2)
    ddp = wrap(model)
    call = torch.compile(ddp, backend="aot_eager")
    with torch.no_grad():
        call(torch.ones(2, WIDTH))
    ddp(torch.ones(2, WIDTH)).sum().backward()
    assert ddp._compiled_calls.fused == []


@pytest.mark.parametrize(
    ("setting", "reduction"),
    [
        (True, WhereAveraged.SPLIT),
        ("ddp_optimizer", WhereAveraged.SPLIT),
        ("python_reducer", WhereAveraged.IN_GRAPH),
        ("python_reducer_without_compiled_forward", WhereAveraged.IN_GRAPH),
        (False, WhereAveraged.WHOLE),
        ("no_optimization", WhereAveraged.WHOLE),
    ],
)
@pytest.mark.usefixtures("recorder")
def test_torchs_own_switch_is_understood(setting: Any, reduction: WhereAveraged) -> None:
    model = layers(3)
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_LAYER_MB)
    graphs = Recorder()
    x = torch.ones(2, WIDTH)
    with torch._dynamo.config.patch(optimize_ddp=setting):
        assert ddp._compiled_calls.reduction is reduction
        call = torch.compile(ddp, backend=graphs)
        assert_same(gradients(model, call, x), gradients(model, model, x))
    assert len(graphs.graphs) == (3 if reduction is WhereAveraged.SPLIT else 1)


def test_no_state_is_left_behind(recorder: CollectiveRecorder) -> None:
    before = (
        torch._dynamo.config.get_config_copy(),
        torch._inductor.config.get_config_copy(),
        torch._functorch.config.get_config_copy(),
    )
    ddp = wrap(layers(2))
    torch.compile(ddp, backend="aot_eager")(torch.ones(2, WIDTH)).sum().backward()
    after = (
        torch._dynamo.config.get_config_copy(),
        torch._inductor.config.get_config_copy(),
        torch._functorch.config.get_config_copy(),
    )
    assert after == before


def test_other_hooks_are_called_by_the_reducer(recorder: CollectiveRecorder) -> None:
    called = []

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        called.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    ddp = wrap(layers(2))
    ddp.register_comm_hook(None, hook)
    torch.compile(ddp, backend="aot_eager")(torch.ones(2, WIDTH)).sum().backward()
    assert called
    assert ddp._compiled_calls.fused == []


@pytest.mark.parametrize(
    "options",
    [{"find_unused_parameters": True}, {"static_graph": True}],
    ids=["unused", "static"],
)
def test_what_graphs_cannot_know_is_left_to_the_reducer(recorder: CollectiveRecorder, options: dict[str, Any]) -> None:
    def body(module: Calls, x: Tensor) -> Any:
        return module.b(module.a(x))  # c is unused

    model = Calls(body)
    ddp = wrap(model, **options)
    x = torch.ones(2, WIDTH)
    call = torch.compile(ddp, backend="aot_eager")
    assert_same(gradients(model, call, x), gradients(model, model, x))
    assert ddp._compiled_calls.fused == []


def test_an_unused_parameter_is_named(recorder: CollectiveRecorder) -> None:
    def body(module: Calls, x: Tensor) -> Any:
        return module.b(module.a(x))

    call = torch.compile(wrap(Calls(body)), backend="aot_eager")
    with pytest.raises(Exception, match=r"c\.weight, c\.bias.*find_unused_parameters=True"):
        call(torch.ones(2, WIDTH))


def test_after_a_graph_break_the_reducer_averages_and_says_so_once(
    recorder: CollectiveRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    def body(module: Calls, x: Tensor) -> Any:
        x = module.b(module.a(x))
        torch._dynamo.graph_break()
        return module.c(x)

    model = Calls(body)
    twin = copy.deepcopy(model)
    ddp = wrap(model)
    call = torch.compile(ddp, backend="aot_eager")
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        assert_same(gradients(model, call, x), gradients(twin, twin, x))
    assert ddp._compiled_calls.fused == []
    assert [plan.num_parts for plan in ddp._compiled_calls.splits] == [2, 1]
    (warning,) = [record.message for record in caplog.records if "not one graph" in record.message]
    assert "Remove the graph break" in warning


def test_a_graph_that_breaks_after_all_ranks_had_one_is_an_error(recorder: CollectiveRecorder) -> None:
    def body(module: Calls, x: Tensor) -> Any:
        if x.shape[0] == 3:
            torch._dynamo.graph_break()
        return module.c(module.b(module.a(x)))

    call = torch.compile(wrap(Calls(body)), backend="aot_eager")
    call(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        call(torch.ones(3, WIDTH))
    assert "optimize_ddp = True" in "".join(raised.value.__notes__)


def test_under_a_backend_without_a_place_for_passes_the_reducer_averages(recorder: CollectiveRecorder) -> None:
    ddp = wrap(layers(2))
    call = torch.compile(ddp, backend=Recorder())
    recorder.start()
    backward(recorder, call(torch.ones(2, WIDTH)))
    assert issued(recorder) == [("all_reduce", "float32")] * 2


@pytest.mark.usefixtures("recorder")
def test_a_captured_backward_that_accumulates_nothing_is_refused() -> None:
    """Else the graph would average what `torch.autograd.grad` computes on this rank alone."""
    call, rows = torch.compile(wrap(layers(2)), backend="aot_eager"), torch.ones(2, WIDTH).requires_grad_()
    loss = call(rows).sum()
    captured = torch._dynamo.compiled_autograd._enable(lambda gm: torch.compile(gm, backend="aot_eager"))
    with captured, pytest.raises(ReductionError, match=r"accumulates none, such as torch\.autograd\.grad"):
        torch.autograd.grad(loss, rows)


def test_any_backend_made_by_aot_autograd_is_given_fused_graphs(recorder: CollectiveRecorder) -> None:
    seen = []

    def compiler(gm: Any, _: Any) -> Any:
        seen.append(str(gm.graph))
        return gm.forward

    ddp = wrap(layers(2))
    call = torch.compile(ddp, backend=aot_autograd(fw_compiler=compiler))
    call(torch.ones(2, WIDTH)).sum().backward()
    assert len(seen) == 2
    assert seen[1].count("_c10d_functional.all_reduce") == 2
    assert "average_gradient" not in seen[0] + seen[1]


def test_inductor_looks_up_what_it_compiled_by_what_partitions_it() -> None:
    _, partitioned_by = inductor_compiler()
    settings = partitioned_by(lambda *args: args, "two ranks", {})
    assert pickle.loads(pickle.dumps(settings)) == {"custom_partitioner_fn": "two ranks"}
