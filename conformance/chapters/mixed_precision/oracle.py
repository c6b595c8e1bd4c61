"""The truth about mixed precision: one low-precision copy per forward, means in the dtype that the DDP reduces in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from conformance.models.catalogue import get_fixture
from conformance.models.exact import exact_mean
from conformance.models.low_precision import LowPrecisionCopy, Precision, build_coarse, precision_of
from conformance.models.optimizers import sgd
from conformance.observation import Facts
from conformance.scenario import Scenario, Step
from conformance.truth.device import replica_device, single_threaded
from conformance.truth.means import sparse_like
from conformance.truth.replicas import broadcasts_buffers
from conformance.truth.steps import follow_step, gradients


class LowPrecisionReplicas:
    """One module per rank, kept in full precision; the caller runs forwards and backwards on copies of them."""

    def __init__(self, modules: Sequence[nn.Module], precision: Precision, ignored: Collection[str] = ()) -> None:
        """Take over `modules` and convert their buffers for good; `ignored` parameters and buffers stay as they are."""
        self.modules = list(modules)
        self.precision = precision
        self._ignored = frozenset(ignored)
        self._used: set[str] = set()
        for module in self.modules:
            convert_buffers(module, precision, self._ignored)

    def copy_of(self, rank: int) -> LowPrecisionCopy:
        """Return the module that `rank` computes with in its next forward and backward."""
        return LowPrecisionCopy(self.modules[rank], self.precision, self._ignored)

    def collect(self, copy: LowPrecisionCopy, *, coarse: bool) -> None:
        """Take the gradients of a copy after its backward."""
        self._used |= {name for name, parameter in copy.low.named_parameters() if parameter.grad is not None}
        copy.hand_back(coarse=coarse)

    def average_gradients(self) -> None:
        """Replace each gradient by the mean over ranks, computed in the reduced dtype; missing ones count as zero.

        Raises AssertionError where the mean depends on the order of the sum.
        """
        named = [dict(module.named_parameters()) for module in self.modules]
        for name in sorted(self._used - self._ignored):
            replicas = [parameters[name] for parameters in named]
            own = replicas[0].dtype
            wire = self.precision.communication_dtype if own.is_floating_point else None
            present = [each.grad for each in replicas if each.grad is not None]
            locals_ = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in replicas]
            mean = exact_mean([gradient.to(wire or own) for gradient in locals_]).to(own)
            if any(gradient.is_sparse for gradient in present):
                mean = sparse_like(mean, present)
            for replica in replicas:
                replica.grad = mean.clone()
        self._used.clear()


def convert_buffers(module: nn.Module, precision: Precision, ignored: Collection[str]) -> None:
    """Convert the floating-point buffers of `module` to `buffer_dtype`, but for the `ignored` ones."""
    if precision.buffer_dtype is not None:
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.data.to(precision.buffer_dtype)


def simulate_mixed_precision(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts that program `mixed_precision_training` must observe.

    They are those of program `train`, and `wire`: the dtypes in which the DDP reduces gradients (world sizes above 1).
    Raises AssertionError where a mean is not exact.
    """
    with single_threaded():
        return _Simulation(scenario).run()


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.fixture = get_fixture(scenario.model)
        self.ranks = range(scenario.world_size)
        precision = precision_of(scenario.options)
        modules = [build_coarse(self.fixture, scenario, replica_device()) for _ in self.ranks]
        self.replicas = LowPrecisionReplicas(modules, precision, scenario.arguments.get("ignored", ()))
        self.optimizers = [sgd(module, self.fixture) for module in modules]
        self.facts: dict[int, dict[str, Any]] = {rank: {} for rank in self.ranks}
        self.buffers_due = broadcasts_buffers(scenario.options)

    def run(self) -> Mapping[int, Facts]:
        for index, step in enumerate(self.scenario.schedule):
            self._step(index, step)
        parameters = dict(self.replicas.modules[0].named_parameters())
        wire = self.replicas.precision.communication_dtype
        travelling = {parameter.dtype for parameter in parameters.values() if parameter.requires_grad}
        for rank in self.ranks:
            self._record_state(rank, "final")
            if len(self.ranks) > 1:
                self.facts[rank]["wire"] = sorted({str(wire or own).removeprefix("torch.") for own in travelling})
        return self.facts

    def _step(self, index: int, step: Step) -> None:
        follow_step(index, step, self.optimizers, self._backward)
        for rank in self.ranks:
            self._record_state(rank, f"step{index}")

    def _backward(self, prefix: str, step: int, micro: int, *, synchronised: bool) -> None:
        if self.buffers_due:
            self._broadcast_buffers()
        self.buffers_due = synchronised and broadcasts_buffers(self.scenario.options)
        for rank in self.ranks:
            copy = self.replicas.copy_of(rank)
            loss = self.fixture.loss(copy, self.scenario, rank=rank, step=step, micro=micro, device=replica_device())
            loss.backward()
            self.replicas.collect(copy, coarse=True)
            self.facts[rank][f"{prefix}/loss"] = loss.detach().clone()
        if synchronised:
            self.replicas.average_gradients()
        for rank in self.ranks:
            self.facts[rank] |= gradients(prefix, self.replicas.modules[rank])

    def _broadcast_buffers(self) -> None:
        root = dict(self.replicas.modules[0].named_buffers())
        with torch.no_grad():
            for module in self.replicas.modules[1:]:
                for name, buffer in module.named_buffers():
                    buffer.copy_(root[name])

    def _record_state(self, rank: int, prefix: str) -> None:
        module = self.replicas.modules[rank]
        for name, parameter in module.named_parameters():
            self.facts[rank][f"{prefix}/parameter/{name}"] = parameter.detach().clone()
        for name, buffer in module.named_buffers():
            self.facts[rank][f"{prefix}/buffer/{name}"] = buffer.detach().clone()
