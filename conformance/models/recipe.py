"""A recipe for a whole training, and one rank's part in it. Programs and the truth follow the same recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, DistributedSampler

from conformance.errors import ScenarioError
from conformance.models.tasks import Task, get_task
from conformance.scenario import Scenario

_OPTIMIZERS: Mapping[str, Callable[[nn.Module], optim.Optimizer]] = {
    "sgd": lambda module: optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
    "nesterov": lambda module: optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": lambda module: optim.Adam(module.parameters(), lr=1e-2),
    "adamw": lambda module: optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.05),
}
_SCHEDULES: Mapping[str, Callable[[optim.Optimizer], LRScheduler]] = {
    "constant": lambda optimizer: StepLR(optimizer, step_size=1, gamma=1.0),
    "step": lambda optimizer: StepLR(optimizer, step_size=10, gamma=0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=60),
    "warmup": lambda optimizer: LinearLR(optimizer, start_factor=0.1, total_iters=15),
}
RESTARTS = ("", "every_rank", "rank_0")


@dataclass(frozen=True)
class Recipe:
    """What to train on, how long and how; read from a scenario's `arguments`.

    `batch_size` is one rank's micro-batch, `accumulate` the number of them in a step, `max_steps` the optimiser steps
    in an epoch (0: all of the data). `clip_norm` 0 clips nothing. `evaluate` scores the model after every epoch. After
    step `restart_after` the ranks that `restart` names load a checkpoint: none, every rank into its wrapped model, or
    rank 0 before wrapping. The scenario demands `minimum_accuracy` and `maximum_loss_ratio` (mean loss of the last
    quarter of the steps over that of the first) of the result; 0 demands nothing.
    """

    task: str
    epochs: int = 1
    batch_size: int = 32
    max_steps: int = 0
    accumulate: int = 1
    optimizer: str = "sgd"
    schedule: str = "constant"
    clip_norm: float = 0.0
    evaluate: bool = True
    restart: str = ""
    restart_after: int = 0
    minimum_accuracy: float = 0.0
    maximum_loss_ratio: float = 0.0

    def __post_init__(self) -> None:
        get_task(self.task)
        for field, value, known in (
            ("optimizer", self.optimizer, _OPTIMIZERS),
            ("schedule", self.schedule, _SCHEDULES),
            ("restart", self.restart, RESTARTS),
        ):
            if value not in known:
                raise ScenarioError(f"{field} must be one of {', '.join(filter(None, known))}; got {value!r}")
        for field in ("epochs", "batch_size", "accumulate"):
            if getattr(self, field) < 1:
                raise ScenarioError(f"{field} must be >= 1, got {getattr(self, field)!r}")

    @staticmethod
    def of(scenario: Scenario) -> Recipe:
        """Read the recipe from the scenario's arguments; raises `ScenarioError` for an unknown one."""
        known = {field.name for field in dataclasses.fields(Recipe)}
        if unknown := sorted(set(scenario.arguments) - known):
            raise ScenarioError(f"{scenario.id}: no argument(s) of a training: {', '.join(unknown)}")
        try:
            return Recipe(**scenario.arguments)
        except TypeError as error:
            raise ScenarioError(f"{scenario.id}: {error}") from error


class Learner:
    """One rank's side of a training: its shard of the data, its optimizer and its learning-rate schedule."""

    def __init__(
        self, recipe: Recipe, module: nn.Module, *, rank: int, world_size: int, seed: int, device: torch.device | str
    ) -> None:
        self.recipe = recipe
        self.task: Task = get_task(recipe.task)
        self._device = device
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            self.task.training, num_replicas=world_size, rank=rank, shuffle=True, seed=seed
        )
        self._loader: DataLoader[Any] = DataLoader(
            self.task.training, batch_size=recipe.batch_size, sampler=self._sampler, generator=torch.Generator()
        )
        self.adopt(module)

    def adopt(self, module: nn.Module, state: Mapping[str, Any] | None = None) -> None:
        """Train `module` from here on, continuing from `state` if there is one."""
        self._module = module
        self.optimizer = _OPTIMIZERS[self.recipe.optimizer](module)
        self._schedule = _SCHEDULES[self.recipe.schedule](self.optimizer)
        if state is not None:
            self.optimizer.load_state_dict(state["optimizer"])
            self._schedule.load_state_dict(state["schedule"])

    def state(self) -> dict[str, Any]:
        """Return what `adopt` needs to continue."""
        return {"optimizer": self.optimizer.state_dict(), "schedule": self._schedule.state_dict()}

    def steps(self, epoch: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield the micro-batches of each optimiser step of `epoch`, inputs and targets on the device."""
        self._sampler.set_epoch(epoch)
        batches = iter(self._loader)
        num_steps = 0
        while micro_batches := list(islice(batches, self.recipe.accumulate)):
            yield [(inputs.to(self._device), targets.to(self._device)) for inputs, targets in micro_batches]
            num_steps += 1
            if num_steps == self.recipe.max_steps:
                return

    def loss(self, model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of one micro-batch, divided so that the micro-batches of a step add up to a mean."""
        return self.task.loss(model, *micro_batch) / self.recipe.accumulate

    def update(self) -> Tensor:
        """Clip, take the optimiser's step and the schedule's; return the gradients' norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), self.recipe.clip_norm or float("inf"))
        self.optimizer.step()
        self._schedule.step()
        return norm

    def evaluate(self, model: nn.Module) -> float:
        """Return the score of `model` on the test data, in evaluation mode and without autograd."""
        inputs, targets = (tensor.to(self._device) for tensor in self.task.test.tensors)
        model.eval()
        with torch.no_grad():
            score = self.task.score(model, inputs, targets)
        model.train()
        return score


def loss_ratio(losses: list[Tensor]) -> float:
    """Return the mean of the last quarter of `losses` over the mean of the first quarter."""
    quarter = max(1, len(losses) // 4)
    first, last = torch.stack(losses[:quarter]).mean(), torch.stack(losses[-quarter:]).mean()
    return (last / first).item()
