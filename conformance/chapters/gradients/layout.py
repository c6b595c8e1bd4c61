"""Program `gradient_layout`: the memory layout of gradients, and whether training emits warnings."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, observing_warnings, program, run_steps
from conformance.programs.storages import num_storages
from conformance.scenario import Scenario
from conformance.truth.expected import Anything, Raises

NUM_STEPS = 3


class Transposed(nn.Module):
    """Weights that are stored transposed or permuted, beside an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.ordinary = nn.Parameter(torch.empty(3, 4))
        self.transposed = nn.Parameter(torch.empty(4, 3).t())
        self.permuted = nn.Parameter(torch.empty(2, 4, 3).permute(2, 1, 0))

    def forward(self, inputs: Tensor) -> Tensor:
        columns = inputs.t()
        return ((self.ordinary + self.transposed + self.permuted.sum(2)) @ columns).t()


class Image(nn.Module):
    """Shapes rows of 36 into 4 channels of 3 x 3, or of another `shape`, before `layers`."""

    def __init__(self, *layers: nn.Module, shape: tuple[int, ...] = (4, 3, 3)) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shape = shape

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs.reshape(-1, *self.shape))
        return output


def _channels_last(module: Any, memory_format: torch.memory_format = torch.channels_last) -> nn.Module:
    moved: nn.Module = module.to(memory_format=memory_format)
    return moved


def _volume() -> nn.Module:
    return Image(nn.Conv3d(2, 3, 2), nn.Conv3d(3, 2, (1, 2, 2), padding=1), shape=(2, 2, 3, 3))


#: Modules by name, and the length of the rows that they take.
MODULES: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), 4),
    "transposed": (Transposed, 4),
    "channels_last": (
        lambda: _channels_last(Image(nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(3, 2, 2))), 36,
    ),
    "pointwise": (lambda: Image(nn.Conv2d(4, 3, 1), nn.Conv2d(3, 2, 1)), 36),
    "pointwise_channels_last": (
        lambda: _channels_last(Image(nn.Conv2d(4, 3, 1), nn.Conv2d(3, 2, 1))), 36,
    ),
    "volume": (_volume, 36),
    "volume_channels_last": (lambda: _channels_last(_volume(), torch.channels_last_3d), 36),
}  # fmt: skip


#: What a loop does to a wrapped module, by name: another layout or dtype.
CONVERSIONS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "to_channels_last": lambda module: _channels_last(module, torch.channels_last_3d),
    "to_contiguous": lambda module: _channels_last(module, torch.contiguous_format),
    "to_double": nn.Module.double,
}
#: No float32 holds an integer times this.
_NOT_SINGLE = 1 + 2.0**-30


def _build(scenario: Scenario) -> nn.Module:
    build, _ = MODULES[scenario.arguments["module"]]
    return with_integer_weights(build().to(getattr(torch, scenario.dtype)), scenario.seed)


def _step(scenario: Scenario, model: nn.Module, turn: RankStep) -> None:
    _, width = MODULES[scenario.arguments["module"]]
    dtype = next(model.parameters()).dtype
    inputs = turn.inputs(2, width, dtype=dtype)
    if dtype is not getattr(torch, scenario.dtype):
        inputs *= _NOT_SINGLE
    turn.backward(turn.loss(turn.forward(model, inputs)))


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions with more than one entry; the others have no meaning."""
    return [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]


def _layout(module: nn.Module) -> dict[str, Any]:
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    present = [gradient for gradient in gradients.values() if gradient is not None]
    return {
        "strides": {name: None if grad is None else _strides(grad) for name, grad in gradients.items()},
        "num_storages": num_storages(module),
        "bytes_kept": sum({g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in present}.values()),
    }


@program(
    "gradient_layout",
    invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"),
    speaks_for={
        "warnings": ("GRAD-07",),
        "*/strides": ("GRAD-06",),
        "*/num_storages": ("GRAD-08", "GRAD-09"),
        "*/bytes_kept": ("GRAD-09",),
        "*/grad/*": ("GRAD-01",),
    },
)
def gradient_layout(ctx: RankContext) -> None:
    """Train steps of the module that argument `module` names; observe gradients and warnings.

    The step of argument `after` begins with what `conversion` names; a DDP may refuse another dtype.
    Observes gradients, `step<k>/strides`, `step<k>/num_storages`, `step<k>/bytes_kept` and all `warnings`, those that
    torch would show once per process included. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    conversion = CONVERSIONS.get(ctx.arguments.get("conversion", ""))
    refusal = Raises(("RuntimeError",), ("wrap",)) if conversion is nn.Module.double else None

    def step(model: nn.Module, turn: RankStep) -> Mapping[str, Any]:
        if conversion is not None and turn.step == ctx.arguments["after"]:
            module.zero_grad()
            conversion(module)
        _step(ctx.scenario, model, turn)
        return _layout(module)

    with observing_warnings(ctx):
        must = _judged(ctx.scenario, module)
        observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), step, NUM_STEPS), must=must, refusal=refusal)


def _judged(scenario: Scenario, module: nn.Module) -> Mapping[str, Any]:
    """Return what the layout of gradients must be; anything where nothing is said of it."""
    conversion = CONVERSIONS.get(scenario.arguments.get("conversion", ""))
    converted = module if conversion is None else conversion(copy.deepcopy(module))
    parameters = dict(module.named_parameters())
    num_bytes = sum(math.prod(p.shape) * p.element_size() for p in parameters.values())
    as_view = bool(scenario.options.get("gradient_as_bucket_view", False))
    facts: dict[str, Any] = {}
    for index in range(NUM_STEPS):
        if conversion is not None and index >= scenario.arguments["after"]:
            facts[f"step{index}/strides"] = {name: _strides(one) for name, one in converted.named_parameters()}
            facts |= dict.fromkeys((f"step{index}/num_storages", f"step{index}/bytes_kept"), Anything())
            continue
        facts[f"step{index}/strides"] = {name: _strides(parameter) for name, parameter in parameters.items()}
        # Gradients move into the bucket during the first iteration.
        in_bucket = 1 if index else Anything()
        facts[f"step{index}/num_storages"] = in_bucket if as_view else len(parameters)
        facts[f"step{index}/bytes_kept"] = Anything() if as_view else num_bytes
    return facts
