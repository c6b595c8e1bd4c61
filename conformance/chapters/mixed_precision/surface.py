"""Programs `mixed_precision_surface` and `mixed_precision_refusal`: the wrapper between steps, and misuse."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from conformance.models.integers import integers
from conformance.models.low_precision import Precision, precision_of
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

#: What no half precision can hold beside 1.
_LITTLE = 2.0**-13


class WithBuffers(nn.Module):
    """A layer and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((2,), 1 + _LITTLE))
        self.register_buffer("table", torch.full((2,), 1 + _LITTLE))
        self.register_buffer("precise", torch.full((2,), 1 + _LITTLE, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.get_buffer("count").add_(1)
        output: Tensor = self.layer(inputs) * self.scale.to(inputs.dtype)
        return output


def _module() -> WithBuffers:
    module = WithBuffers()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(integers(*parameter.shape, key=("surface", name), largest=1) + _LITTLE)
    return module


def _dtypes(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.items()}


def _values(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _construct(ctx: RankContext, module: nn.Module, model: Any, before: list[nn.Parameter]) -> Mapping[str, Any]:
    return {
        "same": all(mine is its for mine, its in zip(before, model.parameters(), strict=True)),
        "dtypes": _dtypes(module.state_dict()),
        "values": _values(module.state_dict()),
    }


def _checkpoint(ctx: RankContext, module: nn.Module, model: Any, before: list[nn.Parameter]) -> Mapping[str, Any]:
    within: dict[str, Any] = {}
    handle = module.get_submodule("layer").register_forward_hook(lambda *_: within.update(module.state_dict()))
    loss = model(torch.ones(4, 3).to(ctx.device)).sum()
    handle.remove()
    facts: dict[str, Any] = {
        "dtypes_within": _dtypes(within),
        "dtypes_between": _dtypes(module.state_dict()),
        "between": _values(module.state_dict()),
    }
    ctx.backward(loss, 0)
    state = model.state_dict()
    facts |= {"keys": list(state), "dtypes": _dtypes(module.state_dict())}
    facts["values"] = _values(module.state_dict())
    model.load_state_dict({name: tensor.double() + 1 for name, tensor in state.items() if "count" not in name}, False)
    return {
        **facts,
        "loaded_dtypes": _dtypes(module.state_dict()),
        "loaded": module.get_parameter("layer.weight"),
        "same": all(mine is its for mine, its in zip(before, model.parameters(), strict=True)),
    }


_Aspect = Callable[[RankContext, nn.Module, Any, list[nn.Parameter]], Mapping[str, Any]]
ASPECTS: Mapping[str, _Aspect] = {"construct": _construct, "checkpoint": _checkpoint}


@program("mixed_precision_surface", invariants=("same_collectives", "leaves_no_trace"))
def mixed_precision_surface(ctx: RankContext) -> None:
    """Observe argument `aspect` of a module wrapped with option `mixed_precision`, its state above all.

    Argument `ignored` names parameters and buffers that the DDP must ignore. All ranks run it.
    """
    module: Any = _module().to(ctx.device)
    module._ddp_params_and_buffers_to_ignore = list(ctx.arguments.get("ignored", ()))
    before = list(module.parameters())
    model = ctx.wrap(module, mixed_precision=precision_of(ctx.scenario.options))
    for name, value in ASPECTS[ctx.arguments["aspect"]](ctx, module, model, before).items():
        ctx.observe(name, value)


@mixed_precision_surface.expects
def _surface(scenario: Scenario) -> Mapping[int, Facts]:
    precision = precision_of(scenario.options)
    module = _module()
    ignored = scenario.arguments.get("ignored", ())
    for name, buffer in module.named_buffers():
        if precision.buffer_dtype is not None and name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.data.to(precision.buffer_dtype)
    if scenario.arguments["aspect"] == "checkpoint":
        module.get_buffer("count").add_(1)
    state = module.state_dict()
    facts = {"same": True, "dtypes": _dtypes(state), "values": _values(state)}
    if scenario.arguments["aspect"] == "checkpoint":
        facts |= {"dtypes_within": facts["dtypes"], "dtypes_between": facts["dtypes"], "between": facts["values"]}
        facts["keys"] = [f"module.{name}" for name in state]
        facts["loaded_dtypes"] = _dtypes(state)
        facts["loaded"] = module.layer.weight.detach() + 1
    return dict.fromkeys(range(scenario.world_size), facts)


class _Nothing:
    """No configuration at all."""


@dataclass
class _Keeping(Precision):
    """An option that torch's source announces and no release has had."""

    keep_low_precision_grads: bool = True


_TEXT: Any = "float16"
_KEEPS = Raises(("TypeError", "ValueError"), ("keep_low_precision_grads",))
_OTHER_DTYPE = Raises(("RuntimeError",), ("dtype",))

#: Configurations that a constructor must refuse, and the exceptions that say so.
_REFUSED: Mapping[str, tuple[Callable[[int], Any], Raises]] = {
    "integer_param": (lambda _: Precision(torch.int32), Raises(("TypeError", "ValueError"), ("param_dtype",))),
    "integer_reduce": (
        lambda _: Precision(reduce_dtype=torch.int64), Raises(("TypeError", "ValueError"), ("reduce_dtype",)),
    ),
    "text": (lambda _: Precision(_TEXT), Raises(("TypeError", "ValueError"), ("param_dtype",))),
    "dtype_alone": (lambda _: torch.float16, Raises(("TypeError", "ValueError", "AttributeError"), ("param_dtype",))),
    "other_object": (lambda _: _Nothing(), Raises(("TypeError", "ValueError", "AttributeError"), ("param_dtype",))),
    "keeps_gradients": (lambda _: _Keeping(torch.float16), _KEEPS),
    "keeps_gradients_as_fsdp": (
        lambda _: fsdp.MixedPrecision(torch.float16, keep_low_precision_grads=True, cast_forward_inputs=True), _KEEPS,
    ),
    "reduce_differs": (
        lambda rank: Precision(reduce_dtype=torch.bfloat16 if rank else torch.float16), _OTHER_DTYPE,
    ),
    "param_differs": (lambda rank: Precision(torch.bfloat16 if rank else torch.float16), _OTHER_DTYPE),
    "only_one_rank": (lambda rank: Precision(torch.float16) if rank else None, _OTHER_DTYPE),
}  # fmt: skip


@program("mixed_precision_refusal", invariants=("leaves_no_trace",))
def mixed_precision_refusal(ctx: RankContext) -> None:
    """Wrap with the configuration that argument `case` names; observe the exception as `construct`."""
    configuration, answer = _REFUSED[ctx.arguments["case"]]
    with ctx.catching("construct", must=answer):
        ctx.wrap(_module().to(ctx.device), mixed_precision=configuration(ctx.rank))
