"""Programs about optimizers that step each parameter inside backward, as soon as its averaged gradient is ready.

Modules are linear in every parameter: gradients stay integers whatever an optimizer does.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
)

from conformance.errors import present
from conformance.models.integers import RankStep, with_integer_weights
from conformance.models.optimizers import SETS_TO_NONE
from conformance.programs import RankContext, observe_run, program, rank_step
from conformance.programs.unused_parameters import Switched
from conformance.scenario import Scenario
from conformance.truth.expected import Anything, Raises, at_least, at_most
from conformance.truth.steps import gradients

#: Name -> class and settings. Those of SGD are powers of two: multiplying by them is exact.
OPTIMIZERS: Mapping[str, tuple[type[optim.Optimizer], Mapping[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.25}),
    "momentum": (optim.SGD, {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.125}),
    "adam": (optim.Adam, {"lr": 0.125}),
    "adamw": (optim.AdamW, {"lr": 0.125, "weight_decay": 0.25}),
    "rmsprop": (optim.RMSprop, {"lr": 0.125}),
}

_REFUSAL = Raises(("RuntimeError", "ValueError", "NotImplementedError"), ("optimizer",))


def _build(scenario: Scenario) -> nn.Module:
    return with_integer_weights(Switched(), scenario.seed)


def _optimizer_names(scenario: Scenario, parameter: str) -> Sequence[str]:
    """Return the optimizers that step `parameter` in backward: `optimizers` maps branches, or `*`, to names."""
    chosen: Mapping[str, list[str]] = scenario.arguments.get("optimizers", {"*": ["sgd"]})
    return chosen.get(parameter[0], chosen.get("*", []))


def _steps(scenario: Scenario, rank: int) -> list[list[tuple[bool, list[str]]]]:
    """Return for each step its micro-batches as (synchronised, uses).

    Argument `steps` holds for each step a list of micro-batches, each a text per rank, taken in turn: what the rank
    uses, after `local:` if the micro-batch runs under `no_sync`.
    """
    steps = []
    for step in scenario.arguments["steps"]:
        texts = [micro[rank % len(micro)] for micro in step]
        steps.append([(not text.startswith("local:"), text.removeprefix("local:").split()) for text in texts])
    return steps


def _backward(model: nn.Module, turn: RankStep, micro: int, uses: Sequence[str]) -> None:
    output = torch.stack(turn.forward(model, turn.inputs(4, 3, micro=micro), uses))
    turn.backward(turn.loss(output, micro=micro))


class _InBackward:
    """One rank's optimizers in backward, and how often each parameter was stepped."""

    def __init__(self, scenario: Scenario, module: nn.Module) -> None:
        self.num_steps = {name: 0 for name, _ in module.named_parameters()}
        for name, parameter in module.named_parameters():
            for optimizer in _optimizer_names(scenario, name):
                kind, settings = OPTIMIZERS[optimizer]
                _apply_optimizer_in_backward(kind, [parameter], dict(settings))
            for made in getattr(parameter, "_in_backward_optimizers", ()):
                made.register_step_post_hook(self._counting(name))
        self.optimizers = _get_in_backward_optimizers(module)

    def _counting(self, name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            self.num_steps[name] += 1

        return count

    def halve_rates(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] /= 2


def _rest(scenario: Scenario, module: nn.Module) -> optim.Optimizer | None:
    rest = [parameter for name, parameter in module.named_parameters() if not _optimizer_names(scenario, name)]
    return optim.SGD(rest, lr=0.25) if rest else None


@program("optimizer_in_backward", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def optimizer_in_backward(ctx: RankContext) -> None:
    """Train steps in which optimizers run inside backward, given to parameters by torch's own function.

    Arguments: `optimizers` and `steps` as above; `after` wraps first and gives optimizers then; `hook` averages with a
    comm hook; `keep_gradients` sets torch's environment variable that keeps gradients; `ignored` as for `train`;
    `halve_rates` after every step; `may_refuse`: everything is one fact `outcome`, which may be an exception.
    `watch` names a parameter of the branch whose gradients arrive last: when its gradient is computed, the program
    counts the gradients that are alive (`step<k>/live`) and the optimizers that have stepped (`step<k>/stepped`).
    Observes after each micro-batch gradients and parameters, and after each step `num_steps` by parameter.
    All ranks run it.
    """
    refusal = _REFUSAL if ctx.arguments.get("may_refuse") else None
    observe_run(ctx, lambda: _train(ctx), must=_early(ctx.scenario), refusal=refusal)


def _train(ctx: RankContext) -> dict[str, Any]:
    scenario = ctx.scenario
    facts: dict[str, Any] = {}
    module = _build(scenario).to(ctx.device)
    module._ddp_params_and_buffers_to_ignore = list(ctx.arguments.get("ignored", ()))  # type: ignore[assignment]
    after = bool(ctx.arguments.get("after"))
    inner = None if after else _InBackward(scenario, module)
    model: Any = ctx.wrap(module)
    inner = inner or _InBackward(scenario, module)
    if ctx.arguments.get("hook"):
        model.register_comm_hook(None, _doubling_hook(ctx))
    rest = _rest(scenario, module)
    seen: dict[str, int] = {}
    if watched := ctx.arguments.get("watch"):
        module.get_parameter(watched).register_hook(lambda _: seen.update(_alive_and_stepped(module, inner)))
    with mock.patch.dict(os.environ, {SETS_TO_NONE: "0" if ctx.arguments.get("keep_gradients") else "1"}):
        for index, micro_batches in enumerate(_steps(scenario, ctx.rank)):
            if scenario.arguments.get("zero_grad", True):
                module.zero_grad()
            for micro, (synchronised, uses) in enumerate(micro_batches):
                with contextlib.nullcontext() if synchronised else ctx.no_sync(model):
                    _backward(model, rank_step(ctx, index), micro, uses)
                facts |= _state(f"step{index}/micro{micro}", module)
            if rest is not None:
                rest.step()
            facts |= _after_step(index, module, inner)
            facts |= {f"step{index}/{name}": count for name, count in seen.items()}
            if ctx.arguments.get("halve_rates"):
                inner.halve_rates()
    return facts


def _early(scenario: Scenario) -> Mapping[str, Any]:
    """Return what is required when the last gradients are computed, from the second step on.

    Every bucket holds one gradient. Of the branch that is watched two may still be missing, and two buckets alive.
    """
    if "watch" not in scenario.arguments:
        return {}
    num_parameters = sum(1 for _ in _build(scenario).parameters())
    must: dict[str, Any] = {"step0/live": Anything(), "step0/stepped": Anything()}
    for index in range(1, len(scenario.arguments["steps"])):
        must[f"step{index}/live"] = at_most(2)
        must[f"step{index}/stepped"] = at_least((index + 1) * num_parameters - 4)
    return must


def _alive_and_stepped(module: nn.Module, inner: _InBackward) -> dict[str, int]:
    alive = sum(parameter.grad is not None for parameter in module.parameters())
    return {"live": alive, "stepped": sum(inner.num_steps.values())}


def _state(prefix: str, module: nn.Module) -> dict[str, Any]:
    parameters = {f"{prefix}/parameter/{name}": p.detach().clone() for name, p in module.named_parameters()}
    return {**gradients(prefix, module), **parameters}


def _after_step(index: int, module: nn.Module, inner: _InBackward) -> dict[str, Any]:
    facts: dict[str, Any] = {f"step{index}/num_steps/{name}": count for name, count in inner.num_steps.items()}
    for name, parameter in module.named_parameters():
        facts[f"step{index}/parameter/{name}"] = parameter.detach().clone()
    return facts


def _doubling_hook(ctx: RankContext) -> Callable[[Any, Any], Any]:
    """Return a hook of twice the mean, which shows where an optimizer steps on something else."""

    def double(bucket: Any) -> Any:
        buffer = bucket.buffer().mul_(2).div_(ctx.world_size)
        work = present(dist.all_reduce(buffer, group=ctx.process_group, async_op=True))
        return work.get_future().then(lambda future: future.value()[0])

    return lambda _, bucket: double(bucket)  # without annotations, which torch compares with its own types


@program("restarted_optimizer_in_backward", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def restarted_optimizer_in_backward(ctx: RankContext) -> None:
    """Train two steps, save model and optimizers, load both into new ones, and train two steps more.

    Observes the parameters after each step. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    inner = _InBackward(ctx.scenario, module)
    model = ctx.wrap(module)
    for index in range(4):
        if index == 2:
            states = [optimizer.state_dict() for optimizer in _get_in_backward_optimizers(model)]
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            other = ctx.scenario.replace(seed=ctx.scenario.seed + 1 + ctx.rank)
            module = _build(other).to(ctx.device)
            inner = _InBackward(ctx.scenario, module)
            model = ctx.wrap(module)
            model.load_state_dict(weights)
            for optimizer, state in zip(inner.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        _backward(model, rank_step(ctx, index), 0, list("abcd"))
        ctx.observe_parameters(f"step{index}", module)


@program("fused_optimizer", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def fused_optimizer(ctx: RankContext) -> None:
    """Train with `_register_fused_optim`: argument `optimizer` names it, `only` the branches that it steps, if not all.

    Observes `step<k>/parameter/<name>`. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module)
    kind, settings = OPTIMIZERS[ctx.arguments["optimizer"]]
    only = ctx.arguments.get("only")
    chosen = None if only is None else [p for name, p in module.named_parameters() if name[0] in only]
    with _silent():
        model._register_fused_optim(kind, optim_params=chosen, **settings)
    for index in range(3):
        module.zero_grad()
        _backward(model, rank_step(ctx, index), 0, list("abcd"))
        ctx.observe_parameters(f"step{index}", module)


@program("fused_optimizer_refusal", invariants=("leaves_no_trace",))
def fused_optimizer_refusal(ctx: RankContext) -> None:
    """Register an optimizer that has no functional form, then one that has, then another.

    Observes the three exceptions as `unknown`, `first` and `second`. All ranks run it.
    """
    model: Any = ctx.wrap(_build(ctx.scenario).to(ctx.device))
    with _silent():
        with ctx.catching("unknown", must=Raises(("ValueError", "RuntimeError"), ("ASGD",))):
            model._register_fused_optim(optim.ASGD)
        with ctx.catching("first", must=None):
            model._register_fused_optim(optim.SGD, lr=0.25)
        with ctx.catching("second", must=Raises(("RuntimeError",), ("once",))):
            model._register_fused_optim(optim.SGD, lr=0.25)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's functional optimizers say that they are deprecated
        yield
