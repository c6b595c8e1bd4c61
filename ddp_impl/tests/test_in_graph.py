"""Gradients averaged in the compiled backward are right, in as many collectives as planned, in every situation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.backends.gloo import GLOO
from conformance.recorder.group import init_process_group
from conformance.recorder.recorder import Recorder as CollectiveRecorder
from ddp_impl import DistributedDataParallel
from ddp_impl.compile.fusion import Fusion
from ddp_impl.compile.who_averages import Reduction
from ddp_impl.tests.compiled_models import (
    BIAS_BYTES,
    WEIGHT_BYTES,
    WIDTH,
    Calls,
    Recorder,
    assert_same,
    gradients,
    layers,
)
from ddp_impl.tests.ranks import run_ranks
from ddp_impl.torch_internals.compile import inductor_compiler

LAYER_BYTES = BIAS_BYTES + WEIGHT_BYTES
ONE_LAYER_MB = LAYER_BYTES / 2**20


@pytest.fixture
def recorder() -> Iterator[CollectiveRecorder]:
    """Make this process a group of one rank, whose collectives are recorded."""
    torch._dynamo.reset()
    recorder = CollectiveRecorder()
    init_process_group(GLOO, recorder, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield recorder
    finally:
        dist.destroy_process_group()


def wrap(model: nn.Module, fusion: Fusion = Fusion.CONCAT, **options: Any) -> DistributedDataParallel:
    """Wrap `model` so that its compiled backward averages."""
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": ONE_LAYER_MB, **options})
    ddp._compiled_calls.reduction = Reduction.IN_GRAPH
    ddp._compiled_calls.fusion = fusion
    return ddp


def issued(recorder: CollectiveRecorder) -> list[tuple[str, str]]:
    """Return (operation, dtype) of everything that the backward issued."""
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
    model = layers(30)  # 60 gradients
    ddp = wrap(model, fusion, bucket_cap_mb=7 * LAYER_BYTES / 2**20)
    call = torch.compile(ddp, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        model.zero_grad()
        recorder.start()
        backward(recorder, call(torch.ones(2, WIDTH)))
        operation = "all_reduce_coalesced" if fusion is Fusion.COALESCED else "all_reduce"
        expected = 60 if fusion is Fusion.NONE else 5  # 30 layers, 7 to a bucket
        assert issued(recorder) == [(operation, "float32")] * expected
        assert all(entry.finished for entry in recorder.history())
    (buckets,) = ddp._compiled_calls.fused
    assert [len(bucket.names) for bucket in buckets] == [14, 14, 14, 14, 4]
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
        (True, Reduction.SPLIT),
        ("ddp_optimizer", Reduction.SPLIT),
        ("python_reducer", Reduction.IN_GRAPH),
        ("python_reducer_without_compiled_forward", Reduction.IN_GRAPH),
        (False, Reduction.WHOLE),
        ("no_optimization", Reduction.WHOLE),
    ],
)
@pytest.mark.usefixtures("recorder")
def test_torchs_own_switch_is_understood(setting: Any, reduction: Reduction) -> None:
    model = layers(3)
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_LAYER_MB)
    graphs = Recorder()
    x = torch.ones(2, WIDTH)
    with torch._dynamo.config.patch(optimize_ddp=setting):
        assert ddp._compiled_calls.reduction is reduction
        call = torch.compile(ddp, backend=graphs)
        assert_same(gradients(model, call, x), gradients(model, model, x))
    assert len(graphs.graphs) == (3 if reduction is Reduction.SPLIT else 1)


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


def test_a_new_process_group_is_used_without_compiling_again(recorder: CollectiveRecorder) -> None:
    def groups_used() -> set[str]:
        recorder.start()
        backward(recorder, call(torch.ones(2, WIDTH)))
        return {entry.group for entry in recorder.history() if entry.phase == "backward"}

    ddp = wrap(layers(2))
    call = torch.compile(ddp, backend="aot_eager")
    assert groups_used() == {"default"}
    another = dist.new_group([0])
    assert isinstance(another, dist.ProcessGroup)
    ddp._update_process_group(another)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert groups_used() == {f"group {another.group_name}"}


@pytest.mark.parametrize(
    ("hook", "dtype"),
    [
        (default_hooks.allreduce_hook, "float32"),
        (default_hooks.fp16_compress_hook, "float16"),
        (default_hooks.bf16_compress_hook, "bfloat16"),
    ],
)
def test_compressing_hooks_become_part_of_the_graph(
    recorder: CollectiveRecorder, hook: Callable[..., Any], dtype: str
) -> None:
    ddp = wrap(layers(2))
    ddp.register_comm_hook(None, hook)
    recorder.start()
    backward(recorder, torch.compile(ddp, backend="aot_eager")(torch.ones(2, WIDTH)))
    assert issued(recorder) == [("all_reduce", dtype)] * 2
    assert [bucket.dtype for bucket in ddp._compiled_calls.fused[0]] == [getattr(torch, dtype)] * 2


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


@pytest.mark.parametrize("fusion", [Fusion.CONCAT, Fusion.COALESCED])
def test_what_compiled_autograd_captures_is_fused(recorder: CollectiveRecorder, fusion: Fusion) -> None:
    model = layers(4)
    twin = copy.deepcopy(model)
    call = torch.compile(wrap(model, fusion, bucket_cap_mb=2 * LAYER_BYTES / 2**20), backend="aot_eager")
    x = torch.randn(2, WIDTH)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        recorder.start()
        backward(recorder, call(x))
    operation = "all_reduce_coalesced" if fusion is Fusion.COALESCED else "all_reduce"
    assert issued(recorder) == [(operation, "float32")] * 2
    twin(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_local_gradients_are_averaged_with_those_of_the_next_forward(recorder: CollectiveRecorder) -> None:
    model = layers(2)
    ddp = wrap(model)
    call = torch.compile(ddp, backend="aot_eager")
    x = torch.randn(2, WIDTH)
    call(x).sum().backward()
    model.zero_grad()
    recorder.start()
    recorder.entered("backward", 0, True)
    with ddp.no_sync():
        call(x).sum().backward()
    assert issued(recorder) == []
    call(x).sum().backward()
    assert issued(recorder) != []
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    truth = gradients(model, lambda: 2 * model(x))
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, truth[name])
    recorder.start()
    backward(recorder, call(x))
    assert issued(recorder) == [("all_reduce", "float32")] * 2
    assert len(ddp._compiled_calls.fused) == 1


def test_gradients_accumulate_over_synchronised_steps(recorder: CollectiveRecorder) -> None:
    model = layers(2)
    call = torch.compile(wrap(model), backend="aot_eager")
    x = torch.randn(2, WIDTH)
    call(x).sum().backward()
    call(x).sum().backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    truth = gradients(model, lambda: 2 * model(x))
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, truth[name])


def test_under_a_backend_without_a_place_for_passes_the_reducer_averages(recorder: CollectiveRecorder) -> None:
    ddp = wrap(layers(2))
    call = torch.compile(ddp, backend=Recorder())
    recorder.start()
    backward(recorder, call(torch.ones(2, WIDTH)))
    assert issued(recorder) == [("all_reduce", "float32")] * 2


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


def test_casts_of_mixed_precision_are_averaged_in_low_precision(recorder: CollectiveRecorder) -> None:
    from ddp_impl.module.mixed_precision import MixedPrecision

    model = layers(2)
    ddp = wrap(model, mixed_precision=MixedPrecision(torch.bfloat16))
    call = torch.compile(ddp, backend="aot_eager")
    recorder.start()
    backward(recorder, call(torch.ones(2, WIDTH)))
    assert issued(recorder) == [("all_reduce", "bfloat16")] * 2
    assert all(parameter.grad is not None and parameter.grad.dtype is torch.float32 for parameter in model.parameters())
    assert len(ddp._compiled_calls.fused) == 1


@pytest.mark.nightly
def test_inductor_keeps_launches_early_and_waits_late(recorder: CollectiveRecorder) -> None:
    from torch._inductor.utils import run_and_get_code

    model = layers(4)
    ddp = wrap(model)
    call = torch.compile(ddp, backend="inductor")
    x = torch.randn(2, WIDTH)
    ours, codes = run_and_get_code(gradients, model, call, x)
    assert_same(ours, gradients(model, model, x))
    (code,) = [code for code in codes if "all_reduce" in code]
    lines = [line for line in code.splitlines() if "torch.ops._c10d_functional" in line and ".default(" in line]
    kinds = ["wait" if "wait_tensor" in line else "launch" for line in lines]
    assert kinds == ["launch"] * 4 + ["wait"] * 4


def _train(rank: int, compiled: bool, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), layers(3))
    fusion = Fusion(options.pop("fusion", "concat"))
    hook = options.pop("hook", None)
    ddp = wrap(model, fusion, **options)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    call = torch.compile(ddp, backend="aot_eager") if compiled else ddp
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(rank)
    losses: list[Tensor] = []
    for step in range(5):
        optimizer.zero_grad()
        if step == 3:
            with ddp.no_sync():
                call(torch.randn(6, WIDTH, generator=generator)).square().sum().backward()
        loss = call(torch.randn(4 + 2 * (step == 4), WIDTH, generator=generator)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"state": model.state_dict(), "losses": losses, "fused": len(ddp._compiled_calls.fused)}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"fusion": "concat"}, marks=pytest.mark.nightly),
        {"fusion": "coalesced", "gradient_as_bucket_view": True},
        pytest.param({"hook": default_hooks.fp16_compress_hook}, marks=pytest.mark.nightly),
    ],
    ids=["concat", "coalesced", "fp16"],
)
def test_two_ranks_train_the_same_as_in_eager(tmp_path: Path, options: dict[str, Any]) -> None:
    eager = run_ranks(_train, 2, tmp_path / "eager", False, options)
    compiled = run_ranks(_train, 2, tmp_path / "compiled", True, options)
    for rank in range(2):
        torch.testing.assert_close(compiled[rank]["state"], eager[rank]["state"])
        torch.testing.assert_close(compiled[rank]["losses"], eager[rank]["losses"])
        assert compiled[rank]["fused"] >= 1
    for name, value in compiled[0]["state"].items():
        if "running" not in name:
            assert torch.equal(value, compiled[1]["state"][name]), name


def _two_models(rank: int, directory: Path) -> dict[str, Any]:
    dist.destroy_process_group()
    torch.manual_seed(0)
    recorder = CollectiveRecorder()
    store = dist.FileStore(str(directory / "recorded"), 2)  # type: ignore[attr-defined]
    init_process_group(GLOO, recorder, store=store, rank=rank, world_size=2)
    models = [layers(2), layers(2).double()]
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    wrapped = []
    for model, group in zip(models, groups, strict=True):
        assert isinstance(group, dist.ProcessGroup)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=ONE_LAYER_MB)
        ddp._compiled_calls.reduction = Reduction.IN_GRAPH
        wrapped.append(ddp)
    twins = copy.deepcopy(models)

    def step(x: Tensor) -> Any:
        return wrapped[1](wrapped[0](x).double())

    x = torch.full((2, WIDTH), 1.0 + rank)
    twins[1](twins[0](x).double()).sum().backward()
    truth = [parameter.grad for twin in twins for parameter in twin.parameters()]
    for gradient in truth:
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient /= 2
    recorder.start()
    backward(recorder, torch.compile(step, backend="aot_eager")(x))
    issued = [(e.group, e.dtypes[0], e.numel) for e in recorder.history() if e.phase == "backward"]
    return {
        "ours": [parameter.grad for model in models for parameter in model.parameters()],
        "truth": truth,
        "issued": issued,
        "groups": [f"group {group.group_name}" for group in groups if isinstance(group, dist.ProcessGroup)],
    }


def test_two_models_of_two_groups_and_dtypes_are_averaged_apart(tmp_path: Path) -> None:
    layer = LAYER_BYTES // 4
    for result in run_ranks(_two_models, 2, tmp_path, tmp_path):
        for actual, expected in zip(result["ours"], result["truth"], strict=True):
            torch.testing.assert_close(actual, expected)
        first, second = result["groups"]
        assert result["issued"] == [(second, "float64", layer)] * 2 + [(first, "float32", layer)] * 2


def _train_sharded(rank: int, directory: Path, reduction: Reduction) -> dict[str, Any]:
    dist.destroy_process_group()
    recorder = CollectiveRecorder()
    store = dist.FileStore(str(directory / "recorded"), 4)  # type: ignore[attr-defined]
    init_process_group(GLOO, recorder, store=store, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    models = [layers(2), layers(2)]
    truth = copy.deepcopy(models[0])
    models[1].load_state_dict(models[0].state_dict())
    data = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(place)) for place in range(2)]
    own = data[mesh.get_coordinate()[0]]  # type: ignore[index]
    sharded_traffic, descriptions = [], []
    for compiled, model in enumerate(models):
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        descriptions.append([(name, type(p), p.placements) for name, p in model.named_parameters()])  # type: ignore[attr-defined]
        ddp = DistributedDataParallel(model, device_mesh=mesh["dp"], bucket_cap_mb=ONE_LAYER_MB / 2)
        ddp._compiled_calls.reduction = reduction
        call = torch.compile(ddp, backend="aot_eager") if compiled else ddp
        call(own).square().sum().backward()
        model.zero_grad()
        recorder.start()
        call(own).square().sum().backward()
        group = f"group {mesh['tp'].get_group().group_name}"
        sharded_traffic.append([(e.op, e.numel) for e in recorder.history() if e.group == group])
    descriptions.append([(name, type(p), p.placements) for name, p in models[1].named_parameters()])  # type: ignore[attr-defined]
    sum((truth(x).square().sum() for x in data), torch.zeros(())).div(2).backward()
    return {
        "ours": {name: p.grad.full_tensor() for name, p in models[1].named_parameters()},  # type: ignore[union-attr]
        "truth": {name: p.grad for name, p in truth.named_parameters()},
        "traffic": sharded_traffic,
        "unchanged": descriptions[1] == descriptions[2],
        "fused": len(ddp._compiled_calls.fused),
    }


@pytest.mark.parametrize("reduction", [pytest.param(Reduction.SPLIT, marks=pytest.mark.nightly), Reduction.IN_GRAPH])
def test_shards_are_averaged_and_the_traffic_between_them_stays(tmp_path: Path, reduction: Reduction) -> None:
    for result in run_ranks(_train_sharded, 4, tmp_path, tmp_path, reduction):
        torch.testing.assert_close(result["ours"], result["truth"])
        assert result["unchanged"]
        assert result["traffic"][0]
        assert sorted(result["traffic"][0]) == sorted(result["traffic"][1])
        assert result["fused"] == (1 if reduction is Reduction.IN_GRAPH else 0)


def test_inductor_looks_up_what_it_compiled_by_what_partitions_it() -> None:
    _, partitioned_by = inductor_compiler()
    settings = partitioned_by(lambda *args: args, "two ranks", {})
    assert pickle.loads(pickle.dumps(settings)) == {"custom_partitioner_fn": "two ranks"}
