"""The truth about a whole training: the same recipe, without DDP, on a replica for every rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.models.catalogue import get_fixture
from conformance.models.recipe import Learner, Recipe
from conformance.observation import Facts
from conformance.own_mistake import certain
from conformance.scenario import Scenario
from conformance.truth.device import replica_device, single_threaded
from conformance.truth.expected import Anything, Satisfies
from conformance.truth.replicas import Replicas, broadcasts_buffers


def simulate_training(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts that program `training` must observe in `scenario`.

    It does not simulate a restart from a checkpoint, which must change nothing. The ranks' own numbers must satisfy the
    recipe's demands (`minimum_accuracy`, `maximum_loss_ratio`). Raises AssertionError if a mean of gradients is not
    exact, or if the replicas end with different parameters.
    """
    recipe = Recipe.of(scenario)
    key = _Key(
        recipe, scenario.model, scenario.world_size, scenario.dtype, scenario.seed, broadcasts_buffers(scenario.options)
    )
    extra = _demanded(recipe)
    if recipe.restart:
        state = get_fixture(scenario.model).build(scenario).state_dict()
        extra["checkpoint/keys"] = [f"module.{name}" for name in state]
    return {rank: {**facts, **extra} for rank, facts in _simulate(key).items()}


def _demanded(recipe: Recipe) -> dict[str, Any]:
    demanded: dict[str, Any] = {}
    if accuracy := recipe.minimum_accuracy:
        demanded["accuracy"] = Satisfies(f"at least {accuracy}", lambda got: got >= accuracy)
    if ratio := recipe.maximum_loss_ratio:
        demanded["loss_ratio"] = Satisfies(f"at most {ratio}", lambda got: got <= ratio)
    return demanded or {"loss_ratio": Anything()}


@dataclass(frozen=True)
class _Key:
    """Everything that the truth depends on."""

    recipe: Recipe
    model: str
    world_size: int
    dtype: str
    seed: int
    broadcast_buffers: bool


@functools.lru_cache(maxsize=32)
def _simulate(key: _Key) -> Mapping[int, Facts]:
    with single_threaded():
        return _Training(key).run()


class _Training:
    """All ranks' learners in lockstep."""

    def __init__(self, key: _Key) -> None:
        fixture = get_fixture(key.model)
        scenario = Scenario(
            id="truth/TRUTH/training", requirements=("TRUTH",), program="training", model=key.model,
            world_size=key.world_size, dtype=key.dtype, seed=key.seed,
        )  # fmt: skip
        self.recipe = key.recipe
        self.replicas = Replicas(
            [fixture.build(scenario, replica_device()) for _ in range(key.world_size)],
            broadcast_buffers=key.broadcast_buffers,
        )
        self.learners = [
            Learner(key.recipe, module, rank=rank, world_size=key.world_size, seed=key.seed, device=replica_device())
            for rank, module in enumerate(self.replicas.modules)
        ]
        self.facts: dict[int, dict[str, Any]] = {rank: {} for rank in range(key.world_size)}

    def run(self) -> Mapping[int, Facts]:
        """Train and return the facts."""
        for epoch in range(self.recipe.epochs):
            self._epoch(epoch)
            if self.recipe.evaluate:
                self._evaluate(epoch)
        for rank, module in enumerate(self.replicas.modules):
            for name, parameter in module.named_parameters():
                self.facts[rank][f"final/parameter/{name}"] = parameter.detach().clone()
                same = torch.equal(parameter, self.replicas.modules[0].get_parameter(name))
                certain(same, f"replicas differ in {name}")
            for name, buffer in module.named_buffers():
                self.facts[rank][f"final/buffer/{name}"] = buffer.clone()
        return self.facts

    def _epoch(self, epoch: int) -> None:
        losses: dict[int, list[Tensor]] = {rank: [] for rank in self.facts}
        norms: dict[int, list[Tensor]] = {rank: [] for rank in self.facts}
        for steps in zip(*(learner.steps(epoch) for learner in self.learners), strict=True):
            for learner in self.learners:
                learner.optimizer.zero_grad()
            for index, micro_batches in enumerate(zip(*steps, strict=True)):
                self.replicas.before_forward()
                for rank, micro_batch in enumerate(micro_batches):
                    loss = self.learners[rank].loss(self.replicas.modules[rank], micro_batch)
                    loss.backward()
                    losses[rank].append(loss.detach())
                self.replicas.after_forward(synchronised=index == len(steps[0]) - 1)
            self.replicas.average_gradients()
            for rank, learner in enumerate(self.learners):
                norms[rank].append(learner.update())
        for rank, facts in self.facts.items():
            facts[f"epoch{epoch}/loss"] = torch.stack(losses[rank])
            facts[f"epoch{epoch}/norm"] = torch.stack(norms[rank])

    def _evaluate(self, epoch: int) -> None:
        self.replicas.before_forward()
        for rank, learner in enumerate(self.learners):
            self.facts[rank][f"epoch{epoch}/score"] = learner.evaluate(self.replicas.modules[rank])
        self.replicas.after_forward(synchronised=False)
