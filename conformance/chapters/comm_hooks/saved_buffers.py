"""Program `hooked_saved_buffer`: a buffer hook changes in place what a backward has saved for itself."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from conformance.models.integers import RankStep, with_integer_weights
from conformance.models.scaled import Scaled
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.agreement import same_bits_everywhere
from conformance.programs.join_context import joining
from conformance.scenario import Scenario

_NUM_STEPS = 2


def _forwards(scenario: Scenario) -> range:
    return range(scenario.arguments.get("forwards", 1))


def _backward(turn: RankStep, outputs: list[Tensor]) -> None:
    turn.backward(torch.stack([turn.loss(output, micro) for micro, output in enumerate(outputs)]).sum())


@program("hooked_saved_buffer", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def hooked_saved_buffer(ctx: RankContext) -> None:
    """Run `forwards` forwards before each backward; a hook in `location` sums the buffer of `dtype` and adds 1.

    With `join` inside a join context. Observes gradients, the buffer after each step, whether the hook ran in `grad`
    mode, and whether autograd counted what it did as `changes` of the buffer. All ranks run it.
    """
    dtype = getattr(torch, ctx.arguments.get("dtype", "float32"))
    module: Any = with_integer_weights(Scaled(ctx.rank, largest=2, dtype=dtype), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    grad_modes: set[bool] = set()

    def hook(_: Any, buffers: Mapping[str, Tensor]) -> None:
        grad_modes.add(torch.is_grad_enabled())
        dist.all_reduce(buffers["scale"], group=ctx.process_group)
        buffers["scale"].add_(1)

    model._register_buffer_comm_hook(None, hook, _BufferCommHookLocation[ctx.arguments["location"]])
    version = module.scale._version
    with joining(ctx, model.join()) if ctx.arguments.get("join") else contextlib.nullcontext():
        for index in range(_NUM_STEPS):
            module.zero_grad()
            turn = rank_step(ctx, index)
            _backward(turn, [turn.forward(model, turn.inputs(4, 3, micro=micro)) for micro in _forwards(ctx.scenario)])
            ctx.observe(f"step{index}/scale", module.scale)
            ctx.observe_gradients(f"step{index}", module)
    ctx.observe("grad", sorted(grad_modes))
    ctx.observe("changes", module.scale._version - version)


@program("hooked_norm", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def hooked_norm(ctx: RankContext) -> None:
    """Train a batch normalisation whose statistics a hook averages in place; arguments as above.

    Observes `same`: whether all ranks have the same statistics after each step of `POST_FORWARD`, after the forward's
    hook of `PRE_FORWARD`. All ranks run it.
    """
    torch.manual_seed(ctx.scenario.seed)
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(ctx.device)
    model: Any = ctx.wrap(module)
    same: list[bool] = []

    def hook(_: Any, buffers: Mapping[str, Tensor]) -> None:
        for buffer in buffers.values():
            dist.all_reduce(buffer, group=ctx.process_group)
            buffer.div_(ctx.world_size, rounding_mode=None if buffer.is_floating_point() else "floor")
        same.append(same_bits_everywhere(ctx, list(buffers.values())))

    model._register_buffer_comm_hook(None, hook, _BufferCommHookLocation[ctx.arguments["location"]])
    for index in range(_NUM_STEPS):
        turn = rank_step(ctx, index)
        _backward(turn, [turn.forward(model, turn.inputs(4, 3, micro=micro)) for micro in _forwards(ctx.scenario)])
    ctx.observe("same", same)


@hooked_norm.expects
def _same(scenario: Scenario) -> Mapping[int, Facts]:
    same = [True] * (_NUM_STEPS * len(_forwards(scenario)))
    return {rank: {"same": same} for rank in range(scenario.world_size)}
