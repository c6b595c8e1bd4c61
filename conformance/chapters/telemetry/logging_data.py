"""Programs about `_get_ddp_logging_data`: a wrapper's report on its configuration, buckets and errors."""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.checkers.protocol import is_gradient
from conformance.errors import present
from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.unused_parameters import Switched
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies

Data = Mapping[str, int | str]


class Named(nn.Module):
    """A module whose parameters are float32 and float64, with a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.precise = nn.Linear(2, 2, bias=False).double()
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.precise(self.first(inputs).double())
        return output


def _layers() -> nn.Module:
    return with_integer_weights(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4), nn.Linear(4, 1)))


#: Sizes of the parameters of `_layers` in bytes, in their order.
_SIZES = (24, 8, 32, 16, 16, 4)
_MOMENTS = ("constructed", "trained")


def _step(ctx: RankContext, model: nn.Module, index: int) -> None:
    turn = rank_step(ctx, index)
    model.zero_grad()
    turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))


def _constructed(ctx: RankContext) -> Mapping[str, Any]:
    model: Any = ctx.wrap(Named().to(ctx.device))
    data: Data = model._get_ddp_logging_data()
    on_cpu = ctx.device.type == "cpu"
    return {
        "world_size": data["world_size"],
        "rank": data["rank"],
        "module_name": data["module_name"],
        "backend": data["backend_name"] == dist.get_backend(ctx.process_group),
        "device_ids": data["device_ids"] == ("" if on_cpu else str(ctx.device.index)),
        "output_device": data["output_device"] == (-1 if on_cpu else ctx.device.index),
        "has_sync_bn": data["has_sync_bn"],
        "is_multi_device_module": data["is_multi_device_module"],
        "num_parameter_tensors": data["num_parameter_tensors"],
        "total_parameter_size_bytes": data["total_parameter_size_bytes"],
        "dtypes": sorted(str(data["dtypes"]).replace(",", " ").split()),
        "bytes_in_buckets": sum(_numbers(data["bucket_sizes"])),
    }


def _options(ctx: RankContext) -> Mapping[str, Any]:
    model: Any = ctx.wrap(_layers().to(ctx.device))
    data: Data = model._get_ddp_logging_data()
    names = ("find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers", "bucket_cap_bytes")
    return {**{name: data[name] for name in names}, "static_graph": data.get("static_graph", 0)}


def _form(ctx: RankContext) -> Mapping[str, Any]:
    model: Any = ctx.wrap(_layers().to(ctx.device))
    facts: dict[str, Any] = {}
    for moment in _MOMENTS:
        data = model._get_ddp_logging_data()
        facts[f"{moment}/strange"] = sorted(
            name for name, value in data.items() if type(name) is not str or type(value) not in (int, str)
        )
        facts[f"{moment}/travels"] = json.loads(json.dumps(data)) == data
        data.clear()
        data["of the caller"] = 1
        again = model._get_ddp_logging_data()
        facts[f"{moment}/again"] = len(again) > 1 and "of the caller" not in again
        for index in range(2):
            _step(ctx, model, index)
    facts["num_reductions_of_asking"] = _reductions_while(ctx, model._get_ddp_logging_data)
    return facts


def _buckets(ctx: RankContext) -> Mapping[str, Any]:
    module = _layers().to(ctx.device)
    ready: list[int] = []
    for position, parameter in enumerate(module.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, position=position: ready.append(position))
    model: Any = ctx.wrap(module)
    for index in range(3):
        before = len(ctx.collectives())
        ready.clear()
        _step(ctx, model, index)
    data: Data = model._get_ddp_logging_data()
    sent = [each.numel * 4 for each in ctx.collectives()[before:] if is_gradient(each)]
    rebuilt = _numbers(data["rebuilt_bucket_sizes"])
    indices = _numbers(data["rebuilt_per_bucket_param_indices"])
    order = _numbers(data["prev_iteration_grad_ready_order_indices"])
    by_bucket, rest = [], list(indices)
    for size in rebuilt:
        taken = 0
        while rest and taken < size:
            taken += _SIZES[rest.pop(0)]
        by_bucket.append(taken)
    return {
        "has_rebuilt_buckets": data["has_rebuilt_buckets"],
        "bytes_in_buckets": sum(_numbers(data["bucket_sizes"])),
        "rebuilt_as_sent": rebuilt == sent or (not sent and ctx.world_size == 1),
        "rebuilt_of_indices": by_bucket == rebuilt,
        "indices": sorted(indices),
        "order": order == ready,
        "num_buckets_reduced": data["num_buckets_reduced"] == len(rebuilt),
    }


def _reductions_while(ctx: RankContext, call: Callable[[], Any]) -> int:
    before = len(ctx.collectives())
    call()
    return len(ctx.collectives()) - before


def _hook(ctx: RankContext) -> Mapping[str, Any]:
    def divides_and_sums(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its own types
        work = present(dist.all_reduce(bucket.buffer().div_(ctx.world_size), group=ctx.process_group, async_op=True))
        return work.get_future().then(lambda future: future.value()[0])

    model: Any = ctx.wrap(_layers().to(ctx.device))
    facts = {"before": model._get_ddp_logging_data().get("comm_hook", "")}
    model.register_comm_hook(None, divides_and_sums)
    _step(ctx, model, 0)
    facts["after"] = model._get_ddp_logging_data()["comm_hook"]
    return facts


def _join(ctx: RankContext) -> Mapping[str, Any]:
    model: Any = ctx.wrap(_layers().to(ctx.device))
    facts = {"before": model._get_ddp_logging_data().get("join_uneven_inputs", 0)}
    with warnings.catch_warnings(), model.join():  # torch's context changes the filters for good
        for index in range(1 + ctx.rank):
            _step(ctx, model, index)
    facts["after"] = model._get_ddp_logging_data()["join_uneven_inputs"]
    return facts


def _error(ctx: RankContext) -> Mapping[str, Any]:
    module = with_integer_weights(Switched()).to(ctx.device)
    model: Any = ctx.wrap(module)
    facts: dict[str, Any] = {"before": model._get_ddp_logging_data().get("has_error", 0)}
    raised = ""
    try:
        for index in range(2):
            turn = rank_step(ctx, index)
            turn.backward(turn.forward(model, turn.inputs(4, 3), ["a"])[0])
    except RuntimeError as error:
        raised = str(error)
    data: Data = model._get_ddp_logging_data()
    facts["raised"] = bool(raised)
    facts["after"] = data.get("has_error", 0)
    # The logging data must contain the same error as the traceback.
    facts["same_complaint"] = "reduction" in str(data.get("error", "")) and "reduction" in raised
    return facts


def _unused(ctx: RankContext) -> Mapping[str, Any]:
    """Observe the second wrapper of two, because what a process says but once it must say of every wrapper."""
    _course_of_uses(ctx)
    return _course_of_uses(ctx)


def _course_of_uses(ctx: RankContext) -> Mapping[str, Any]:
    module = with_integer_weights(Switched()).to(ctx.device)
    model: Any = ctx.wrap(module)
    facts: dict[str, Any] = {}
    steps: list[str] = [*ctx.arguments["uses"], "a b c d"]
    for index, uses in enumerate(steps):
        turn = rank_step(ctx, index)
        outputs = turn.forward(model, turn.inputs(4, 3), uses.split())
        if index:  # by the next forward every DDP has logged the last step
            facts[f"step{index - 1}/size"] = model._get_ddp_logging_data().get("unused_parameter_size", 0)
        if index < len(steps) - 1:
            turn.backward(torch.stack(outputs).sum())
    facts["static"] = model._get_ddp_logging_data().get("can_set_static_graph", "not said")
    return facts


_SET = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "somewhere"}
_NOT_SET = ("CUDA_VISIBLE_DEVICES", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG")


def _environment(ctx: RankContext) -> Mapping[str, Any]:
    with mock.patch.dict(os.environ, _SET):
        for name in _NOT_SET:
            os.environ.pop(name, None)
        model: Any = ctx.wrap(_layers().to(ctx.device))
        _step(ctx, model, 0)
        data: Data = model._get_ddp_logging_data()
    facts: dict[str, Any] = {name: data[name] for name in map(str.lower, ("MASTER_ADDR", *_NOT_SET))}
    is_gloo = dist.get_backend(ctx.process_group) == "gloo"
    facts["interface"] = data["gloo_socket_ifname"] == "lo" if is_gloo else "gloo_socket_ifname" not in data
    facts["of_others"] = sorted(name for name in data if is_gloo and "nccl" in name)
    return facts


def _numbers(text: Any) -> list[int]:
    """Return the numbers in one of torch's lists, which are separated by commas, blanks or both."""
    return [int(word) for word in str(text).replace(",", " ").split()]


_ASPECTS: Mapping[str, Callable[[RankContext], Mapping[str, Any]]] = {
    "constructed": _constructed, "options": _options, "form": _form, "buckets": _buckets, "hook": _hook, "join": _join,
    "error": _error, "unused": _unused, "environment": _environment,
}  # fmt: skip


@program("logging_data", invariants=("leaves_no_trace",))
def logging_data(ctx: RankContext) -> None:
    """Observe the part of a wrapper's logging data that argument `aspect` names. All ranks run it."""
    for name, value in _ASPECTS[ctx.arguments["aspect"]](ctx).items():
        ctx.observe(name, value)


@logging_data.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    aspect = scenario.arguments["aspect"]
    return {rank: _EXPECTED[aspect](scenario, rank) for rank in range(scenario.world_size)}


def _expect_constructed(scenario: Scenario, rank: int) -> Facts:
    num_bytes = (3 * 2 + 2) * 4 + 4 * 8
    return {
        "world_size": scenario.world_size, "rank": rank, "module_name": "Named", "backend": True, "device_ids": True,
        "output_device": True, "has_sync_bn": 0, "is_multi_device_module": 0, "num_parameter_tensors": 3,
        "total_parameter_size_bytes": num_bytes, "dtypes": ["double", "float"], "bytes_in_buckets": num_bytes,
    }  # fmt: skip


def _expect_options(scenario: Scenario, rank: int) -> Facts:
    options = scenario.options
    cap = options.get("bucket_cap_mb", 25)
    return {
        "find_unused_parameters": int(options.get("find_unused_parameters", False)),
        "gradient_as_bucket_view": int(options.get("gradient_as_bucket_view", False)),
        "broadcast_buffers": int(options.get("forward_sync_buffers", True)),
        "bucket_cap_bytes": int(cap * 1024 * 1024),
        "static_graph": int(options.get("static_graph", False)),
    }


def _has(got: str, part: str) -> bool:
    return part in got


def _expect_unused(scenario: Scenario, rank: int) -> Facts:
    sizes = {name: sum(p.numel() * 4 for p in part.parameters()) for name, part in Switched().named_children()}
    steps: Sequence[str] = scenario.arguments["uses"]
    facts: dict[str, Any] = {
        f"step{index}/size": sum(size for name, size in sizes.items() if name not in uses.split())
        for index, uses in enumerate(steps)
    }
    facts["static"] = int(len({frozenset(uses.split()) for uses in steps}) == 1)
    return facts


def _expect_environment(scenario: Scenario, rank: int) -> Facts:
    not_set = {name.lower(): "N/A" for name in _NOT_SET}
    return {"master_addr": _SET["MASTER_ADDR"], **not_set, "interface": True, "of_others": []}


_EXPECTED: Mapping[str, Callable[[Scenario, int], Facts]] = {
    "constructed": _expect_constructed, "options": _expect_options, "unused": _expect_unused,
    "environment": _expect_environment,
    "form": lambda *_: {
        "num_reductions_of_asking": 0,
        **{f"{moment}/strange": [] for moment in _MOMENTS},
        **{f"{moment}/{name}": True for moment in _MOMENTS for name in ("travels", "again")},
    },
    "buckets": lambda *_: {
        "has_rebuilt_buckets": 1, "bytes_in_buckets": sum(_SIZES), "indices": list(range(len(_SIZES))),
        **dict.fromkeys(("rebuilt_as_sent", "rebuilt_of_indices", "order", "num_buckets_reduced"), True),
    },
    "hook": lambda *_: {"before": "", "after": Satisfies("the hook's name", _has, ("divides_and_sums",))},
    "join": lambda *_: {"before": 0, "after": 1},
    "error": lambda *_: {"before": 0, "raised": True, "after": 1, "same_complaint": True},
}  # fmt: skip
