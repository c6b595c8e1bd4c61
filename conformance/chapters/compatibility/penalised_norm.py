"""Program `penalised_norm`: a gradient penalty through a layer that shares statistics among the ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import integers, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.programs.offered import offered_beside
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded
from conformance.truth.expected import AnyOf, Close, Raises

_WIDTH = 4
_ROWS = 4
_REFUSAL = Raises(("RuntimeError",), ("SyncBatchNorm",))


def _data(rank: int, what: str) -> Tensor:
    return integers(_ROWS, _WIDTH, key=(what, rank), dtype=torch.float64)


def _module(norm: nn.Module, scenario: Scenario) -> nn.Module:
    layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), norm, nn.Linear(_WIDTH, _WIDTH)).double()
    return with_integer_weights(layers, scenario.seed)


def _penalised(model: nn.Module, inputs: Tensor, coefficients: Tensor) -> Tensor:
    """Return the loss and the square of its slope along the inputs."""
    loss = (model(inputs).square() * coefficients).sum()
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    penalised: Tensor = loss + slope.square().sum()
    return penalised


def _flat_gradients(module: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


@program("penalised_norm", invariants=("leaves_no_trace",))
def penalised_norm(ctx: RankContext) -> None:
    """Train one step with a gradient penalty, through the SyncBatchNorm of the DDP's package. All ranks run it.

    Observes `outcome`: all gradients in a row, or the exception. Does not apply where there is torch's layer alone and
    the device is a CPU, on which that one does not train.
    """
    wrapper = ctx.wrap(nn.Linear(1, 1).to(ctx.device))
    layer: Any = offered_beside(type(wrapper), "SyncBatchNorm") or nn.SyncBatchNorm
    if layer is nn.SyncBatchNorm and ctx.device.type == "cpu":
        ctx.unsupported("torch's SyncBatchNorm does not train on a CPU, and the DDP's package has none of its own")
    module = _module(layer(_WIDTH, process_group=ctx.process_group), ctx.scenario).to(ctx.device)
    model = ctx.wrap(module)
    with ctx.catching("raised"), ctx.phase("backward", 0):
        inputs = _data(ctx.rank, "rows").to(ctx.device).requires_grad_()
        _penalised(model, inputs, _data(ctx.rank, "coefficients").to(ctx.device)).backward()
    error = ctx.facts.pop("raised")
    ctx.observe("outcome", _flat_gradients(module) if error is None else error)


@penalised_norm.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    ranks = range(scenario.world_size)
    module = _module(nn.BatchNorm1d(_WIDTH), scenario)
    with single_threaded():
        inputs = torch.cat([_data(rank, "rows") for rank in ranks]).requires_grad_()
        _penalised(module, inputs, torch.cat([_data(rank, "coefficients") for rank in ranks])).backward()
    mean = _flat_gradients(module) / scenario.world_size
    # A sum of terms of the size of the largest gradient may cancel.
    because = "statistics and sums in another order round differently, some 1e-16 of each term; a wrong term is larger"
    near = Close(mean, rtol=1e-9, atol=1e-9 * float(mean.abs().max()), because=because)
    return {rank: {"outcome": AnyOf(near, _REFUSAL)} for rank in ranks}
