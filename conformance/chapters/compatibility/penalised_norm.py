"""Programs about the SyncBatchNorm of the DDP's package: trained by a gradient penalty, and with all its arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import integers, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.programs.offered import offered_beside
from conformance.programs.registry import program_without_truth
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded
from conformance.truth.expected import AnyOf, Close, Raises

_WIDTH = 4
_ROWS = 4
_STEPS = 3
_REFUSAL = Raises(("RuntimeError",), ("SyncBatchNorm",))


def _data(rank: int, what: str, rows: int = _ROWS, beyond: Sequence[int] = ()) -> Tensor:
    return integers(rows, _WIDTH, *beyond, key=(what, rank), dtype=torch.float64)


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


def _offered(ctx: RankContext, **arguments: Any) -> nn.Module:
    wrapper = ctx.wrap(nn.Linear(1, 1).to(ctx.device))
    layer: Any = offered_beside(type(wrapper), "SyncBatchNorm") or nn.SyncBatchNorm
    if layer is nn.SyncBatchNorm and ctx.device.type == "cpu":
        ctx.unsupported("torch's SyncBatchNorm does not train on a CPU, and the DDP's package has none of its own")
    offered: nn.Module = layer(_WIDTH, process_group=ctx.process_group, **arguments)
    return offered


@program("penalised_norm", invariants=("leaves_no_trace",))
def penalised_norm(ctx: RankContext) -> None:
    """Train one step with a gradient penalty, through the SyncBatchNorm of the DDP's package. All ranks run it.

    Observes `outcome`: all gradients in a row, or the exception. Does not apply where there is torch's layer alone and
    the device is a CPU, on which that one does not train.
    """
    module = _module(_offered(ctx), ctx.scenario).to(ctx.device)
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


@program("normalised_training", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def normalised_training(ctx: RankContext) -> None:
    """Train, and then evaluate, through the SyncBatchNorm of the DDP's package with the arguments in `norm`.

    With `converted` the layer is made by `convert_sync_batchnorm` of torch's, which has run and is in the mode of that
    name, "training" or "evaluating". `beyond`: the dimensions behind the features, none or up to three; the layer is
    alone then. Rank r has r rows more than rank 0. Observes outputs, gradients, the layer's
    buffers, and of a converted module `training`, the mode of each of its modules. Does not apply where
    `penalised_norm` does not. All ranks run it.
    """
    offered: Any = _offered(ctx, **ctx.arguments["norm"])
    if "converted" in ctx.arguments:
        converted = type(offered).convert_sync_batchnorm(_used(ctx.scenario), ctx.process_group)
        ctx.observe("training", [one.training for one in converted.modules()])
        module = converted.train().to(ctx.device)
    else:
        module = _around(offered, ctx.scenario).to(ctx.device)
    batches = [[each.to(ctx.device) for each in _batch(ctx.scenario, ctx.rank, step)] for step in range(_STEPS)]
    for name, value in _train(ctx.wrap(module), module, batches).items():
        ctx.observe(name, value)
    ctx.observe("evaluated", module.eval()(batches[0][0]).detach())


@program_without_truth("normalised_value", invariants=("leaves_no_trace",))
def normalised_value(ctx: RankContext) -> None:
    """Normalise one row on rank 0 and none elsewhere; observes `raised`. All ranks run it.

    Does not apply where `penalised_norm` does not.
    """
    model = ctx.wrap(_offered(ctx).to(ctx.device))
    rows = _data(ctx.rank, "row", 1 if ctx.rank == 0 else 0).float().to(ctx.device)
    with ctx.catching("raised"):
        model(rows)


@normalised_value.expects
def _refused(scenario: Scenario) -> Mapping[int, Facts]:
    refusal = Raises(("ValueError", "RuntimeError"))
    return {key: {"raised": refusal} for key in range(scenario.world_size)}


def _used(scenario: Scenario) -> nn.Module:
    """Return a module with torch's layer, which has run and is in the mode of argument `converted`, if there is one."""
    layer = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(scenario.arguments.get("beyond", ()))]
    module = _around(layer(_WIDTH, **scenario.arguments["norm"]), scenario)
    if "converted" in scenario.arguments:
        module(_data(0, "rows of before"))
        module.get_submodule("1").train(scenario.arguments["converted"] == "training")
    return module


def _around(norm: nn.Module, scenario: Scenario) -> nn.Module:
    """Return layers around `norm`; it alone where its inputs have more dimensions than linear layers are for."""
    return norm.double() if scenario.arguments.get("beyond") else _module(norm, scenario)


def _batch(scenario: Scenario, rank: int, step: int) -> tuple[Tensor, Tensor]:
    beyond = scenario.arguments.get("beyond", ())
    rows, coefficients = (_data(rank, f"{what} {step}", _ROWS + rank, beyond) for what in ("rows", "coefficients"))
    return rows, coefficients


def _train(model: nn.Module, module: nn.Module, batches: Any) -> dict[str, Tensor]:
    facts: dict[str, Tensor] = {}
    for step, (rows, coefficients) in enumerate(batches):
        module.zero_grad()
        output = model(rows)
        (output * coefficients).sum().backward()
        facts |= {f"step{step}/output": output.detach(), f"step{step}/gradients": _flat_gradients(module)}
        facts |= {f"step{step}/{name}": buffer.clone() for name, buffer in module.named_buffers()}
    return facts


@normalised_training.expects
def _expected_of_training(scenario: Scenario) -> Mapping[int, Facts]:
    ranks = range(scenario.world_size)
    with single_threaded():
        module = _used(scenario)
        modes = {"training": [one.training for one in module.modules()]} if "converted" in scenario.arguments else {}
        module.train()
        whole = _train(
            module,
            module,
            [
                map(torch.cat, zip(*[_batch(scenario, rank, step) for rank in ranks], strict=True))
                for step in range(_STEPS)
            ],
        )
        evaluated = [module.eval()(_batch(scenario, rank, 0)[0]).detach() for rank in ranks]
    facts: dict[int, dict[str, Any]] = {rank: {"evaluated": _near(evaluated[rank]), **modes} for rank in ranks}
    for name, value in whole.items():
        parts = value.split([_ROWS + rank for rank in ranks]) if name.endswith("output") else [value] * len(ranks)
        for rank in ranks:
            part = parts[rank] / scenario.world_size if name.endswith("gradients") else parts[rank]
            facts[rank][name] = _near(part) if part.is_floating_point() else part
    return facts


def _near(value: Tensor) -> Close:
    because = "statistics of parts, put together, round differently, some 1e-16 of each term; a wrong term is larger"
    return Close(value, rtol=1e-9, atol=1e-9 * max(1.0, float(value.abs().max())), because=because)
