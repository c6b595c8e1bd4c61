"""Half precision and optimizers in backward.

Gradients are then a few small numbers, whose sums are exact in half precision; or, in a training that must overflow,
numbers too large for float16.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.utils.weak import WeakIdKeyDictionary

from conformance.composed.modules import SMALL_UNIT, step_by_whole_numbers
from conformance.composed.training import Training
from conformance.models.low_precision import precision_option

#: More than float16's largest number, 65504.
_TOO_LARGE = 2.0**17
_MIXED: dict[str, dict[str, str]] = {
    "bf16": {"param_dtype": "bfloat16"},
    "fp16": {"param_dtype": "float16"},
    "reduce_bf16": {"reduce_dtype": "bfloat16"},
}
_HOOKS: dict[str, Callable[..., Any]] = {
    "fp16_hook": default_hooks.fp16_compress_hook,
    "bf16_hook": default_hooks.bf16_compress_hook,
    "overflow": default_hooks.fp16_compress_hook,
}


class WholeNumbers(torch.optim.Optimizer):
    """Steps as the loop of a composed training does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient."""
        step_by_whole_numbers(parameter for group in self.param_groups for parameter in group["params"])


def options_of(training: Training) -> Mapping[str, Any]:
    """Return the DDP's options for the training's precision."""
    mixed = _MIXED.get(training.precision)
    return precision_option({"mixed_precision": mixed} if mixed else {})


def before_wrapping(training: Training, module: nn.Module) -> None:
    """Apply optimizers to the backward of `module`, if the training has them there."""
    if training.optimizer == "in_backward":
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        _apply_optimizer_in_backward(WholeNumbers, trained, {})


def after_wrapping(training: Training, model: Any) -> None:
    """Register the comm hook that compresses buckets. All ranks must call it."""
    if (hook := _HOOKS.get(training.precision)) is not None:
        model.register_comm_hook(None, hook)
    elif training.precision == "fp16_builtin":
        model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)


class SmallGradients:
    """Makes each gradient of the current parameters small, or far too large."""

    def __init__(self, precision: str) -> None:
        self._unit = 0.0 if not precision else _TOO_LARGE if precision == "overflow" else SMALL_UNIT
        self._hooked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a set: torch has no weak set by identity

    def of(self, module: nn.Module) -> None:
        """Register hooks on the current parameters of `module`."""
        for parameter in module.parameters() if self._unit else ():
            if parameter.requires_grad and parameter not in self._hooked:
                parameter.register_hook(partial(_signs, self._unit))
                self._hooked[parameter] = None


def _signs(unit: float, gradient: Tensor) -> Tensor:
    if gradient.is_complex():
        return torch.view_as_complex(torch.view_as_real(gradient.resolve_conj()).sign() * unit)
    return gradient.sign() * unit
