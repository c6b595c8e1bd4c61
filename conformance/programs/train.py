"""Program `train`: wraps the model, runs the schedule with SGD, and observes everything that training changes."""

from __future__ import annotations

from torch import nn, optim

from conformance.models.optimizers import sgd
from conformance.programs import RankContext, program
from conformance.scenario import Step


@program(
    "train", invariants=("same_collectives", "silent_no_sync", "nothing_in_flight"), native_facts=("step", "final")
)
def train(ctx: RankContext) -> None:
    """Train by the schedule. Argument `ignored`: names of parameters and buffers that DDP must ignore.

    Observes after every backward `<prefix>/loss` and `<prefix>/grad/<name>`, where the prefix is `step<k>/local<m>`
    under `no_sync` and `step<k>` when it synchronises; then `step<k>/parameter/<name>` and `step<k>/buffer/<name>`, and
    both under `final` at the end. All ranks run it.
    """
    module = ctx.build_model()
    if ignored := ctx.arguments.get("ignored"):
        module._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]
    model = ctx.wrap(module)
    optimizer = sgd(module, ctx.fixture)
    for index, step in enumerate(ctx.scenario.schedule):
        run_step(ctx, model, module, optimizer, index, step)
    ctx.observe_parameters("final", module)
    ctx.observe_buffers("final", module)


def run_step(
    ctx: RankContext, model: nn.Module, module: nn.Module, optimizer: optim.Optimizer, index: int, step: Step
) -> None:
    """Run one step of a schedule on the wrapped `model` and observe its facts; `module` is the model unwrapped."""
    if step.zero_grad != "keep":
        optimizer.zero_grad(set_to_none=step.zero_grad == "none")
    for micro in range(step.local_backwards):
        with ctx.no_sync(model):
            _backward(ctx, model, module, f"step{index}/local{micro}", index, micro)
    if step.synchronised:
        _backward(ctx, model, module, f"step{index}", index, step.local_backwards)
    if step.optimizer:
        with ctx.phase("optimizer", index):
            optimizer.step()
    ctx.observe_parameters(f"step{index}", module)
    ctx.observe_buffers(f"step{index}", module)


def _backward(ctx: RankContext, model: nn.Module, module: nn.Module, prefix: str, step: int, micro: int) -> None:
    loss = ctx.loss(model, step, micro)
    ctx.backward(loss, step)
    ctx.observe(f"{prefix}/loss", loss)
    ctx.observe_gradients(prefix, module)
