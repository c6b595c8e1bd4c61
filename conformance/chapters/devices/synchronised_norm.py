"""Program `synchronised_norm`: torch's SyncBatchNorm in a wrapped module, whose collectives share the group's stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import UNIT, integers, with_integer_weights
from conformance.observation import Facts
from conformance.oracles.expected import Satisfies
from conformance.programs.agreement import same_bits_everywhere
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.scenario import Scenario

_NUM_STEPS = 4
_WIDTH = 4
_ROWS = 4


def _inputs(rank: int, step: int) -> Tensor:
    return integers(_ROWS, _WIDTH, key=("normalised", rank, step))


@program("synchronised_norm", invariants=("same_collectives", "leaves_no_trace"))
def synchronised_norm(ctx: RankContext) -> None:
    """Train 4 steps of two layers around a SyncBatchNorm that remembers its last batch; all ranks run it.

    Argument `side`: under a stream of the user's own. `counts`: the most waits for the device that the DDP may add to
    those of the layer. Observes `mean`, the layer's, which is that of all ranks' rows, `same` (whether all ranks have the
    same gradients after each step) and `added`.
    """
    norm = nn.SyncBatchNorm(_WIDTH, momentum=1.0, process_group=ctx.process_group)
    module = nn.Sequential(norm, with_integer_weights(nn.Linear(_WIDTH, _WIDTH), ctx.scenario.seed)).to(ctx.device)
    device_module: Any = torch.get_device_module(ctx.device)
    if "counts" in ctx.arguments and not hasattr(device_module, "take_syncs"):
        ctx.unsupported("the device does not tell counts: its module has no take_syncs")
    bare = _waits(ctx, module, module, device_module) if "counts" in ctx.arguments else 0
    model = ctx.wrap(module)
    main = torch.accelerator.current_stream(ctx.device)
    stream = torch.Stream(ctx.device) if ctx.arguments.get("side") else main
    stream.wait_stream(main)
    with stream:
        waits = _waits(ctx, model, module, device_module)
        same = [same_bits_everywhere(ctx, [parameter.grad]) for parameter in module.parameters() if parameter.grad is not None]
    main.wait_stream(stream)
    ctx.observe("mean", norm.running_mean)
    ctx.observe("same", all(same) and bool(same))
    ctx.observe("added", waits - bare)


def _waits(ctx: RankContext, model: nn.Module, module: nn.Module, device_module: Any) -> int:
    """Train, and return how often the host waited for the device in the last step; 0 if the device does not tell."""
    take = getattr(device_module, "take_syncs", list)
    data = [(_inputs(ctx.rank, step).to(ctx.device), UNIT * _inputs(ctx.rank, -1 - step).to(ctx.device)) for step in range(_NUM_STEPS)]
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
    facts: dict[str, Any] = {"mean": rows.mean(0), "same": True}
    if "counts" in scenario.arguments:
        most = scenario.arguments["counts"]
        facts["added"] = Satisfies(f"at most {most}", lambda got: got <= most)
    return {rank: facts for rank in range(scenario.world_size)}
