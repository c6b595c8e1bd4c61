"""Runs steps that a program writes itself, and observes their facts, or a refusal."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from conformance.models.integers import RankStep
from conformance.programs.rank_context import UNSTATED, RankContext
from conformance.truth.expected import AnyOf, Matcher
from conformance.truth.steps import StepFunction, gradients


def rank_step(ctx: RankContext, index: int) -> RankStep:
    """Return this rank's part in step `index`, which enters phases of `ctx`."""
    return RankStep(ctx.rank, index, ctx.device, partial(ctx.phase, step=index))


def step_on(*shape: int) -> StepFunction:
    """Return a step of forward, loss and backward on this rank's inputs of `shape`."""

    def step(model: Any, turn: RankStep) -> None:
        turn.backward(turn.loss(turn.forward(model, turn.inputs(*shape))))

    return step


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


@contextlib.contextmanager
def observing_warnings(ctx: RankContext) -> Iterator[None]:
    """Observe as fact `warnings` what the block warns of, which must be nothing.

    Warnings that torch shows once per process are there each time.
    """
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.set_warn_always(always)
    ctx.observe("warnings", [str(each.message) for each in caught], must=[])


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


def in_a_thread(function: Callable[[], object]) -> None:
    """Call `function` in a thread of its own, wait for its end, and raise what it raised."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
