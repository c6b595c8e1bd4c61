"""Program `on_devices`: where inputs, parameters and buffers are, and what the DDP moves."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import UNIT, integers, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.scenario import Scenario
from conformance.truth.device import single_threaded
from conformance.truth.expected import Raises, at_most
from conformance.truth.replicas import Replicas
from conformance.truth.steps import gradients

_NUM_STEPS = 3
_WIDTH = 4
_CPU = torch.device("cpu")


class Placed(nn.Module):
    """Two layers, each on a device of its own, and a buffer on the host or on the first layer's device.

    It takes inputs on any device, and keeps in `came` on which devices it has seen them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("scale", torch.ones(1))
        self.came: set[torch.device] = set()

    def forward(self, inputs: Tensor, *others: Any, **named: Any) -> Tensor:
        nested = [inputs, *(tensor for other in (*others, *named.values()) for tensor in _tensors(other))]
        self.came.update(tensor.device for tensor in nested)
        there, here = self.second.weight.device, self.first.weight.device
        scale: Any = self.scale
        total = torch.stack([tensor.to(here) for tensor in nested]).sum(0)
        output: Tensor = self.second(total.to(there)) + self.first(total).to(there) * scale.to(here).to(there)
        return output


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in _tensors(item)]


def _values(rank: int, step: int, part: int) -> Tensor:
    return integers(5, _WIDTH, key=("placed", rank, step, part))


def _coefficients(rank: int, step: int) -> Tensor:
    return UNIT * integers(5, _WIDTH, key=("coefficients", rank, step))


@program("on_devices", invariants=("same_collectives", "leaves_no_trace"))
def on_devices(ctx: RankContext) -> None:
    """Train 3 steps; all ranks run it.

    Arguments: `inputs` are `here` (the rank's device), `host`, `pinned` or `other`; with `nested` some are in
    containers and keywords; with `reused` the user overwrites them once forward has returned; `ids` are `none`, `here`,
    `other` or `both`; `layers`: the second one is `here` or on the `other` device; `host_buffer`; `current`: the user's
    current device is `here` or `other`; `side`: under a stream of the user's own.
    Observes gradients, `came` (whether all inputs reached forward on `device_ids[0]`, or without it where they were)
    and `elsewhere`, the bytes that training has allocated on devices on which no parameter or input is.
    """
    arguments, here = ctx.arguments, ctx.device
    num_devices = torch.accelerator.device_count()
    other = torch.device(here.type, (here.index + 1) % num_devices)
    if "other" in arguments.values() and num_devices < 2:
        ctx.unsupported("there is one device only")
    module = with_integer_weights(Placed(), ctx.scenario.seed)
    module.to(here)
    if arguments.get("layers") == "other":
        module.second.to(other)
    if arguments.get("host_buffer"):
        module.scale = module.scale.cpu()
    module.scale.fill_(ctx.rank + 1.0)  # type: ignore[operator]
    ids = {"none": None, "other": [other.index], "both": [here.index, other.index]}.get(
        arguments.get("ids", "here"), [here.index]
    )
    used_elsewhere = "other" in (arguments.get("layers"), arguments.get("inputs"), arguments.get("ids"))
    before = torch.accelerator.memory_allocated(other.index) if num_devices > 1 else 0
    facts: dict[str, Any] = {}
    with _current(other if arguments.get("current") == "other" else here):
        if arguments.get("refused"):
            with ctx.catching("raised"):
                ctx.wrap(module, device_ids=ids)
            return
        model = ctx.wrap(module, device_ids=ids)
        main = torch.accelerator.current_stream(here)
        stream = torch.Stream(here) if arguments.get("side") else None
        if stream is not None:
            stream.wait_stream(main)
        with contextlib.nullcontext() if stream is None else stream:
            for step in range(_NUM_STEPS):
                _step(ctx, model, module, step, other)
                facts |= gradients(f"step{step}", module)
        if stream is not None:
            main.wait_stream(stream)
    for name, value in facts.items():
        ctx.observe(name, value)
    where = {"none": _CPU if arguments.get("inputs") in ("host", "pinned") else here, "other": other}
    ctx.observe("came", module.came == {where.get(arguments.get("ids", "here"), here)})
    if num_devices > 1 and not used_elsewhere:
        ctx.observe("elsewhere", torch.accelerator.memory_allocated(other.index) - before)


def _step(ctx: RankContext, model: Any, module: nn.Module, step: int, other: torch.device) -> None:
    arguments = ctx.arguments
    parts = [_values(ctx.rank, step, part) for part in range(4)]
    match arguments.get("inputs", "here"):
        case "pinned":
            parts = [part.pin_memory() for part in parts]
        case "here":
            parts = [part.to(ctx.device) for part in parts]
        case "other":
            parts = [part.to(other) for part in parts]
    module.zero_grad(set_to_none=True)
    with ctx.phase("forward", step):
        if arguments.get("nested"):
            output = model(parts[0], [parts[1]], {"a": (parts[2],)}, last=parts[3])
        else:
            output = model(parts[0])
    if arguments.get("reused"):
        for part in parts:
            part.fill_(77.0)
    ctx.backward((output * _coefficients(ctx.rank, step).to(output.device)).sum(), step)


@contextlib.contextmanager
def _current(device: torch.device) -> Any:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@on_devices.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    arguments, ranks = scenario.arguments, range(scenario.world_size)
    if arguments.get("refused"):
        return {rank: {"raised": Raises(("ValueError",), ("device_ids",))} for rank in ranks}
    facts: dict[int, dict[str, Any]] = {rank: {"came": True} for rank in ranks}
    with single_threaded():
        modules = [Placed() for _ in ranks]
        for rank, module in enumerate(modules):
            with_integer_weights(module, scenario.seed)
            module.scale.fill_(rank + 1.0)  # type: ignore[operator]
        world = Replicas(modules)
        for step in range(_NUM_STEPS):
            world.before_forward()
            for rank, module in enumerate(modules):
                module.zero_grad(set_to_none=True)
                parts = [_values(rank, step, part) for part in range(4)]
                output = module(*(parts if arguments.get("nested") else parts[:1]))
                (output * _coefficients(rank, step)).sum().backward()
            world.after_forward(synchronised=True)
            world.average_gradients()
            for rank, module in enumerate(modules):
                facts[rank] |= gradients(f"step{step}", module)
    if arguments.get("elsewhere"):
        for mine in facts.values():
            mine["elsewhere"] = at_most(0, "bytes")
    return facts
