"""The truth about data parallelism over tensor parallelism: whole modules in one process, one per row of the mesh.

Nothing here is sharded and nothing communicates: one replica of the module stands for a row of the mesh, whatever the
number of its ranks. The shards of the row's ranks must together equal the replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from conformance.errors import certain
from conformance.models.sharded import ShardedModel, get_sharded_model
from conformance.observation import Facts
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded
from conformance.truth.expected import Close
from conformance.truth.replicas import broadcasts_buffers

#: Powers of two, so that products with them are exact.
LEARNING_RATE, MOMENTUM = 0.125, 0.5
OPTIMIZERS = ("sgd", "momentum", "adam")

_BECAUSE = "shards are summed in another order, in float64"


@dataclass(frozen=True)
class ShardedPlan:
    """How a sharded training goes; read from a scenario's `arguments`.

    `mesh` are the extents of the mesh; the last two are its rows (data parallelism) and the ranks of a row (tensor
    parallelism). Every step of `num_steps` has `accumulate` backwards under `no_sync` and one that synchronises,
    then gradients are clipped to the norm `clip` (if not 0) and the `optimizer` steps. `uses[k][row]` is the part of
    the model that the row uses in step k (the last entry holds for all later steps). `num_inputs[row]`: the number of
    steps for which the row has data; all rows then train in a join context. `hook` is the comm hook, "" for none.
    `variants`: every row starts with weights of its own, and the constructor must give all rows those of row 0.
    """

    mesh: tuple[int, ...]
    model: str = "mlp"
    num_steps: int = 10
    optimizer: str = "sgd"
    clip: float = 0.0
    accumulate: int = 0
    zero_grad: str = "none"
    uses: tuple[tuple[str, ...], ...] = ()
    num_inputs: tuple[int, ...] = ()
    divide_by_initial_world_size: bool = True
    hook: str = ""
    variants: bool = False

    @staticmethod
    def of(scenario: Scenario) -> ShardedPlan:
        known = {name: scenario.arguments[name] for name in ShardedPlan.__annotations__ if name in scenario.arguments}
        plan = ShardedPlan(**{**known, "mesh": tuple(known["mesh"])})
        certain(len(plan.mesh) >= 2, f"{scenario.id}: a mesh of rows and ranks is needed, got {plan.mesh}")
        certain(torch.Size(plan.mesh).numel() == scenario.world_size, f"{scenario.id}: {plan.mesh} is not the world")
        certain(plan.optimizer in OPTIMIZERS, f"{scenario.id}: no optimizer is called {plan.optimizer}")
        return plan

    @property
    def sharded_model(self) -> ShardedModel:
        return get_sharded_model(self.model)

    @property
    def num_rows(self) -> int:
        """The number of replicas."""
        return self.mesh[-2]

    @property
    def is_exact(self) -> bool:
        """Whether shards give the truth bit for bit."""
        return self.sharded_model.exact and self.optimizer != "adam" and not self.clip

    def row_of(self, rank: int) -> int:
        return rank // self.mesh[-1] % self.num_rows

    def is_active(self, row: int, step: int) -> bool:
        return not self.num_inputs or step < self.num_inputs[row]

    def keywords(self, row: int, step: int) -> dict[str, Any]:
        return {"use": self.uses[min(step, len(self.uses) - 1)][row]} if self.uses else {}

    def make_optimizer(self, module: nn.Module) -> optim.Optimizer:
        if self.optimizer == "adam":
            return optim.Adam(module.parameters(), lr=LEARNING_RATE)
        momentum = MOMENTUM if self.optimizer == "momentum" else 0.0
        return optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=momentum)


class UnshardedRows:
    """One whole module and one optimizer per row, trained by a plan."""

    def __init__(self, plan: ShardedPlan, options: Mapping[str, Any]) -> None:
        """Build a replica per row, all with row 0's weights; `options` are those of the DDP."""
        model = plan.sharded_model
        self.plan = plan
        self.modules = [model.make_exact(model.build()) for _ in range(plan.num_rows)]
        self.optimizers = [plan.make_optimizer(module) for module in self.modules]
        self.facts: list[dict[str, Any]] = [{} for _ in self.modules]
        self._syncs_buffers = broadcasts_buffers(options)
        self._used: set[str] = set()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))

    def train(self) -> None:
        for step in range(self.plan.num_steps):
            self.step(step)
        if self.plan.num_inputs:
            self._copy_model(max(range(self.plan.num_rows), key=lambda row: (self.plan.num_inputs[row], row)))
        for row, module in enumerate(self.modules):
            self.facts[row] |= {f"final/parameter/{name}": fact for name, fact in self.parameters(row).items()}
            self.facts[row] |= {f"final/buffer/{name}": buffer.clone() for name, buffer in module.named_buffers()}

    def parameters(self, row: int) -> dict[str, Any]:
        return {name: self._fact(parameter) for name, parameter in self.modules[row].named_parameters()}

    def step(self, step: int) -> None:
        plan, active = self.plan, [row for row in range(self.plan.num_rows) if self.plan.is_active(row, step)]
        if not active:
            return
        for row in active:
            if plan.zero_grad != "keep":
                self.optimizers[row].zero_grad(set_to_none=plan.zero_grad == "none")
        for micro in range(plan.accumulate + 1):
            if self._syncs_buffers and (micro == 0):
                self._copy_buffers()
            for row in active:
                loss = plan.sharded_model.loss(self.modules[row], row, step, micro, **plan.keywords(row, step))
                loss.backward()
                self.facts[row][f"step{step}/loss{micro}"] = _close(loss)
        self._average(active)
        for row in active:
            if plan.accumulate:
                self.facts[row][f"step{step}/rows_under_no_sync"] = 0
            module, prefix = self.modules[row], f"step{step}"
            self.facts[row] |= {f"{prefix}/grad/{name}": self._fact(p.grad) for name, p in module.named_parameters()}
            if plan.clip:
                self.facts[row][f"{prefix}/norm"] = _close(nn.utils.clip_grad_norm_(module.parameters(), plan.clip))
            self.optimizers[row].step()

    @torch.no_grad()
    def _average(self, active: Sequence[int]) -> None:
        divisor = self.plan.num_rows if self.plan.divide_by_initial_world_size else len(active)
        named = [dict(self.modules[row].named_parameters()) for row in active]
        for name in sorted(self._used):
            gradients = [parameters[name].grad for parameters in named]
            mean = _mean([gradient for gradient in gradients if gradient is not None], divisor, self.plan.hook)
            for parameters in named:
                parameters[name].grad = mean.clone()
        self._used.clear()

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        root = dict(self.modules[0].named_buffers())
        for module in self.modules[1:]:
            for name, buffer in module.named_buffers():
                buffer.copy_(root[name])

    @torch.no_grad()
    def _copy_model(self, source: int) -> None:
        for module in self.modules:
            for parameter, origin in zip(module.parameters(), self.modules[source].parameters(), strict=True):
                parameter.copy_(origin)

    def _fact(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        return tensor.detach().clone() if self.plan.is_exact else _close(tensor)


def simulate_unsharded(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts of its row, as program `sharded_training` observes them."""
    with single_threaded():
        plan = ShardedPlan.of(scenario)
        rows = UnshardedRows(plan, scenario.options)
        rows.train()
        return {rank: rows.facts[plan.row_of(rank)] for rank in range(scenario.world_size)}


def losses_of_unsharded(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the losses of its row."""
    whole = simulate_unsharded(scenario)
    return {rank: {name: facts[name] for name in facts if "/loss" in name} for rank, facts in whole.items()}


def _mean(gradients: Sequence[Tensor], divisor: int, hook: str) -> Tensor:
    """Return the sum of `gradients` over `divisor`; with hook "fp16" divided and summed in half precision."""
    if hook == "fp16":
        certain(len(gradients) <= 2, "sums of more than two half-precision numbers depend on their order")
        parts = [gradient.half() / divisor for gradient in gradients]
        return torch.stack(parts).sum(0).double()
    return torch.stack(list(gradients)).sum(0) / divisor


def _close(tensor: Tensor) -> Close:
    return Close(tensor.detach().clone(), rtol=1e-9, atol=1e-12, because=_BECAUSE)
