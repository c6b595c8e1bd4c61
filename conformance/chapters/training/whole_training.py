"""Program `training`: a whole training as users write it, with sampler, epochs, evaluation and checkpoints."""

import contextlib
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from conformance.models.recipe import Learner, Recipe, loss_ratio
from conformance.programs import RankContext, program
from conformance.truth.expected import Anything, at_least, at_most

_INVARIANTS = ("same_collectives", "silent_no_sync", "nothing_in_flight")


@program("training", invariants=_INVARIANTS, native_facts=("epoch", "final", "checkpoint"))
def training(ctx: RankContext) -> None:
    """Train by the recipe in the scenario's arguments (`models.recipe.Recipe`). All ranks run it.

    Observes for every epoch `loss` (of each micro-batch), `norm` (of each step's gradients) and `score`; of a
    checkpoint its keys; and at the end `final/parameter/...`, `final/buffer/...`, `loss_ratio`, and the last score by
    its name (`accuracy` or `test_loss`).
    """
    recipe = Recipe.of(ctx.scenario)
    run = _Run(ctx, recipe)
    for epoch in range(recipe.epochs):
        run.train(epoch)
        if recipe.evaluate:
            run.evaluate(epoch)
    run.finish()


class _Run:
    def __init__(self, ctx: RankContext, recipe: Recipe) -> None:
        self.ctx = ctx
        self.recipe = recipe
        self.module = ctx.build_model()
        self.model = ctx.wrap(self.module)
        self.learner = Learner(
            recipe, self.module, rank=ctx.rank, world_size=ctx.world_size, seed=ctx.scenario.seed, device=ctx.device
        )
        self.step = 0
        self.losses: list[Tensor] = []
        self.score = 0.0

    def train(self, epoch: int) -> None:
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        for micro_batches in self.learner.steps(epoch):
            self.learner.optimizer.zero_grad()
            for index, micro_batch in enumerate(micro_batches):
                last = index == len(micro_batches) - 1
                with contextlib.nullcontext() if last else self.ctx.no_sync(self.model):
                    losses.append(self._backward(micro_batch))
            with self.ctx.phase("optimizer", self.step):
                norms.append(self.learner.update())
            self.step += 1
            if self.recipe.restart and self.step == self.recipe.restart_after:
                self._restart()
        self.losses += losses
        self.ctx.observe(f"epoch{epoch}/loss", torch.stack(losses))
        self.ctx.observe(f"epoch{epoch}/norm", torch.stack(norms))

    def evaluate(self, epoch: int) -> None:
        with self.ctx.phase("forward", self.step):
            self.score = self.learner.evaluate(self.model)
        self.ctx.observe(f"epoch{epoch}/score", self.score)

    def finish(self) -> None:
        self.ctx.observe_parameters("final", self.module)
        self.ctx.observe_buffers("final", self.module)
        most, least = self.recipe.maximum_loss_ratio, self.recipe.minimum_accuracy
        self.ctx.observe("loss_ratio", loss_ratio(self.losses), must=at_most(most) if most else Anything())
        if self.recipe.evaluate:
            self.ctx.observe(self.learner.task.metric, self.score, must=at_least(least) if least else Anything())

    def _backward(self, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        with self.ctx.phase("forward", self.step):
            loss = self.learner.loss(self.model, micro_batch)
        self.ctx.backward(loss, self.step)
        return loss.detach()

    def _restart(self) -> None:
        """Drop model, DDP and optimizer, and continue from a checkpoint in a module with other weights."""
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), **self.learner.state()}, file)
        self.ctx.observe("checkpoint/keys", list(self.model.state_dict()))
        other = self.ctx.scenario.replace(seed=self.ctx.scenario.seed + 1 + self.ctx.rank)
        self.module = self.ctx.fixture.build(other, self.ctx.device)
        checkpoint = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        if self.recipe.restart == "every_rank":
            self.model = self.ctx.wrap(self.module)
            self.model.load_state_dict(checkpoint["model"])
        else:
            if self.ctx.rank == 0:
                _load_unwrapped(self.module, checkpoint["model"])
            self.model = self.ctx.wrap(self.module)
        self.learner.adopt(self.module, checkpoint)


def _load_unwrapped(module: nn.Module, state: dict[str, Any]) -> None:
    consume_prefix_in_state_dict_if_present(state, "module.")
    module.load_state_dict(state)
