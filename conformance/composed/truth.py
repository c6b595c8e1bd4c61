"""The truth about a composed training: all ranks' replicas in lock step, without DDP and without collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.composed.trainee import Meeting, Trainee
from conformance.composed.training import Training
from conformance.own_mistake import certain, present
from conformance.truth.device import single_threaded
from conformance.truth.replicas import average, broadcasts_buffers, share_buffers


def simulate(training: Training, world_size: int, seed: int, *, broadcast_buffers: bool) -> Mapping[int, Any]:
    """Return for each rank the facts of the training by name, in the order in which they are observed.

    Raises AssertionError where a mean is not exact.
    """
    with single_threaded():
        trainees = [Trainee(training, rank, world_size, seed) for rank in range(world_size)]
        return _Lockstep(training, trainees, broadcast_buffers=broadcast_buffers).run()


class _Replicas:
    """One module per rank and what is known of them: what one wrapper on every rank would know."""

    def __init__(self, modules: Callable[[], Sequence[nn.Module]], *, broadcast_buffers: bool) -> None:
        self._modules = modules  # a copy takes a module's place
        self._broadcast_buffers = broadcast_buffers
        self.buffers_due = True
        self._before: list[dict[str, tuple[int, int]]] = []
        self._used: set[tuple[str, Tensor]] = set()  # the first replica's parameter says whether it was replaced since

    def before_forward(self, source: int) -> None:
        """Give every replica the buffers of `source`, if they are due."""
        if self._broadcast_buffers and self.buffers_due:
            modules = self._modules()
            share_buffers([modules[source], *modules])

    def before_backward(self) -> None:
        """Note what gradients there are."""
        self._before = [_versions(module) for module in self._modules()]

    def after_backward(self) -> None:
        """Note what gradients came."""
        modules = self._modules()
        first = dict(modules[0].named_parameters())
        for module, before in zip(modules, self._before, strict=True):
            changed = [name for name, now in _versions(module).items() if before.get(name) != now]
            self._used |= {(name, first[name]) for name in changed}

    def average(self) -> None:
        """Average what came since this was last called."""
        average_used(self._modules(), self._used)
        self._used.clear()

    def left_join(self, source: int) -> None:
        """Give every replica the parameters and buffers of `source`."""
        modules = self._modules()
        in_order = [modules[source], *modules]
        share_parameters(in_order)
        if self._broadcast_buffers:
            share_buffers(in_order)


class _Lockstep:
    """Plays all trainees from meeting to meeting and does there what DDP is for."""

    def __init__(self, training: Training, trainees: Sequence[Trainee], *, broadcast_buffers: bool) -> None:
        self._trainees = trainees
        self._first = _Replicas(lambda: [trainee.module for trainee in trainees], broadcast_buffers=broadcast_buffers)
        self._all = [self._first]
        if training.beside is not None:
            self._all.append(
                _Replicas(
                    lambda: [present(trainee.module_beside) for trainee in trainees],
                    broadcast_buffers=broadcasts_buffers(training.beside.options),
                )
            )
        self._with_data: list[int] = []  # in the last iteration in a join context
        self._facts: dict[int, dict[str, Any]] = {rank: {} for rank in range(len(trainees))}

    def run(self) -> Mapping[int, Any]:
        """Play everything and return the facts."""
        for meetings in zip(*(trainee.play() for trainee in self._trainees), strict=True):
            certain(len(set(meetings)) == 1, f"the ranks of a training part: {meetings}")
            self._meet(meetings[0])
        return self._facts

    def _meet(self, meeting: Meeting) -> None:
        synchronised = (meeting.synchronised, meeting.beside)
        match meeting.kind:
            case "before_forward":
                if meeting.joining:
                    with_data = [rank for rank, trainee in enumerate(self._trainees) if trainee.has_data]
                    self._with_data = with_data or self._with_data  # a rank alone is the first to run out
                for replicas in self._all:
                    replicas.before_forward(self._with_data[-1] if meeting.joining else 0)
            case "after_forward":
                for replicas, due in zip(self._all, synchronised, strict=False):
                    replicas.buffers_due = due
            case "before_backward":
                for replicas in self._all:
                    replicas.before_backward()
            case "after_backward":
                for replicas in self._all:
                    replicas.after_backward()
                for replicas, due in zip(self._all, synchronised, strict=False):
                    if due:
                        replicas.average()
            case "left_join":
                self._first.left_join(self._with_data[-1])
            case "copied" | "regrouped":
                self._first.buffers_due = True
            case "observables":
                for rank, trainee in enumerate(self._trainees):
                    self._facts[rank][meeting.facts] = trainee.observables()
            case "facts":
                for rank, trainee in enumerate(self._trainees):
                    self._facts[rank][meeting.facts] = trainee.facts()


def average_used(modules: Sequence[nn.Module], used: set[tuple[str, Tensor]]) -> None:
    """Replace the gradient of every parameter in `used` by the mean over `modules`; none counts as zero.

    Where no rank has one any more, because the loop dropped them, nothing is averaged.
    `used` names parameters and says which of the first module's they were.
    """
    named = [dict(module.named_parameters()) for module in modules]
    for name in named[0]:
        replicas = [parameters[name] for parameters in named]
        if (name, replicas[0]) in used and any(replica.grad is not None for replica in replicas):
            average(replicas)


def share_parameters(modules: Sequence[nn.Module]) -> None:
    """Give every module the values of the first one's parameters."""
    root = dict(modules[0].named_parameters())
    with torch.no_grad():
        for module in modules[1:]:
            for name, parameter in module.named_parameters():
                parameter.copy_(root[name])


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return what changes when a gradient is accumulated: which tensor it is, and how often that was written to."""
    return {
        name: (id(parameter.grad), parameter.grad._version)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
