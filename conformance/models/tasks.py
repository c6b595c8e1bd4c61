"""The two training tasks: recognise handwritten digits, and predict the next character of a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from conformance.errors import ScenarioError, hint
from conformance.models.batches import digits, text
from conformance.models.language import CONTEXT, text_loss

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """Inputs with targets for training and for the test; `score` is measured on all of the test data at once.

    `metric` names the score: `accuracy` (higher is better) or `test_loss` (lower is better).
    """

    name: str
    training: TensorDataset
    test: TensorDataset
    loss: Loss
    metric: str
    score: Callable[[nn.Module, Tensor, Tensor], float]


@cache
def load_tasks() -> dict[str, Task]:
    """Return the tasks by name."""
    return {task.name: task for task in (_digits_task(), _text_task())}


def get_task(name: str) -> Task:
    """Return the task called `name`; raises `ScenarioError` with near misses."""
    tasks = load_tasks()
    if name not in tasks:
        raise ScenarioError(f"unknown task {name!r}{hint(name, tasks)}")
    return tasks[name]


def _split(inputs: Tensor, targets: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Hold out every fifth example for the test."""
    held_out = torch.arange(len(inputs)) % 5 == 4
    return TensorDataset(inputs[~held_out], targets[~held_out]), TensorDataset(inputs[held_out], targets[held_out])


def _digits_task() -> Task:
    """1438 training images and 359 test images, size x 1 x 8 x 8, with labels 0..9."""
    training, test = _split(*digits())
    return Task("digits", training, test, _classification_loss, "accuracy", _accuracy)


def _text_task() -> Task:
    """Excerpts of 32 characters, size x 32, each with the 32 characters that follow one position later."""
    characters, _ = text()
    num_excerpts = (len(characters) - 1) // CONTEXT
    length = num_excerpts * CONTEXT
    inputs = characters[:length].view(num_excerpts, CONTEXT)
    following = characters[1 : length + 1].view(num_excerpts, CONTEXT)
    training, test = _split(inputs, following)
    return Task("text", training, test, text_loss, "test_loss", lambda *given: float(text_loss(*given)))


def _classification_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    correct = model(images).argmax(1) == labels
    return int(correct.sum()) / len(labels)
