"""Program `construction_error`: arguments that the constructor must reject on every rank, without damage."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

from conformance.models.integers import with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps, step_on
from conformance.truth.expected import Raises

_NOTHING_TO_TRAIN = Raises(("RuntimeError",), (("grad", "train", "frozen", "parameter"),))
_NO_GROUP = Raises(mentions=("group",))
_DELAY = (("param_to_hook_all_reduce", "delay_all_reduce_named_params"),)
_good_step = step_on(4, 3)
#: Longer than `ddp_impl` waits for another rank's refusal.
_LATE_S = 1.5


@dataclass(frozen=True)
class Mistake:
    """What a rank wraps, with which options, and the error that the constructor must raise."""

    module: Callable[[RankContext], Any]
    raises: Raises
    options: Callable[[RankContext], dict[str, Any]] = field(default=lambda _: {})


def _layers(ctx: RankContext) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(ctx.device)


def _expanded(ctx: RankContext) -> nn.Module:
    module = _layers(ctx)
    module[1].weight = nn.Parameter(torch.ones(3, 1, device=ctx.device).expand(3, 3))
    return module


def _is_last(ctx: RankContext) -> bool:
    return ctx.rank == ctx.world_size - 1


def _shape(ctx: RankContext) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3 + ctx.rank)).to(ctx.device)


def _transposed(ctx: RankContext) -> nn.Module:
    shape = (4, 3) if _is_last(ctx) else (3, 4)
    module = _layers(ctx)
    module[1].weight = nn.Parameter(torch.zeros(shape, device=ctx.device))
    return module


def _additional_layer(ctx: RankContext, *, on_last: bool) -> nn.Module:
    module = _layers(ctx)
    if _is_last(ctx) is on_last:
        module.append(nn.Linear(3, 3, bias=False).to(ctx.device))
    return module


def _reordered(ctx: RankContext, *, frozen: bool) -> nn.Module:
    module = nn.Sequential()
    for name in ("q", "k") if _is_last(ctx) else ("k", "q"):
        module.add_module(name, nn.Linear(3, 3).requires_grad_(not frozen))
    module.add_module("out", nn.Linear(3, 3))
    return module.to(ctx.device)


def _reordered_buffers(ctx: RankContext) -> nn.Module:
    module = _layers(ctx)
    for name in ("mean", "variance") if _is_last(ctx) else ("variance", "mean"):
        module.register_buffer(name, torch.zeros(3, device=ctx.device))
    return module


def _other_on_last(ctx: RankContext, other: Tensor | None, *, frozen: bool = False) -> nn.Module:
    """Return layers with a buffer `mean`, or a frozen parameter, of which the last rank has another one; None: two."""
    module = _layers(ctx)
    held = {"mean": torch.zeros(3), "more": torch.zeros(1)} if other is None else {"mean": other}
    for name, tensor in (held if _is_last(ctx) else {"mean": torch.zeros(3)}).items():
        if frozen:
            module.register_parameter(name, nn.Parameter(tensor.to(ctx.device), requires_grad=False))
        else:
            module.register_buffer(name, tensor.to(ctx.device))
    return module


def _dtype(ctx: RankContext) -> nn.Module:
    module = _layers(ctx)
    if _is_last(ctx):
        module[1].to(torch.bfloat16)
    return module


def _frozen_on_last(ctx: RankContext) -> nn.Module:
    module = _layers(ctx)
    module[1].bias.requires_grad_(not _is_last(ctx))
    return module


def _ignored_on_last(ctx: RankContext, name: str) -> nn.Module:
    module = _layers(ctx)
    module.register_buffer("table", torch.zeros(3, device=ctx.device))
    if _is_last(ctx):
        module._ddp_params_and_buffers_to_ignore = [name]  # type: ignore[assignment]
    return module


def _all_ignored(ctx: RankContext) -> nn.Module:
    module = _layers(ctx)
    module._ddp_params_and_buffers_to_ignore = [name for name, _ in module.named_parameters()]  # type: ignore[assignment]
    return module


def _two_device_types(ctx: RankContext) -> nn.Module:
    module = _layers(ctx)
    module.append(nn.Linear(3, 3, device="meta"))
    return module


def _mesh(ctx: RankContext, *shape: int) -> DeviceMesh:
    ranks = torch.arange(ctx.world_size).reshape(shape)
    return DeviceMesh(ctx.device.type, ranks, _init_backend=False, _rank=ctx.rank)


def _delayed(ctx: RankContext) -> dict[str, Any]:
    return {"delay_all_reduce_named_params": [("0.weight", nn.Parameter(torch.zeros(3, 3)))]}


def _on_one(name: str, value: Any, *, last: bool) -> Callable[[RankContext], dict[str, Any]]:
    return lambda ctx: {name: value} if ctx.rank == (ctx.world_size - 1 if last else 0) else {}


def _option(name: str, value: Any) -> Callable[[RankContext], dict[str, Any]]:
    return lambda _: {name: value}


MISTAKES: Mapping[str, Mistake] = {
    "shape": Mistake(_shape, Raises(mentions=("1.weight",))),
    "transposed_shape": Mistake(_transposed, Raises(mentions=("1.weight",))),
    "layer_more_on_last": Mistake(partial(_additional_layer, on_last=True), Raises()),
    "layer_less_on_last": Mistake(partial(_additional_layer, on_last=False), Raises()),
    "frozen_on_last": Mistake(_frozen_on_last, Raises()),
    "dtype": Mistake(_dtype, Raises(mentions=("1.weight",))),
    "parameter_ignored_on_last": Mistake(partial(_ignored_on_last, name="1.bias"), Raises()),
    "buffer_ignored_on_last": Mistake(partial(_ignored_on_last, name="table"), Raises()),
    "reordered": Mistake(partial(_reordered, frozen=False), Raises(mentions=("k.weight", "q.weight"))),
    "frozen_reordered": Mistake(partial(_reordered, frozen=True), Raises(mentions=("k.weight", "q.weight"))),
    "buffers_reordered": Mistake(_reordered_buffers, Raises(mentions=("mean", "variance"))),
    "larger_buffer": Mistake(partial(_other_on_last, other=torch.zeros(5)), Raises(mentions=("mean",))),
    "smaller_buffer": Mistake(partial(_other_on_last, other=torch.zeros(2)), Raises(mentions=("mean",))),
    "buffer_of_integers": Mistake(partial(_other_on_last, other=torch.zeros(3).long()), Raises(mentions=("mean",))),
    "buffer_more": Mistake(partial(_other_on_last, other=None), Raises(mentions=("more",))),
    "buffer_of_two": Mistake(
        partial(_other_on_last, other=TwoTensor(torch.zeros(3), torch.zeros(3))), Raises(mentions=("mean",))
    ),
    "larger_frozen": Mistake(partial(_other_on_last, other=torch.zeros(5), frozen=True), Raises(mentions=("mean",))),
    "all_meta": Mistake(lambda ctx: _layers(ctx).to("meta"), Raises(mentions=("meta",))),
    "one_on_meta": Mistake(_two_device_types, Raises(mentions=("meta", "2.weight"))),
    "all_meta_on_first": Mistake(
        lambda ctx: _layers(ctx).to("meta") if ctx.rank == 0 else _layers(ctx), Raises(mentions=("meta",))
    ),
    "no_parameters": Mistake(lambda _: nn.ReLU(), _NOTHING_TO_TRAIN),
    "all_frozen": Mistake(lambda ctx: _layers(ctx).requires_grad_(False), _NOTHING_TO_TRAIN),
    "all_ignored": Mistake(_all_ignored, _NOTHING_TO_TRAIN),
    "two_device_ids": Mistake(_layers, Raises(("ValueError",), ("device",)), _option("device_ids", [0, 1])),
    "device_ids_on_cpu": Mistake(
        lambda _: nn.Linear(3, 3), Raises(("ValueError",), ("device",)), _option("device_ids", [0])
    ),
    "two_device_ids_on_first": Mistake(
        _layers, Raises(mentions=("device_ids",)), _on_one("device_ids", [0, 1], last=False)
    ),
    "unknown_option_on_last": Mistake(
        _layers, Raises(mentions=("bucket_cap_gb",)), _on_one("bucket_cap_gb", 1, last=True)
    ),
    "output_device_on_cpu": Mistake(
        lambda _: nn.Linear(3, 3), Raises(("ValueError",), ("device",)), _option("output_device", 1)
    ),
    "group_and_mesh": Mistake(
        _layers,
        Raises(mentions=("process_group", "device_mesh")),
        lambda ctx: {"process_group": ctx.process_group, "device_mesh": _mesh(ctx, ctx.world_size)},
    ),
    "two_dimensional_mesh": Mistake(
        _layers, Raises(mentions=("mesh",)), lambda ctx: {"device_mesh": _mesh(ctx, ctx.world_size, 1)}
    ),
    "group_is_text": Mistake(_layers, _NO_GROUP, _option("process_group", "gloo")),
    "group_is_ranks": Mistake(_layers, _NO_GROUP, lambda ctx: {"process_group": list(range(ctx.world_size))}),
    "group_of_others": Mistake(_layers, _NO_GROUP, _option("process_group", dist.GroupMember.NON_GROUP_MEMBER)),
    "group_is_0": Mistake(_layers, _NO_GROUP, _option("process_group", 0)),
    "group_is_empty": Mistake(_layers, _NO_GROUP, _option("process_group", [])),
    "negative_cap": Mistake(_layers, Raises(("ValueError", "TypeError")), _option("bucket_cap_mb", -1)),
    "negative_cap_in_list": Mistake(
        _layers, Raises(("ValueError", "TypeError")), _option("bucket_cap_mb_list", [1, -1])
    ),
    "cap_is_text": Mistake(_layers, Raises(("ValueError", "TypeError")), _option("bucket_cap_mb", "25")),
    "function": Mistake(lambda _: torch.sin, Raises(mentions=(("builtin", "built-in", "function", "method"),))),
    "class": Mistake(lambda _: nn.Linear, Raises(mentions=(("type", "class", "Linear"),))),
    "expanded": Mistake(
        _expanded, Raises(("RuntimeError",), (("memory", "storage", "share", "overlap", "alias", "expand", "stride"),))
    ),
    "lazy": Mistake(
        lambda ctx: nn.Sequential(nn.Linear(3, 3, device=ctx.device), nn.LazyLinear(2, device=ctx.device)),
        Raises(("RuntimeError",), (("initiali", "lazy"),)),
    ),
    "two_device_types": Mistake(_two_device_types, Raises(("ValueError",), ("device",))),
    "delay_without_hook": Mistake(_layers, Raises(("ValueError",), _DELAY), _delayed),
    "hook_without_delay": Mistake(
        _layers, Raises(("ValueError",), _DELAY), _option("param_to_hook_all_reduce", nn.Parameter(torch.zeros(3, 3)))
    ),
    "unknown_option": Mistake(_layers, Raises(("TypeError",), ("bucket_cap_gb",)), _option("bucket_cap_gb", 1)),
}


@program("construction_error", invariants=("same_collectives", "leaves_no_trace"))
def construction_error(ctx: RankContext) -> None:
    """Make the mistakes that argument `mistake` names, in order; with `recover`, train a good module afterwards.

    With `late` rank 0 begins later than other ranks wait for its report, in the middle of their comparison.
    Observes `construct`, for each the exception or None, and after a recovery `step0/grad/<name>`. All ranks run it.
    """
    if ctx.arguments.get("late") and ctx.rank == 0:
        time.sleep(_LATE_S)
    for place, mistake in enumerate(MISTAKES[name] for name in ctx.arguments["mistake"].split(" ")):
        with ctx.catching(f"construct{place or ''}", must=mistake.raises):
            ctx.wrap(mistake.module(ctx), **mistake.options(ctx))
    if ctx.arguments.get("recover"):
        module = with_integer_weights(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))).to(ctx.device)
        observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), _good_step, 1))
