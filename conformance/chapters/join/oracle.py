"""The truth where ranks run out of data at different times: data-parallel training over the ranks that still have some.

Nothing here communicates, so no rank has to shadow collectives: a step runs on the ranks that have data for it, and its
gradients are the sum of theirs divided by the divisor of the join context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from conformance.errors import ScenarioError
from conformance.models.catalogue import get_fixture
from conformance.models.exact import exact_mean
from conformance.models.optimizers import LEARNING_RATE
from conformance.observation import Facts
from conformance.own_mistake import certain
from conformance.scenario import Scenario
from conformance.truth.device import replica_device, single_threaded


@dataclass(frozen=True)
class UnevenPlan:
    """How a training on uneven inputs goes; read from a scenario's `arguments`.

    `num_inputs[r]` is how many inputs rank r has in each join context, of which `contexts` follow each other. Every
    `sync_every`-th input of a rank is synchronised and followed by an optimizer step, the others run under `no_sync`.
    `evaluate`: before each input a forward under `no_grad`. `even_steps` steps of all ranks follow outside of any
    context. `divide_by_initial_world_size` is the context's option. `hook`: a comm hook divides by the initial world
    size and doubles.
    """

    num_inputs: tuple[int, ...]
    contexts: int = 1
    sync_every: int = 1
    evaluate: bool = False
    even_steps: int = 0
    divide_by_initial_world_size: bool = True
    hook: bool = False

    @staticmethod
    def of(scenario: Scenario) -> UnevenPlan:
        """Read the plan; other arguments are the program's own. Raises `ScenarioError` if ranks are missing."""
        known = {name: scenario.arguments[name] for name in UnevenPlan.__annotations__ if name in scenario.arguments}
        plan = UnevenPlan(**{**known, "num_inputs": tuple(scenario.arguments["num_inputs"])})
        if len(plan.num_inputs) != scenario.world_size:
            raise ScenarioError(f"{scenario.id}: num_inputs of {len(plan.num_inputs)} ranks for {scenario.world_size}")
        return plan

    def active(self, index: int) -> list[int]:
        """Return the ranks that have an input number `index`."""
        return [rank for rank, count in enumerate(self.num_inputs) if index < count]

    def last_joiners(self) -> list[int]:
        """Return the ranks that have the most inputs."""
        return [rank for rank, count in enumerate(self.num_inputs) if count == max(self.num_inputs)]

    def step_number(self, context: int, index: int) -> int:
        """Return the step number of input `index` of a context; numbers continue from one context to the next."""
        return context * max(self.num_inputs) + index

    def is_synchronised(self, index: int) -> bool:
        """Whether the backward of input `index` averages gradients."""
        return (index + 1) % self.sync_every == 0


class UnevenReplicas:
    """One module per rank; what join asks of a DDP, done on them directly."""

    def __init__(self, modules: Sequence[nn.Module], *, divide_by_initial_world_size: bool = True) -> None:
        """Take over `modules`, one per rank."""
        self.modules = list(modules)
        self._by_initial = divide_by_initial_world_size
        self._used: list[set[str]] = [set() for _ in modules]
        for module, used in zip(self.modules, self._used, strict=True):
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_note(used, name))

    def average_gradients(self, active: Sequence[int]) -> None:
        """Replace the gradients of the `active` ranks by their sum over the initial or the effective world size.

        Leaves a parameter alone that no active rank has used since its last average. Raises AssertionError if the
        result is not exact.
        """
        divisor = len(self.modules) if self._by_initial else len(active)
        named = [dict(self.modules[rank].named_parameters()) for rank in active]
        for name in sorted(set().union(*(self._used[rank] for rank in active))):
            _average([parameters[name] for parameters in named], divisor)
        for rank in active:
            self._used[rank].clear()

    def copy_model(self, source: int) -> None:
        """Give all ranks the parameters of rank `source`, and clear locally accumulated gradients."""
        origin = dict(self.modules[source].named_parameters())
        with torch.no_grad():
            for module in self.modules:
                for name, parameter in module.named_parameters():
                    parameter.copy_(origin[name])
                    parameter.grad = None
        for used in self._used:
            used.clear()


def _note(used: set[str], name: str) -> Callable[[Tensor], None]:
    return lambda _: used.add(name)


def _average(parameters: Sequence[Tensor], divisor: int) -> None:
    """Replace the gradients of one parameter on some ranks by their sum over `divisor`, which is at least their number.

    A rank without a gradient counts as zero; a sparse result holds the rows that any rank touched.
    """
    present = [parameter.grad for parameter in parameters if parameter.grad is not None]
    nothing = torch.zeros_like(parameters[0])
    mean = exact_mean([gradient.to_dense() for gradient in present] + [nothing] * (divisor - len(present)))
    if any(gradient.is_sparse for gradient in present):
        rows = torch.cat([gradient.coalesce().indices() for gradient in present], dim=1).unique(dim=1)
        mean = torch.sparse_coo_tensor(rows, mean[tuple(rows)], mean.shape, is_coalesced=True, check_invariants=True)
    for parameter in parameters:
        parameter.grad = mean.clone()


def plain_sgd(module: nn.Module) -> optim.SGD:
    """Return SGD without state, so that ranks that miss steps lack nothing but parameter updates."""
    return optim.SGD(module.parameters(), lr=LEARNING_RATE)


def simulate_uneven(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts that program `uneven_training` must observe.

    Raises AssertionError if a mean is not exact, or if the ranks that join last do not have one and the same model.
    """
    with single_threaded():
        return _Simulation(scenario).run()


class _Simulation:
    """All ranks' replicas following an `UnevenPlan`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.plan = UnevenPlan.of(scenario)
        self.fixture = get_fixture(scenario.model)
        self.ranks = list(range(scenario.world_size))
        self.modules = [self.fixture.build(scenario, replica_device()) for _ in self.ranks]
        self.optimizers = [plain_sgd(module) for module in self.modules]
        self.facts: dict[int, dict[str, Any]] = {rank: {} for rank in self.ranks}
        self.replicas = UnevenReplicas(
            self.modules, divide_by_initial_world_size=self.plan.divide_by_initial_world_size
        )

    def run(self) -> Mapping[int, Facts]:
        plan = self.plan
        for context in range(plan.contexts):
            for index in range(max(plan.num_inputs)):
                self._step(plan.step_number(context, index), plan.active(index), plan.is_synchronised(index))
            self._leave(f"context{context}")
        for index in range(plan.even_steps):
            self._step(plan.step_number(plan.contexts, index), self.ranks, synchronised=True)
        for rank, module in enumerate(self.modules):
            self._record_parameters(rank, "final", module)
        return self.facts

    def _step(self, number: int, active: Sequence[int], synchronised: bool) -> None:
        for rank in active:
            if self.plan.evaluate:
                self.facts[rank][f"step{number}/evaluation"] = self._evaluate(rank, number)
            loss = self.fixture.loss(
                self.modules[rank], self.scenario, rank=rank, step=number, micro=0, device=replica_device()
            )
            loss.backward()
            self.facts[rank][f"step{number}/loss"] = loss.detach()
        if synchronised:
            self.replicas.average_gradients(active)
        if synchronised and self.plan.hook:
            self._double_gradients(active)
        for rank in active:
            for name, parameter in self.modules[rank].named_parameters():
                gradient = parameter.grad
                self.facts[rank][f"step{number}/grad/{name}"] = None if gradient is None else gradient.clone()
            if synchronised:
                self.optimizers[rank].step()
                self.optimizers[rank].zero_grad()

    def _double_gradients(self, active: Sequence[int]) -> None:
        for rank in active:
            for parameter in self.modules[rank].parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)

    def _evaluate(self, rank: int, number: int) -> Tensor:
        module = self.modules[rank].eval()
        with torch.no_grad():
            loss = self.fixture.loss(module, self.scenario, rank=rank, step=number, micro=1, device=replica_device())
        module.train()
        return loss

    def _leave(self, prefix: str) -> None:
        last = self.plan.last_joiners()
        for rank in last:
            for name, parameter in self.modules[rank].named_parameters():
                certain(
                    torch.equal(parameter, self.modules[last[0]].get_parameter(name)), f"last joiners differ: {name}"
                )
        self.replicas.copy_model(last[0])
        for rank, module in enumerate(self.modules):
            self._record_parameters(rank, prefix, module)

    def _record_parameters(self, rank: int, prefix: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.facts[rank][f"{prefix}/parameter/{name}"] = parameter.detach().clone()
