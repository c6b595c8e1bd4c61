"""The truth about a scenario's schedule: what every rank must observe, computed without DDP and without collectives."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from conformance.models.catalogue import get_fixture
from conformance.models.optimizers import sgd
from conformance.observation import Facts
from conformance.oracles.device import replica_device
from conformance.oracles.replicas import Replicas, broadcasts_buffers, single_threaded
from conformance.oracles.steps import follow_step
from conformance.scenario import Scenario, Step


def simulate(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts that program `train` must observe in `scenario`.

    The result is shared between scenarios that differ in nothing that matters here (bucket sizes, for one): do not
    change it. Raises AssertionError if a mean of gradients is not exact: then nothing could be compared bitwise.
    """
    key = _Key(
        model=scenario.model,
        world_size=scenario.world_size,
        schedule=scenario.schedule,
        dtype=scenario.dtype,
        seed=scenario.seed,
        ignored=frozenset(scenario.arguments.get("ignored", ())),
        broadcast_buffers=broadcasts_buffers(scenario.options),
    )
    return _simulate(key)


@dataclass(frozen=True)
class _Key:
    """Everything that the truth depends on."""

    model: str
    world_size: int
    schedule: tuple[Step, ...]
    dtype: str
    seed: int
    ignored: frozenset[str]
    broadcast_buffers: bool

    def scenario(self) -> Scenario:
        return Scenario(
            id="truth/TRUTH/simulated", requirements=("TRUTH",), program="train", model=self.model,
            world_size=self.world_size, schedule=self.schedule, dtype=self.dtype, seed=self.seed,
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _simulate(key: _Key) -> Mapping[int, Facts]:
    with single_threaded():
        return _Simulation(key).run()


class _Simulation:
    """One run of a schedule over all ranks' replicas, recording facts under the names that `train` gives them."""

    def __init__(self, key: _Key) -> None:
        self.scenario = key.scenario()
        self.fixture = get_fixture(key.model)
        self.ranks = range(key.world_size)
        self.facts: dict[int, dict[str, Any]] = {rank: {} for rank in self.ranks}
        self.replicas = Replicas(
            [self.fixture.build(self.scenario, replica_device()) for _ in self.ranks],
            ignored=key.ignored,
            broadcast_buffers=key.broadcast_buffers,
        )
        self.optimizers = [sgd(module, self.fixture) for module in self.replicas.modules]

    def run(self) -> Mapping[int, Facts]:
        """Run all steps and return the facts."""
        for index, step in enumerate(self.scenario.schedule):
            self._step(index, step)
        for rank, module in enumerate(self.replicas.modules):
            self._record_state(rank, "final", module)
        return self.facts

    def _step(self, index: int, step: Step) -> None:
        follow_step(index, step, self.optimizers, self._backward)
        for rank, module in enumerate(self.replicas.modules):
            self._record_state(rank, f"step{index}", module)

    def _backward(self, prefix: str, step: int, micro: int, *, synchronised: bool) -> None:
        self.replicas.before_forward()
        for rank, module in enumerate(self.replicas.modules):
            loss = self.fixture.loss(module, self.scenario, rank=rank, step=step, micro=micro, device=replica_device())
            loss.backward()
            self._record(rank, f"{prefix}/loss", loss)
        self.replicas.after_forward(synchronised=synchronised)
        if synchronised:
            self.replicas.average_gradients()
        for rank, module in enumerate(self.replicas.modules):
            for name, parameter in module.named_parameters():
                self._record(rank, f"{prefix}/grad/{name}", parameter.grad)

    def _record_state(self, rank: int, prefix: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._record(rank, f"{prefix}/parameter/{name}", parameter)
        for name, buffer in module.named_buffers():
            self._record(rank, f"{prefix}/buffer/{name}", buffer)

    def _record(self, rank: int, name: str, value: Tensor | None) -> None:
        self.facts[rank][name] = None if value is None else value.detach().clone()
