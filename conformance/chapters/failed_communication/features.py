"""Features of a DDP: a module, options, and actions of the user besides forward and backward.

Every feature is trained in parts; a part begins without gradients and ends with what its user may read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

from conformance.chapters.failed_communication.failing_group import FAILURES
from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, rank_step
from conformance.programs.join_context import joining
from conformance.programs.offered import offered_beside

_ALL = "first second third"
#: More elements than a DDP would copy into a bucket.
_LARGE = 40_000


class Paths(nn.Module):
    """Layers beside each other, of which a forward uses some, and a buffer that counts forwards."""

    total: Tensor

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(3, 2)
        self.third = nn.Linear(3, 2)
        self.register_buffer("total", torch.zeros(2))
        if extra is not None:
            self.extra = extra

    def forward(self, inputs: Tensor, uses: str = _ALL, amount: int = 1) -> Tensor:
        self.total += amount
        output: Tensor = sum(self.get_submodule(name)(inputs) for name in uses.split())
        if not hasattr(self, "extra"):
            return output
        if isinstance(self.extra, nn.Embedding):
            output = output + self.extra(inputs[:, 0].long().abs())
        elif isinstance(self.extra, nn.ParameterList):
            output = output + self.extra[0].view(2, -1).sum(1)
        else:
            output = self.extra(output)
        return output


class Training:
    """One rank's training with one feature over one group: `parts` are run in turn, by all ranks."""

    def __init__(self, ctx: RankContext, feature: Feature, group: dist.ProcessGroup) -> None:
        self.ctx, self.feature, self.group = ctx, feature, group
        self.module: Any = with_integer_weights(feature.build(ctx, group), ctx.scenario.seed, ctx.rank).to(ctx.device)
        self.model: Any = None
        self.in_backward = False

    def wrap(self) -> None:
        self.model = self.ctx.wrap(self.module, process_group=self.group, **self.feature.options(self.module))
        self.feature.prepare(self)

    @property
    def parts(self) -> Sequence[Callable[[], dict[str, Any]]]:
        """Return the parts; each returns copies of gradients, parameters and buffers as it leaves them."""
        steps = [lambda index=index: self._step(index) for index in range(self.feature.num_steps)]
        return [self._uneven, *steps] if self.feature.is_uneven else steps

    def _step(self, index: int) -> dict[str, Any]:
        self.feature.before_step(self, index)
        self.module.zero_grad(set_to_none=True)
        num_local = self.feature.local_backwards
        for micro in range(num_local + 1):
            with self.ctx.no_sync(self.model) if micro < num_local else contextlib.nullcontext():
                self._backward(index, micro)
        self.feature.after_backward(self)
        return self._state()

    def _uneven(self) -> dict[str, Any]:
        self.module.zero_grad(set_to_none=True)
        with joining(self.ctx, self.model.join()):
            for index in range(3 - self.ctx.rank):
                self._backward(index, 0)
        return self._state()

    def _backward(self, index: int, micro: int) -> None:
        turn: RankStep = rank_step(self.ctx, index)
        uses, amount = self.feature.uses(self.ctx.rank, index), 1 + self.ctx.rank
        output = turn.forward(self.model, turn.inputs(4, 3, micro=micro), uses, amount)
        loss = turn.loss(output.float(), micro=micro)
        self.in_backward = True
        turn.backward(loss)
        self.in_backward = False

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            state[f"gradient of {name}"] = None if gradient is None else gradient.detach().to_dense().clone()
            state[f"parameter {name}"] = parameter.detach().clone()
        return state | {f"buffer {name}": buffer.clone() for name, buffer in self.module.named_buffers()}


def _nothing(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Feature:
    """How a DDP is used, `needs` what it must be able to do for it, `failures` how its collectives can fail.

    `tells_parameters`: all that it communicates in backward is about parameters, which an error can name.
    """

    options: Callable[[nn.Module], Mapping[str, Any]] = lambda _: {}
    build: Callable[[RankContext, dist.ProcessGroup], nn.Module] = lambda *_: Paths()
    prepare: Callable[[Training], None] = _nothing
    before_step: Callable[[Training, int], None] = _nothing
    after_backward: Callable[[Training], None] = _nothing
    uses: Callable[[int, int], str] = lambda *_: _ALL
    num_steps: int = 2
    local_backwards: int = 0
    is_uneven: bool = False
    tells_parameters: bool = True
    failures: tuple[str, ...] = tuple(FAILURES)
    needs: tuple[str, ...] = field(default=())


def _given(**options: Any) -> Callable[[nn.Module], Mapping[str, Any]]:
    return lambda _: options


def _small(**options: Any) -> Callable[[nn.Module], Mapping[str, Any]]:
    return _given(bucket_cap_mb=0.00001, **options)


def _differing(rank: int, index: int) -> str:
    return "first second" if (rank + index) % 2 else "first third"


def _first_only(rank: int, index: int) -> str:
    return "first second" if rank == 0 else "first"


def _delayed(module: nn.Module) -> Mapping[str, Any]:
    named = dict(module.named_parameters())
    held = [(name, named[name]) for name in ("first.weight", "third.bias")]
    return {"delay_all_reduce_named_params": held, "param_to_hook_all_reduce": named["second.weight"]}


def _averaging(group: dist.ProcessGroup, bucket: Any) -> Any:
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].div_(group.size()))


def _hook(hook: Any) -> Callable[[Training], None]:
    return lambda training: training.model.register_comm_hook(training.group, hook)


def _builtin(training: Training) -> None:
    training.model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)


def _summing_buffers(group: dist.ProcessGroup, buffers: Mapping[str, Tensor]) -> Any:
    work: Any = dist.all_reduce(buffers["total"], group=group, async_op=True)
    return [work.get_future()]


def _summing_buffers_at_once(group: dist.ProcessGroup, buffers: Mapping[str, Tensor]) -> None:
    dist.all_reduce(buffers["total"], group=group)


def _buffer_hook(hook: Any, location: Any) -> Callable[[Training], None]:
    return lambda training: training.model._register_buffer_comm_hook(training.group, hook, location)


def _in_backward(training: Training) -> None:
    _apply_optimizer_in_backward(optim.SGD, training.module.parameters(), {"lr": 0.25})


def _fused(training: Training) -> None:
    training.model._register_fused_optim(optim.SGD, 0.25)


def _regroup(training: Training, index: int) -> None:
    if index:
        training.model._update_process_group(training.group)


def _evaluate(training: Training) -> None:
    with torch.no_grad():
        training.model(torch.ones(1, 3, device=training.ctx.device), _ALL, 1 + training.ctx.rank)


def _with_norm(ctx: RankContext, group: dist.ProcessGroup) -> nn.Module:
    """Return a module with the synchronised normalisation of the package that the DDP is of: torch's needs a GPU."""
    layer = offered_beside(type(ctx.wrap(nn.Linear(1, 1))), "SyncBatchNorm")
    if layer is None:
        ctx.unsupported("the DDP's package has no SyncBatchNorm of its own")
    return Paths(layer(2, process_group=group))


#: What a hook shows a DDP of its collectives: their futures; that they are complete; what torch's own wait raises.
_BY_FUTURE = ("gone", "future", "size", "call", "late")
_BY_COMPLETION = ("gone", "future", "call", "late")
_BY_TORCHS_WAIT = ("wait", "gone", "call", "late")
_PRE, _POST = _BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD

FEATURES: Mapping[str, Feature] = {
    "plain": Feature(options=_small()),
    "views": Feature(options=_small(gradient_as_bucket_view=True), needs=("gradient_as_bucket_view",)),
    "one-large": Feature(build=lambda *_: Paths(nn.ParameterList([torch.zeros(_LARGE)])), options=_small()),
    "sparse": Feature(build=lambda *_: Paths(nn.Embedding(5, 2, sparse=True)), needs=("sparse_gradients",)),
    "unused": Feature(
        options=_given(find_unused_parameters=True), uses=_differing, needs=("find_unused_parameters",)
    ),
    "unused-skipped": Feature(
        options=_small(find_unused_parameters=True, skip_all_reduce_unused_params=True), uses=_differing,
        needs=("find_unused_parameters", "skip_all_reduce_unused_params"),
    ),
    "static": Feature(options=_given(static_graph=True), uses=_first_only, needs=("static_graph",)),
    "accumulated": Feature(options=_small(), local_backwards=2, needs=("no_sync",)),
    "auto": Feature(options=_given(bucket_cap_mb="auto"), num_steps=4, needs=("auto_buckets",)),
    "delayed": Feature(options=_delayed, needs=("delay_all_reduce",)),
    "low-precision": Feature(
        options=_small(mixed_precision=_MixedPrecision(torch.float16, torch.float32)), needs=("mixed_precision",)
    ),
    "in-backward": Feature(options=_small(), prepare=_in_backward, needs=("optimizer_in_backward",)),
    "fused": Feature(options=_small(), prepare=_fused, needs=("optimizer_in_backward",)),
    "built-in-hook": Feature(options=_small(), prepare=_builtin, needs=("comm_hook",)),
    "ready-made-hook": Feature(
        options=_small(), prepare=_hook(default_hooks.allreduce_hook), failures=_BY_FUTURE, needs=("comm_hook",)
    ),
    "compressing-hook": Feature(
        options=_small(), prepare=_hook(default_hooks.fp16_compress_hook), failures=_BY_FUTURE, needs=("comm_hook",)
    ),
    "own-hook": Feature(
        options=_small(), prepare=_hook(lambda *given: _averaging(*given)), failures=_BY_FUTURE, needs=("comm_hook",)
    ),
    "buffer-hook": Feature(
        prepare=_buffer_hook(_summing_buffers, _POST), tells_parameters=False, failures=_BY_COMPLETION,
        needs=("comm_hook",),
    ),
    "waiting-buffer-hook": Feature(
        prepare=_buffer_hook(_summing_buffers_at_once, _PRE), tells_parameters=False, failures=_BY_TORCHS_WAIT,
        needs=("comm_hook",),
    ),
    "join": Feature(is_uneven=True, num_steps=1, tells_parameters=False, needs=("join",)),
    "regrouped": Feature(options=_small(), before_step=_regroup, needs=("update_process_group",)),
    "evaluated": Feature(after_backward=_evaluate),
    "synchronised-norm": Feature(build=_with_norm, tells_parameters=False),
}  # fmt: skip
