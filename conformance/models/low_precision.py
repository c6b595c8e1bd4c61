"""Mixed precision as part of a scenario, and its meaning: the same module, kept in the low precision.

The truth about a forward in mixed precision is a copy of the module whose parameters were converted, run on converted
inputs. Its gradients are the local gradients; they are rounded so coarsely (`coarsen`) that means over ranks are exact
in every floating dtype, and collected in the dtype of the module that is trained.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from conformance.errors import ScenarioError
from conformance.models.catalogue import ModelFixture
from conformance.own_mistake import present
from conformance.scenario import Scenario

#: The step between coarse gradients and how many steps the largest has: 4 ranks * 2 backwards * 10 * 3 <= 2**8.
_QUANTUM = 3 * 2.0**-9
_LIMIT = 10


@dataclass
class Precision(_MixedPrecision):
    """torch's configuration, and two wishes that torch left open.

    Attributes:
        cast_forward_inputs: whether inputs of the wrapper are cast to `param_dtype`.
        full_precision_modules: types of modules that compute in full precision all the same.

    """

    cast_forward_inputs: bool = True
    full_precision_modules: tuple[type[nn.Module], ...] = field(default=())

    @property
    def communication_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients travel; None for their own."""
        return self.reduce_dtype or self.param_dtype


def precision_of(options: Mapping[str, Any]) -> Precision:
    """Read option `mixed_precision` of a scenario: names of dtypes, and of classes of `torch.nn`.

    Raises `ScenarioError` for names that torch does not know.
    """
    written = dict(options["mixed_precision"])
    layers = tuple(getattr(nn, name) for name in written.pop("full_precision_modules", ()))
    casts_inputs = bool(written.pop("cast_forward_inputs", True))
    if unknown := sorted(set(written) - {"param_dtype", "reduce_dtype", "buffer_dtype"}):
        raise ScenarioError(f"mixed_precision has no {', '.join(unknown)}")
    dtypes = {name: None if text is None else getattr(torch, text) for name, text in written.items()}
    return Precision(**dtypes, cast_forward_inputs=casts_inputs, full_precision_modules=layers)


def coarsen(gradient: Tensor | None) -> Tensor | None:
    """Return a dense `gradient` rounded to one of 21 values that every floating dtype can sum. A parameter hook."""
    if gradient is None:
        return None
    counts = gradient.float().div(_QUANTUM).round_().clamp_(-_LIMIT, _LIMIT)
    return counts.mul_(_QUANTUM).add_(0.0).to(gradient.dtype)


def build_coarse(fixture: ModelFixture, scenario: Scenario, device: torch.device | str = "cpu") -> nn.Module:
    """Return the fixture's model on `device`, equal on every rank, with coarse gradients."""
    module = dataclasses.replace(fixture, exact=False).build(scenario, device)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(coarsen)
    return module


class LowPrecisionCopy(nn.Module):
    """A copy of `module` for one forward and backward, converted to `precision`; it shares the module's buffers.

    `ignored` names keep their precision. After backward, `hand_back` adds the gradients to those of `module`.
    """

    def __init__(self, module: nn.Module, precision: Precision, ignored: Collection[str] = ()) -> None:
        super().__init__()
        self.original = module
        self.precision = precision
        self.low = copy.deepcopy(module)
        for part, original in zip(self.low.modules(), module.modules(), strict=True):
            part._buffers.update(original._buffers)
        for name, parameter in self.low.named_parameters():
            if name not in ignored and parameter.is_floating_point() and not self._is_kept(parameter):
                parameter.data = _cast(parameter.data, precision.param_dtype)
        self.low.zero_grad(set_to_none=True)
        for part in self.low.modules():
            if precision.param_dtype is not None and isinstance(part, precision.full_precision_modules):
                part.register_forward_pre_hook(lambda _, inputs: _cast(inputs, torch.float32))
                part.register_forward_hook(lambda _, __, output: _cast(output, precision.param_dtype))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the copy on converted inputs."""
        if self.precision.cast_forward_inputs:
            inputs, kwargs = _cast(inputs, self.precision.param_dtype), _cast(kwargs, self.precision.param_dtype)
        return self.low(*inputs, **kwargs)

    def hand_back(self, *, coarse: bool) -> None:
        """Accumulate the gradients into the original's, in its dtype; with `coarse` rounded like those of the ranks."""
        masters = dict(self.original.named_parameters())
        for name, parameter in self.low.named_parameters():
            if parameter.grad is None:
                continue
            master = masters[name]
            gradient = parameter.grad.to(master.dtype)
            if coarse:
                rounded = present(coarsen(gradient))
                gradient = rounded
            master.grad = gradient if master.grad is None else master.grad + gradient

    def _is_kept(self, parameter: Tensor) -> bool:
        kept = [part for part in self.low.modules() if isinstance(part, self.precision.full_precision_modules)]
        return any(parameter is each for part in kept for each in part.parameters(recurse=False))


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with every floating tensor in its tuples, lists and dictionaries converted."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
