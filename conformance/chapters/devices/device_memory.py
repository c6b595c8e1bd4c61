"""Program `device_memory`: how much of the device's memory a DDP needs, in a step, between steps and afterwards."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import at_most

_NUM_STEPS = 6
_WIDTH = 64
_NUM_LAYERS = 6
#: The device hands out whole blocks; this is small beside one copy of the gradients, which the scenarios look for.
_SLACK_BYTES = 8 * 1024
#: With views a gradient is freed when it has been copied into its bucket: each at once, or a bucket's together. Here a
#: bucket holds a layer's. Without views gradients stay anyway.
_BUCKET_BYTES = 4 * (_WIDTH * _WIDTH + _WIDTH)


@program("device_memory", invariants=("same_collectives", "leaves_no_trace"))
def device_memory(ctx: RankContext) -> None:
    """Train 6 steps of torch's DDP, and 6 of the subject; all ranks run it.

    Argument `asks` names what is required. Observes of the subject, in bytes: `over_torch`, its peak within a step
    beyond that of torch's DDP; `beside_gradients`, what it keeps between steps beside parameters and one copy of the
    gradients; `growth` from the fourth step to the last; `left` after it was deleted.
    """
    torch_peak, *_ = _measured(
        ctx, lambda module: ctx.wrap_in("torch", module, device_ids=[ctx.device.index], **_options(ctx))
    )
    peak, kept, growth, left = _measured(ctx, ctx.wrap)
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in _module().parameters())
    ctx.observe("over_torch", peak - torch_peak)
    ctx.observe("beside_gradients", kept - 2 * gradients)
    ctx.observe("growth", growth)
    ctx.observe("left", left)


def _options(ctx: RankContext) -> dict[str, Any]:
    return {"process_group": ctx.process_group, **ctx.scenario.options}


def _module() -> nn.Module:
    return with_integer_weights(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS))), "memory")


def _measured(ctx: RankContext, wrap: Any) -> tuple[int, int, int, int]:
    """Return the most bytes within a step, those between steps, their growth, and those that are left in the end."""
    device = ctx.device.index
    _let_go(ctx.device)
    begin = torch.accelerator.memory_allocated(device)
    module = _module().to(ctx.device)
    model = wrap(module)
    peaks, kept = [], []
    for step in range(_NUM_STEPS):
        inputs = rank_step(ctx, step).inputs(4, _WIDTH)
        module.zero_grad(set_to_none=True)
        _drop_last_backward(ctx.device)
        torch.accelerator.reset_peak_memory_stats(device)
        with ctx.phase("forward", step):
            loss = model(inputs).sum()
        ctx.backward(loss, step)
        del loss
        torch.accelerator.synchronize(device)
        peaks.append(torch.accelerator.max_memory_allocated(device) - begin)
        del inputs
        kept.append(torch.accelerator.memory_allocated(device) - begin)
    del module, model
    _let_go(ctx.device)
    return max(peaks[2:]), kept[-1], kept[-1] - kept[3], torch.accelerator.memory_allocated(device) - begin


def _let_go(device: torch.device) -> None:
    _drop_last_backward(device)
    gc.collect()
    torch.accelerator.synchronize(device)


def _drop_last_backward(device: torch.device) -> None:
    """Have autograd's thread begin another backward: until then it keeps the last one, gradients and all."""
    torch.ones(1, device=device, requires_grad=True).sum().backward()
    torch.accelerator.synchronize(device)


@device_memory.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    asked = scenario.arguments["asks"]
    waiting = _BUCKET_BYTES if scenario.options.get("gradient_as_bucket_view") else 0
    most = {"over_torch": waiting + _SLACK_BYTES, "growth": 0}.get(asked, _SLACK_BYTES)
    wanted = at_most(most, "bytes")
    return {rank: {asked: wanted} for rank in range(scenario.world_size)}
