"""Program `on_streams`: a few steps on streams of the user's choice, without a wait for the device in between.

Inputs and losses are on the device before the first step, and facts are read after the last one: every wait for the
device in a step is the DDP's. A device that finds races reports those of every scenario by itself.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

from conformance.chapters.devices.hooks import BUFFER_HOOKS, HOOKS
from conformance.chapters.devices.trace import is_late, launches_early, waits_early
from conformance.models.integers import RankStep, with_integer_weights
from conformance.models.low_precision import precision_option
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.join_context import joining
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded
from conformance.truth.expected import Satisfies, at_most
from conformance.truth.replicas import Replicas, broadcasts_buffers
from conformance.truth.steps import gradients

NUM_STEPS = 4
#: Ranks agree on buckets once: before the second step, with a static graph perhaps before the third.
_SETTLED = 3
_WIDTH = 4
_NUM_LAYERS = 4
#: How a device's module calls what counts and lists; devices without it make a scenario that needs it UNSUPPORTED.
_COUNTER, _TRACER = "take_syncs", "take_trace"
#: A power of two: multiplying by it is exact.
_RATE = 2.0**-4


class Scaled(nn.Module):
    """Layers of whole numbers; multiplies by a buffer, which every rank changes in its own way.

    With `streams`, each layer runs on a stream of its own.
    """

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS))
        if spare:  # which no forward uses
            self.spare = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("scale", torch.ones(1))
        self.streams: list[torch.Stream] = []

    def forward(self, inputs: Tensor) -> Tensor:
        scale: Any = self.scale
        outputs = []
        for index, layer in enumerate(self.layers):
            if not self.streams:
                outputs.append(layer(inputs))
                continue
            here, side = torch.accelerator.current_stream(inputs.device), self.streams[index]
            side.wait_stream(here)
            with side:
                outputs.append(layer(inputs))
            here.wait_stream(side)
        output: Tensor = torch.stack(outputs).sum(0) * scale.to(inputs.dtype).clone()
        with torch.no_grad():
            scale.add_(1.0)
        return output


def _module(scenario: Scenario) -> Scaled:
    return with_integer_weights(Scaled(spare=bool(scenario.arguments.get("spare"))), scenario.seed)


def _data(scenario: Scenario, turn: RankStep, micro: int) -> tuple[Tensor, Tensor]:
    """Return inputs and the coefficients of a linear loss, on the device; small ones where half precision is used."""
    inputs = turn.inputs(5, _WIDTH, micro=micro)
    is_half = "mixed_precision" in scenario.options or scenario.arguments.get("hook") == "fp16"
    return inputs, turn.inputs(5, _WIDTH, micro=100 + micro) * (12 if is_half else 144)


@program("on_streams", invariants=("same_collectives", "silent_no_sync", "leaves_no_trace"))
def on_streams(ctx: RankContext) -> None:
    """Train 4 steps; all ranks run it.

    Arguments: `place` is the stream of the steps (`default`, `side`, or `side_each`: another one in each); `wraps`: the
    DDP is built under a stream of its own; `forks`: each layer runs on a stream of its own; `turns`: backward runs
    under another stream than forward; `local` micro-batches run under `no_sync` before each synchronised one, with
    `apart` under a stream of their own; `hook`, `buffer_hook` name comm hooks; `buffers`: rank r's buffer is r + 1
    before each forward; `churns`: gradients are freed, and their memory is taken, after each step; `listens`: a hook
    of the user reads each gradient; `optimizer`: `sgd` or `in_backward`; `joins`: in a join context; `logs`: logging
    data are read in each step; `spare`: a layer is never used.
    Observes `step<k>/grad/...`, with an optimizer `final/...`; and with `guards` whether the current stream and device
    are left alone, with `counts` the waits for the device in the step with most, with `traces` what overlaps.
    """
    arguments, device = ctx.arguments, ctx.device
    device_module = torch.get_device_module(device)
    for wanted, name in (("counts", _COUNTER), ("traces", _TRACER)):
        if wanted in arguments and not hasattr(device_module, name):
            ctx.unsupported(f"the device does not record {wanted.rstrip('s')}s: its module has no {name}")
    module = _module(ctx.scenario)
    module.to(device)
    streams = [torch.Stream(device) for _ in range(NUM_STEPS)]
    main = torch.accelerator.current_stream(device)
    guards = _Guards(device)
    model = _wrapped(ctx, module)
    guards.check("construction")
    if arguments.get("forks"):
        module.streams = [torch.Stream(device) for _ in module.layers]
    optimizer = optim.SGD(module.parameters(), lr=_RATE) if arguments.get("optimizer") == "sgd" else None
    num_local = arguments.get("local", 0)
    data = [
        [_data(ctx.scenario, rank_step(ctx, index), micro) for micro in range(num_local + 1)]
        for index in range(NUM_STEPS)
    ]
    seen: list[Tensor] = []
    if arguments.get("listens"):
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: seen.append(gradient * 2))
    facts: dict[str, Any] = {}
    syncs: list[str] = []
    traces: list[list[tuple[str, str]]] = []
    with joining(ctx, model.join()) if arguments.get("joins") else contextlib.nullcontext():
        for index in range(NUM_STEPS):
            stream = {"side": streams[0], "side_each": streams[index]}.get(arguments.get("place", "default"))
            with _after(main, stream):
                module.zero_grad(set_to_none=True)
                if arguments.get("buffers"):
                    module.scale.fill_(ctx.rank + 1.0)  # type: ignore[operator]
                if "counts" in arguments:
                    device_module.take_syncs()
                if "traces" in arguments:
                    device_module.start_trace()
                for micro, (inputs, coefficients) in enumerate(data[index]):
                    local = micro < num_local
                    apart = torch.Stream(device) if local and arguments.get("apart") else None
                    with ctx.no_sync(model) if local else contextlib.nullcontext(), _after_here(device, apart):
                        with ctx.phase("forward", index):
                            guards.remember()
                            loss = (model(inputs) * coefficients).sum()
                            guards.check("forward")
                        with _after_here(device, torch.Stream(device) if arguments.get("turns") else None):
                            guards.remember()
                            ctx.backward(loss, index)
                            guards.check("backward")
                if arguments.get("logs"):
                    model._get_ddp_logging_data()
                if "counts" in arguments and index >= _SETTLED:
                    syncs = max(syncs, device_module.take_syncs(), key=len)
                if "traces" in arguments:
                    traces.append(device_module.take_trace())
                if arguments.get("optimizer") != "in_backward":
                    facts |= gradients(f"step{index}", module)
                if optimizer is not None:
                    optimizer.step()
                if arguments.get("churns"):
                    module.zero_grad(set_to_none=True)
                    for parameter in module.parameters():
                        torch.full_like(parameter, 7.0)
    if "optimizer" in arguments:
        facts |= {f"final/{name}": parameter.detach().clone() for name, parameter in module.named_parameters()}
    if arguments.get("buffer_hook"):
        facts["scale"] = module.scale.clone()  # type: ignore[operator]
    for name, value in facts.items():
        ctx.observe(name, value)
    if "guards" in arguments:
        ctx.observe("changed", guards.changed)
    if "counts" in arguments:
        ctx.observe("syncs", syncs)
        ctx.observe("waits", len(syncs))
    if "traces" in arguments:  # in the first step the order of gradients is unknown
        ctx.observe("launches_early", [launches_early(trace) for trace in traces[1:]])
        ctx.observe("late", [is_late(trace) for trace in traces[2:]])
        ctx.observe("waits_early", [waits_early(trace) for trace in traces[1:]])


def _wrapped(ctx: RankContext, module: Scaled) -> Any:
    arguments = ctx.arguments
    if arguments.get("optimizer") == "in_backward":
        _apply_optimizer_in_backward(optim.SGD, module.parameters(), {"lr": _RATE})
    here = torch.accelerator.current_stream(ctx.device)
    side = torch.Stream(ctx.device) if arguments.get("wraps") else None
    with _after(here, side):
        model: Any = ctx.wrap(module, **precision_option(ctx.scenario.options))
    if "hook" in arguments:
        model.register_comm_hook(ctx.process_group, HOOKS[arguments["hook"]])
    if "buffer_hook" in arguments:
        model._register_buffer_comm_hook(ctx.process_group, BUFFER_HOOKS[arguments["buffer_hook"]])
    return model


class _Guards:
    """Whether calls leave the current stream and device as they find them."""

    def __init__(self, device: torch.device) -> None:
        self.changed: list[str] = []
        self._device = device
        self.remember()

    def remember(self) -> None:
        self._before = self._now()

    def check(self, call: str) -> None:
        if (now := self._now()) != self._before:
            self.changed.append(f"{call}: {self._before} before, {now} after")

    def _now(self) -> tuple[int, str]:
        return torch.accelerator.current_device_index(), str(torch.accelerator.current_stream(self._device))


@contextlib.contextmanager
def _after(here: torch.Stream, stream: torch.Stream | None) -> Any:
    """Run the block under `stream`, behind what is in `here`, and have `here` wait for it; under None just run it."""
    if stream is None:
        yield
        return
    stream.wait_stream(here)
    with stream:
        yield
    here.wait_stream(stream)


def _after_here(device: torch.device, stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return _after(torch.accelerator.current_stream(device), stream)


@on_streams.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    arguments, ranks = scenario.arguments, range(scenario.world_size)
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
    steps_in_backward = arguments.get("optimizer") == "in_backward"
    with single_threaded():
        modules = [_module(scenario) for _ in ranks]
        hooked = arguments.get("buffer_hook")
        world = Replicas(modules, broadcast_buffers=not hooked and broadcasts_buffers(scenario.options))
        optimizers = [optim.SGD(module.parameters(), lr=_RATE) for module in modules]
        for index in range(NUM_STEPS):
            for rank, module in enumerate(modules):
                module.zero_grad(set_to_none=True)
                if arguments.get("buffers"):
                    module.scale.fill_(rank + 1.0)  # type: ignore[operator]
            num_local = arguments.get("local", 0)
            for micro in range(num_local + 1):
                world.before_forward()
                for rank, module in enumerate(modules):
                    inputs, coefficients = _data(scenario, RankStep(rank, index), micro)
                    (module(inputs) * coefficients).sum().backward()
                world.after_forward(synchronised=micro == num_local)
                if hooked:
                    total = torch.stack([module.scale for module in modules]).sum(0)  # type: ignore[misc]
                    for module in modules:
                        module.scale.copy_(total)  # type: ignore[operator]
            world.average_gradients()
            for rank, module in enumerate(modules):
                if not steps_in_backward:
                    facts[rank] |= gradients(f"step{index}", module)
                if "optimizer" in arguments:
                    optimizers[rank].step()
    for rank, module in enumerate(modules):
        if "optimizer" in arguments:
            facts[rank] |= {f"final/{name}": parameter.detach() for name, parameter in module.named_parameters()}
        if hooked:
            facts[rank]["scale"] = module.scale
        facts[rank] |= _of_the_device(arguments)
    return facts


def _has_at_most(got: Sequence[Any], most: int) -> bool:
    return len(got) <= most


def _of_the_device(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is required beside numbers; `traces` names what is required of the order of work."""
    expected: dict[str, Any] = {}
    if "guards" in arguments:
        expected["changed"] = []
    if "counts" in arguments:
        most = arguments["counts"]
        expected["syncs"] = Satisfies(f"at most {most} in a step", _has_at_most, (most,))
        expected["waits"] = at_most(most, "in a step")
    wanted: dict[str, Callable[[], Any]] = {
        "launches_early": lambda: [True] * (NUM_STEPS - 1),
        "late": lambda: [[]] * (NUM_STEPS - 2),
        "waits_early": lambda: [[]] * (NUM_STEPS - 1),
    }
    if "traces" in arguments:
        expected[arguments["traces"]] = wanted[arguments["traces"]]()
    return expected
