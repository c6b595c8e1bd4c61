"""The reducer under compiled autograd, which reports no end of a backward: averages, or an error on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.utils.checkpoint import checkpoint

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.compiled_models import WIDTH, layers
from ddp_impl.tests.ranks import run_ranks

#: With this cap every layer is a bucket of its own.
_ONE_LAYER: dict[str, Any] = {"bucket_cap_mb": 4 * WIDTH * (WIDTH + 1) / 2**20}


def _captured() -> AbstractContextManager[None]:
    captured: AbstractContextManager[None] = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    return captured


def _compiled(module: nn.Module) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(module, backend="aot_eager")
    return compiled


def _inputs(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def _models(num: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(layers(3) for _ in range(num))


def _loss(calls: list[Callable[..., Any]], inputs: Tensor) -> Tensor:
    return torch.stack([call(inputs).square().sum() for call in calls]).sum()


def _refused(rank: int, what: str) -> tuple[str, list[Tensor]]:
    """Return what the backward raises under compiled autograd, and the gradients of the same one without it."""
    model: Any = _models(1)[0]
    options: dict[str, Any] = {"find_unused_parameters": what == "unused", "static_graph": what == "static"}
    if what == "delayed":
        options |= {"delay_all_reduce_named_params": [("0.weight", model[0].weight)]}
        options |= {"param_to_hook_all_reduce": model[0].bias}
    if what == "optimizer":
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.0})
    ddp = DistributedDataParallel(model, **_ONE_LAYER, **options)
    wrapped = [ddp]
    if what == "shared":
        wrapped.append(DistributedDataParallel(nn.Sequential(model[0], nn.Linear(WIDTH, WIDTH))))
    if what == "hook":
        ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError) as raised, _captured():
        _loss([_compiled(ddp) for ddp in wrapped], _inputs(rank, 0)).backward()
    model.zero_grad()
    _loss([*wrapped], _inputs(rank, 0)).backward()
    return str(raised.value), _gradients(model)


def _local_before(ddp: DistributedDataParallel, call: Callable[..., Any], rank: int, step: int) -> None:
    with ddp.no_sync():
        local = call(_inputs(rank, 7)).square().sum()
    loss = call(_inputs(rank, step)).square().sum()
    local.backward()
    loss.backward()


def _local_within(ddp: DistributedDataParallel, call: Callable[..., Any], rank: int, step: int) -> None:
    with ddp.no_sync():
        local = call(_inputs(rank, 7)).square().sum()
    (local + call(_inputs(rank, step)).square().sum()).backward()


def _twice(ddp: DistributedDataParallel, call: Callable[..., Any], rank: int, step: int) -> None:
    output = call(_inputs(rank, step))
    output.square().sum().backward(retain_graph=True)
    output.sum().backward()


def _frozen(ddp: DistributedDataParallel, call: Callable[..., Any], rank: int, step: int) -> None:
    ddp.module[0].bias.requires_grad_(step < 2)  # type: ignore[index]
    call(_inputs(rank, step)).square().sum().backward()


def _unrelated_output(ddp: DistributedDataParallel, call: Callable[..., Any], rank: int, step: int) -> None:
    inputs = _inputs(rank, step).requires_grad_()
    output, passed_on = call(inputs)
    (output.square().sum() + passed_on.square().sum()).backward()


class _PassesOn(nn.Sequential):
    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs), inputs * 2


def _steps(rank: int) -> dict[str, list[list[list[Tensor]]]]:
    """Return the gradients of each kind of step, with compiled autograd and without."""
    kinds = (_local_before, _local_within, _twice, _frozen, _unrelated_output)
    return {kind.__name__: [_trained(kind, rank, captured) for captured in (True, False)] for kind in kinds}


def _trained(kind: Callable[..., None], rank: int, captured: bool) -> list[list[Tensor]]:
    model: nn.Module = _models(1)[0]
    if kind is _unrelated_output:
        model.__class__ = _PassesOn
    ddp = DistributedDataParallel(model, **_ONE_LAYER)
    call = _compiled(ddp) if captured else ddp
    steps = []
    for step in range(4):
        model.zero_grad()
        with _captured() if captured else nullcontext():
            kind(ddp, call, rank, step)
        steps.append(_gradients(model))
    return steps


@pytest.mark.nightly
def test_every_kind_of_step_is_what_it_is_without_a_compiler(tmp_path: Path) -> None:
    for trained in run_ranks(_steps, 2, tmp_path):
        for kind, (captured, eager) in trained.items():
            for ours, truth in zip(captured, eager, strict=True):
                assert len(ours) == len(truth), kind
                assert all(map(torch.equal, ours, truth)), kind


_REFUSED = ("unused", "static", "delayed", "optimizer", "shared", "hook")


def _refused_all(rank: int) -> dict[str, tuple[str, list[Tensor]]]:
    return {what: _refused(rank, what) for what in _REFUSED}


@pytest.mark.nightly
def test_what_needs_the_end_is_refused_on_every_rank_and_trains_without_it(tmp_path: Path) -> None:
    ranks = run_ranks(_refused_all, 2, tmp_path)
    for what in _REFUSED:
        for rank, refused in enumerate(ranks):
            error = refused[what][0]
            assert re.search(rf"rank {rank}\b.*compiled_autograd = False", error), error
        assert all(map(torch.equal, ranks[0][what][1], ranks[1][what][1])), what


def _goes_wrong(rank: int, what: str) -> tuple[str, str]:
    """Return what a backward that goes wrong raises, if it raises, and what the next forward says."""
    model: Any = _models(1)[0]
    ddp = DistributedDataParallel(model, **_ONE_LAYER)
    call = _compiled(ddp)

    def raise_in_backward(_: Tensor) -> None:
        raise ValueError("in the user's hook")

    if what == "raises":
        model[2].bias.register_post_accumulate_grad_hook(raise_in_backward)
    in_backward = ""
    with _captured():
        loss = call(_inputs(rank, 0)).square().sum()
        try:
            if what == "misses":
                torch.autograd.backward(loss, inputs=[model[4].weight, model[4].bias])
            else:
                loss.backward()
        except ValueError as error:
            in_backward = str(error)
    with pytest.raises(RuntimeError) as raised:
        call(_inputs(rank, 1))
    return in_backward, str(raised.value)


def _goes_wrong_both_ways(rank: int) -> list[tuple[str, str]]:
    return [_goes_wrong(rank, what) for what in ("misses", "raises")]


@pytest.mark.nightly
def test_the_next_forward_reports_a_failed_backward(tmp_path: Path) -> None:
    for rank, (misses, raises) in enumerate(run_ranks(_goes_wrong_both_ways, 2, tmp_path)):
        assert not misses[0]
        assert f"did not receive grad for rank {rank}: 0.weight, 0.bias, 2.weight, 2.bias" in misses[1]
        assert raises[0] == "in the user's hook"
        assert "the previous backward ended" in raises[1]


class _Recomputes(nn.Sequential):
    def forward(self, inputs: Tensor) -> Any:
        for _ in range(2):
            inputs = checkpoint(super().forward, inputs, use_reentrant=True)
        return inputs


def _repeats(rank: int) -> str:
    model: nn.Module = _models(1)[0]
    model.__class__ = _Recomputes
    ddp = DistributedDataParallel(model)
    with pytest.raises(RuntimeError) as raised, _captured():
        ddp(_inputs(rank, 0).requires_grad_()).sum().backward()
    return str(raised.value)


def test_a_gradient_that_comes_again_after_the_averages_is_an_error(tmp_path: Path) -> None:
    for rank, error in enumerate(run_ranks(_repeats, 2, tmp_path)):
        assert re.search(rf"rank {rank}\b.*ready twice", error), error
