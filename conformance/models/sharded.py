"""Models for tensor parallelism: small modules in float64, and how to shard each over the ranks of a mesh dimension.

Hooks round the parameters' gradients of an exact model to multiples of `_QUANTUM`, as in `models.exact`. The order of
sums changes eleven orders of magnitude less, so a sharded product and the product of the whole matrix give the same
gradients bit for bit, and means over rows of the mesh are exact.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from conformance.errors import ScenarioError, hint
from conformance.models.exact import Quantum
from conformance.models.integers import integers, with_integer_weights

DTYPE = torch.float64
_QUANTUM = Quantum(factor=27, bits=19, limit=8191, precision=24)
_NUM_TOKENS = 7  # odd: no number of ranks up to 4 but 1 divides it

Plan = Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class ShardedModel:
    """A module, its parallelisation plan and its data; `exact`: gradients are rounded; `frozen`: untrained names."""

    name: str
    module: Callable[[], nn.Module]
    plan: Callable[[], Plan]
    takes_tokens: bool = False
    exact: bool = True
    frozen: tuple[str, ...] = ()

    def build(self, variant: int = 0) -> nn.Module:
        """Return the whole module, the same on every rank; other variants have other weights."""
        module = with_integer_weights(self.module().to(DTYPE), self.name, variant)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.mul_(0.125)
                parameter.requires_grad_(name not in self.frozen)
        return module

    def spread(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Return `module` parallelised over the 1-D `mesh`; all its ranks must call it."""
        return parallelize_module(module, mesh, dict(self.plan()))

    def make_exact(self, module: nn.Module) -> nn.Module:
        """Install the hooks that round gradients, if the model is exact; returns `module`."""
        for parameter in module.parameters():
            if self.exact and parameter.requires_grad:
                parameter.register_hook(_QUANTUM.round)
        return module

    def inputs(self, row: int, step: int, micro: int) -> Tensor:
        """Return the batch of a row of the mesh, the same on all ranks of the row."""
        key = ("sharded", self.name, row, step, micro)
        if self.takes_tokens:
            return integers(2, 12, key=key, largest=_NUM_TOKENS, dtype=torch.int64).remainder(_NUM_TOKENS)
        return integers(5, 4, key=key, dtype=DTYPE) * 0.25

    def loss(self, model: Any, row: int, step: int, micro: int, **kwargs: Any) -> Tensor:
        """Run forward on the row's batch and return the scalar loss."""
        output = model(self.inputs(row, step, micro), **kwargs)
        target = integers(*output.shape, key=("target", row, step, micro), dtype=DTYPE)
        return (output - target).pow(2).mean()


class Branches(nn.Module):
    """A residual stream that is split over the sequence; the argument `use` names the branches that are added to it.

    Its normalisations are replicated, and each rank sees a part of the sequence: their gradients are partial sums.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_NUM_TOKENS, 4)
        self.branches = nn.ModuleDict({name: self._branch() for name in "ab"})
        self.head = nn.Linear(4, 3)

    @staticmethod
    def _branch() -> nn.Module:
        layers = {"norm": nn.LayerNorm(4), "up": nn.Linear(4, 12), "act": nn.ReLU(), "down": nn.Linear(12, 4)}
        return nn.Sequential(OrderedDict(layers))

    def forward(self, tokens: Tensor, use: str = "ab") -> Tensor:
        hidden = self.embed(tokens)
        for name in use:
            hidden = hidden + self.branches[name](hidden)
        return self.head(hidden)


def _branches_plan() -> Plan:
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name in "ab":
        plan |= {
            f"branches.{name}.norm": SequenceParallel(),
            f"branches.{name}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"branches.{name}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan


class Heads(nn.Module):
    """Several heads; forward uses those that its argument names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({name: _mlp(4, 6, 4) for name in "abc"})

    def forward(self, inputs: Tensor, use: str = "abc") -> Tensor:
        hidden = self.trunk(inputs)
        return torch.stack([self.heads[name](hidden) for name in use]).sum(0)


class Marked(nn.Module):
    """An MLP whose forward adds a buffer to its output, then writes the mean of its inputs into the buffer."""

    mark: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = _mlp(4, 6, 4)
        self.register_buffer("mark", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.layers(inputs) + self.mark
        with torch.no_grad():
            self.mark.copy_(inputs.mean(0))
        return output


def _mlp(width: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(up=nn.Linear(width, hidden), act=nn.ReLU(), down=nn.Linear(hidden, out)))


def _with_plain_head(hidden: int) -> nn.Sequential:
    module = _mlp(4, hidden, 3)
    module.add_module("head", nn.Linear(3, 2))
    return module


def _mlp_plan(prefix: str = "") -> Plan:
    # Without local outputs in between, torch knows the whole size of a dimension that it splits unevenly.
    return {f"{prefix}up": ColwiseParallel(use_local_output=False), f"{prefix}down": RowwiseParallel()}


def _stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))


def _stack_plan() -> Plan:
    return {str(index): RowwiseParallel() if index % 2 else ColwiseParallel() for index in range(6)}


def _embeddings() -> nn.Sequential:
    layers = {"rows": nn.Embedding(_NUM_TOKENS, 4), "up": nn.Linear(4, 5), "act": nn.ReLU(), "down": nn.Linear(5, 2)}
    return nn.Sequential(OrderedDict(layers))


def _rows_plan() -> Plan:
    return {"rows": RowwiseParallel(input_layouts=Replicate()), **_mlp_plan()}


def _columns_plan() -> Plan:
    return {"rows": ColwiseParallel(output_layouts=Replicate()), **_mlp_plan()}


_MODELS = {
    model.name: model
    for model in (
        ShardedModel("mlp", lambda: _with_plain_head(12), _mlp_plan),
        # Without hooks, which no graph can follow.
        ShardedModel("unhooked", lambda: _with_plain_head(12), _mlp_plan, exact=False),
        ShardedModel("uneven", lambda: _with_plain_head(5), _mlp_plan),
        ShardedModel("narrow", lambda: _with_plain_head(1), _mlp_plan),
        ShardedModel("frozen", lambda: _with_plain_head(12), _mlp_plan, frozen=("up.weight", "down.bias", "head.bias")),
        ShardedModel("rows", _embeddings, _rows_plan, takes_tokens=True),
        ShardedModel("columns", _embeddings, _columns_plan, takes_tokens=True),
        ShardedModel("sequence", Branches, _branches_plan, takes_tokens=True, exact=False),
        ShardedModel("heads", Heads, lambda: {k: v for name in "abc" for k, v in _mlp_plan(f"heads.{name}.").items()}),
        ShardedModel("buffer", Marked, lambda: _mlp_plan("layers.")),
        ShardedModel("stack", _stack, _stack_plan),
    )
}


def get_sharded_model(name: str) -> ShardedModel:
    """Return the model called `name`; raises `ScenarioError` with near misses."""
    if name not in _MODELS:
        raise ScenarioError(f"unknown sharded model {name!r}{hint(name, _MODELS)}")
    return _MODELS[name]
