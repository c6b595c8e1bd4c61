"""Runs steps that a program writes itself, and observes their facts, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from conformance.models.integers import RankStep
from conformance.programs.rank_context import UNSTATED, RankContext
from conformance.truth.expected import AnyOf, Matcher
from conformance.truth.steps import StepFunction, gradients


def rank_step(ctx: RankContext, index: int) -> RankStep:
    """Return this rank's part in step `index`, which enters phases of `ctx`."""
    return RankStep(ctx.rank, index, ctx.device, partial(ctx.phase, step=index))


def run_steps(ctx: RankContext, module: nn.Module, model: Any, step: StepFunction, num_steps: int) -> dict[str, Any]:
    """Run `step` on `model` for steps 0 to `num_steps` - 1; return `step<k>/grad/<name>` and what `step` returns.

    All names begin with `step<k>/`. `module` is the module inside `model`; its gradients are set to None before every
    step. All ranks must call it.
    """
    facts: dict[str, Any] = {}
    for index in range(num_steps):
        module.zero_grad(set_to_none=True)
        extra = step(model, rank_step(ctx, index)) or {}
        facts |= {f"step{index}/{name}": value for name, value in extra.items()}
        facts |= gradients(f"step{index}", module)
    return facts


_NOTHING: Mapping[str, Any] = {}


def observe_run(
    ctx: RankContext, run: Callable[[], dict[str, Any]], *, must: Mapping[str, Any] = _NOTHING,
    refusal: Matcher | None = None, may_refuse: bool = False,
) -> None:  # fmt: skip
    """Observe the facts that `run` returns; `must` demands values of some of them.

    With a `refusal`, observe all as one fact `outcome`; a DDP may raise the refusal instead. With `may_refuse`, the
    program's expectation has the refusal.
    """
    if refusal is not None or may_refuse:
        observe_or_refused(ctx, "outcome", run, refusal, must)
        return
    for name, value in run().items():
        ctx.observe(name, value, must=must.get(name, UNSTATED))


def observe_or_refused(
    ctx: RankContext, name: str, run: Callable[[], dict[str, Any]], refusal: Matcher | None,
    must: Mapping[str, Any] = _NOTHING,
) -> None:  # fmt: skip
    """Observe as fact `name` what `run` returns, or what it raises, which must be a `refusal`; None: it may not raise.

    `must` demands values of some names.
    """
    facts: dict[str, Any] = {}
    with ctx.catching("raised"):
        facts = run()
    error = ctx.facts.pop("raised")
    demanded = facts | {name: value for name, value in must.items() if name in facts}
    if refusal is None or error is not None:  # a plain DDP that raises shows it: no other raises the very same
        ctx.observe(name, facts if error is None else error)
    else:
        ctx.observe(name, facts, must=AnyOf(demanded, refusal))
