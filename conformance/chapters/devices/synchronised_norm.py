"""Program `synchronised_norm`: a SyncBatchNorm in a wrapped module, whose collectives share the group's stream."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import UNIT, integers, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.programs.agreement import same_bits_everywhere
from conformance.programs.offered import offered_beside
from conformance.scenario import Scenario
from conformance.truth.expected import Anything, Close, at_most

_NUM_STEPS = 4
_WIDTH = 4
_ROWS = 4


def _inputs(rank: int, step: int) -> Tensor:
    return integers(_ROWS, _WIDTH, key=("normalised", rank, step))


@program("synchronised_norm", invariants=("same_collectives", "leaves_no_trace"))
def synchronised_norm(ctx: RankContext) -> None:
    """Train 4 steps of a SyncBatchNorm that remembers its last batch, and of a layer behind it; all ranks run it.

    Arguments: `own`: the layer is the one of the DDP's package, if it has one, else torch's; `side`:
    under a stream of the user's own; `counts`: the most waits for the device beyond those of torch's layer alone.
    Observes `mean`, the layer's, which is that of all ranks' rows, `same` (whether all ranks have the same gradients
    in the end), and with `counts` the waits in a step: `waits`, and `added` to those of torch's layer without a DDP.
    """
    arguments, device_module = ctx.arguments, torch.get_device_module(ctx.device)
    if "counts" in arguments and not hasattr(device_module, "take_syncs"):
        ctx.unsupported("the device does not record counts: its module has no take_syncs")
    bare = _module(ctx, nn.SyncBatchNorm)
    alone = _waits(ctx, bare, bare, device_module) if "counts" in arguments else 0
    wrapper = ctx.wrap(nn.Linear(1, 1).to(ctx.device)) if arguments.get("own") else bare
    module = _module(ctx, offered_beside(type(wrapper), "SyncBatchNorm") or nn.SyncBatchNorm)
    model = ctx.wrap(module)
    main = torch.accelerator.current_stream(ctx.device)
    stream = torch.Stream(ctx.device) if arguments.get("side") else main
    stream.wait_stream(main)
    with stream:
        waits = _waits(ctx, model, module, device_module)
    main.wait_stream(stream)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    ctx.observe("same", bool(gradients) and same_bits_everywhere(ctx, gradients))
    ctx.observe("mean", module[0].running_mean)
    if "counts" in arguments:
        ctx.observe("waits", waits)
        ctx.observe("added", waits - alone)


def _module(ctx: RankContext, layer: type[nn.SyncBatchNorm]) -> nn.Sequential:
    norm = layer(_WIDTH, momentum=1.0, process_group=ctx.process_group)
    return nn.Sequential(norm, with_integer_weights(nn.Linear(_WIDTH, _WIDTH), ctx.scenario.seed)).to(ctx.device)


def _waits(ctx: RankContext, model: nn.Module, module: nn.Module, device_module: Any) -> int:
    """Train, and return how often the host waited for the device in the last step; 0 if the device does not count."""
    take = getattr(device_module, "take_syncs", list)
    data = [
        (_inputs(ctx.rank, step).to(ctx.device), UNIT * _inputs(ctx.rank, -1 - step).to(ctx.device))
        for step in range(_NUM_STEPS)
    ]
    waits = 0
    for step, (inputs, coefficients) in enumerate(data):
        module.zero_grad(set_to_none=True)
        take()
        with ctx.phase("forward", step):
            loss = (model(inputs) * coefficients).sum()
        ctx.backward(loss, step)
        waits = len(take())
    return waits


@synchronised_norm.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    rows = torch.cat([_inputs(rank, _NUM_STEPS - 1) for rank in range(scenario.world_size)])
    # Whole numbers over 8 rows: exact. Over 12 rows a mean is rounded, and where depends on the order of the sums.
    mean = rows.mean(0)
    facts: dict[str, Any] = {"mean": mean if len(rows) & (len(rows) - 1) == 0 else _near(mean), "same": True}
    if "counts" in scenario.arguments:
        most = scenario.arguments["counts"]
        facts["waits"] = Anything()
        facts["added"] = at_most(most)
    return dict.fromkeys(range(scenario.world_size), facts)


def _near(mean: Tensor) -> Close:
    return Close(mean, rtol=1e-5, atol=1e-6, because="a mean over 12 rows is rounded, once on each of three ranks")
