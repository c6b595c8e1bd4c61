"""Program `on_streams`: a few steps on streams of the user's choice, with nobody waiting for the device in between.

Inputs and losses are on the device before the first step, and facts are read after the last one: whatever waits for the
device in a step is the DDP. A device that finds races reports those of every scenario by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.oracles.expected import Satisfies
from conformance.oracles.replicas import Replicas, single_threaded
from conformance.oracles.steps import gradients
from conformance.own_mistake import present
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program
from conformance.programs.written_steps import rank_step
from conformance.scenario import Scenario

NUM_STEPS = 4
_WIDTH = 4
_NUM_LAYERS = 4
#: How a device's module calls what counts and lists; devices without it make a scenario that needs it UNSUPPORTED.
_COUNTER, _TRACER = "take_syncs", "take_trace"
_COLLECTIVE = "allreduce"


class Scaled(nn.Module):
    """Layers of whole numbers; multiplies by a buffer, which every rank changes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum of the layers' outputs (n x 4), times the buffer as it was before this forward."""
        scale: Any = self.scale
        output: Tensor = torch.stack([layer(inputs) for layer in self.layers]).sum(0) * scale.clone()
        with torch.no_grad():
            scale.add_(1.0)
        return output


def _data(turn: RankStep, micro: int) -> tuple[Tensor, Tensor]:
    """Return inputs and the coefficients of a linear loss, on the device."""
    inputs = turn.inputs(5, _WIDTH, micro=micro)
    return inputs, turn.inputs(5, _WIDTH, micro=100 + micro) * 144


def _divide(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = present(dist.all_reduce(bucket.buffer(), group=group, async_op=True))
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0] / group.size())
    return future


# torch compares the annotations of a hook with types, and not with their names.
_divide.__annotations__ = {"group": dist.ProcessGroup, "bucket": GradBucket, "return": torch.futures.Future[Tensor]}


@program("on_streams", invariants=("same_collectives", "silent_no_sync", "leaves_no_trace"))
def on_streams(ctx: RankContext) -> None:
    """Train 4 steps; all ranks run it.

    Arguments: `place` is the stream of the steps (`default`, `side`, or `side_each`: another one in each); `local`
    micro-batches run under `no_sync` before each synchronised one; `hook` registers a comm hook; `buffers`: rank r's
    buffer is r + 1 before each forward; `churns`: gradients are freed, and their memory is taken, after each step.
    Observes `step<k>/grad/...`; with `counts` the waits for the device in the step with most,
    with `traces` whether a bucket was launched before the last gradient was there.
    """
    arguments, module = ctx.arguments, with_integer_weights(Scaled(), ctx.scenario.seed).to(ctx.device)
    device_module = torch.get_device_module(ctx.device)
    for wanted, name in (("counts", _COUNTER), ("traces", _TRACER)):
        if wanted in arguments and not hasattr(device_module, name):
            ctx.unsupported(f"the device does not tell {wanted.rstrip('s')}s: its module has no {name}")
    model: Any = ctx.wrap(module)
    if arguments.get("hook"):
        model.register_comm_hook(ctx.process_group, _divide)
    num_local = arguments.get("local", 0)
    data = [[_data(rank_step(ctx, index), micro) for micro in range(num_local + 1)] for index in range(NUM_STEPS)]
    streams = [torch.Stream(ctx.device) for _ in range(NUM_STEPS)]
    main = torch.accelerator.current_stream(ctx.device)
    facts: dict[str, Any] = {}
    syncs: list[str] = []
    launched_early: list[bool] = []
    for index in range(NUM_STEPS):
        stream = {"side": streams[0], "side_each": streams[index]}.get(arguments.get("place", "default"))
        if stream is not None:
            stream.wait_stream(main)
        with _on(stream):
            module.zero_grad(set_to_none=True)
            if arguments.get("buffers"):
                module.scale.fill_(ctx.rank + 1.0)  # type: ignore[operator]
            if "counts" in arguments:
                device_module.take_syncs()
            if "traces" in arguments:
                device_module.start_trace()
            for micro, (inputs, coefficients) in enumerate(data[index]):
                local = micro < num_local
                with ctx.no_sync(model) if local else contextlib.nullcontext():
                    with ctx.phase("forward", index):
                        loss = (model(inputs) * coefficients).sum()
                    ctx.backward(loss, index)
            if "counts" in arguments and index > 1:  # ranks agree on buckets once, before the second step
                syncs = max(syncs, device_module.take_syncs(), key=len)
            if "traces" in arguments and index > 0:
                launched_early.append(_launched_early(device_module.take_trace()))
            facts |= gradients(f"step{index}", module)
            if arguments.get("churns"):
                module.zero_grad(set_to_none=True)
                for parameter in module.parameters():
                    torch.full_like(parameter, 7.0)
        if stream is not None:
            main.wait_stream(stream)
    for name, value in facts.items():
        ctx.observe(name, value)
    if "counts" in arguments:
        ctx.observe("syncs", syncs)
    if "traces" in arguments:
        ctx.observe("launched_early", launched_early)


def _launched_early(trace: list[tuple[str, str]]) -> bool:
    """Whether the first collective was launched before the last product of matrices, by which a gradient is made."""
    launches = [place for place, (_, operation) in enumerate(trace) if _COLLECTIVE in operation]
    products = [place for place, (_, operation) in enumerate(trace) if operation.endswith("mm")]
    return bool(launches and products) and launches[0] < products[-1]


def _on(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


@on_streams.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    arguments, ranks = scenario.arguments, range(scenario.world_size)
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    with single_threaded():
        modules = [with_integer_weights(Scaled(), scenario.seed) for _ in ranks]
        world = Replicas(modules)
        for index in range(NUM_STEPS):
            for rank, module in enumerate(modules):
                module.zero_grad(set_to_none=True)
                if arguments.get("buffers"):
                    module.scale.fill_(rank + 1.0)  # type: ignore[operator]
            num_local = arguments.get("local", 0)
            for micro in range(num_local + 1):
                world.before_forward()
                for rank, module in enumerate(modules):
                    inputs, coefficients = _data(RankStep(rank, index), micro)
                    (module(inputs) * coefficients).sum().backward()
                world.after_forward(synchronised=micro == num_local)
            world.average_gradients()
            for rank, module in enumerate(modules):
                facts[rank] |= gradients(f"step{index}", module)
    for mine in facts.values():
        if "counts" in arguments:
            mine["syncs"] = _at_most(arguments["counts"])
        if "traces" in arguments:
            mine["launched_early"] = [True] * (NUM_STEPS - 1)
    return facts


def _at_most(most: int) -> Satisfies:
    return Satisfies(f"at most {most} in a step", lambda got: len(got) <= most)
