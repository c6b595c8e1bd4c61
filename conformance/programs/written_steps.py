"""Runs steps that a program writes itself under the DDP; `truth.steps` runs the same steps without DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from conformance.models.integers import RankStep
from conformance.programs.rank_context import RankContext
from conformance.truth.steps import StepFunction, gradients


def rank_step(ctx: RankContext, index: int) -> RankStep:
    """Return this rank's part in step `index`, which announces its phases to the harness."""
    return RankStep(ctx.rank, index, ctx.device, partial(ctx.phase, step=index))


def run_steps(ctx: RankContext, module: nn.Module, model: Any, step: StepFunction, num_steps: int) -> dict[str, Any]:
    """Run `step` on `model` for steps 0 to `num_steps` - 1 and return what `simulate_steps` returns for a rank.

    `module` is the module inside `model`. Sets its gradients to None before every step. All ranks must call it.
    """
    facts: dict[str, Any] = {}
    for index in range(num_steps):
        module.zero_grad(set_to_none=True)
        extra = step(model, rank_step(ctx, index)) or {}
        facts |= {f"step{index}/{name}": value for name, value in extra.items()}
        facts |= gradients(f"step{index}", module)
    return facts


def observe_run(ctx: RankContext, run: Callable[[], dict[str, Any]], *, may_refuse: bool = False) -> None:
    """Observe the facts that `run` returns; with `may_refuse`, as one fact `outcome`, which may be an exception."""
    if not may_refuse:
        for name, value in run().items():
            ctx.observe(name, value)
        return
    facts: dict[str, Any] = {}
    with ctx.catching("raised"):
        facts = run()
    error = ctx.facts.pop("raised")
    ctx.observe("outcome", facts if error is None else error)
