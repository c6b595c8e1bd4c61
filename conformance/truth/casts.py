"""Mixed precision by casts: a forward computes with casts of the parameters, which do not change.

The casts are part of the autograd graph, so parameters get gradients in their own dtype.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conformance.truth.tensors import stored


@dataclass
class LowPrecision:
    """The dtypes of casts, None for no cast (torch's `_MixedPrecision`; pytorch/pytorch#92882).

    `full_precision_modules` and their submodules compute in full precision: inputs are cast up, outputs down.
    """

    param_dtype: torch.dtype | None = None
    communication_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    casts_inputs: bool = True
    full_precision_modules: tuple[type[nn.Module], ...] = ()
    _casts: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _replaced: list[list[tuple[nn.Module, str, nn.Parameter]]] = field(default_factory=list)

    @staticmethod
    def of(config: Any) -> LowPrecision:
        """Read a user's `mixed_precision`: an object with torch's names, or None."""
        if config is None:
            return LowPrecision()
        return LowPrecision(
            config.param_dtype,
            config.reduce_dtype or config.param_dtype,
            config.buffer_dtype,
            getattr(config, "cast_forward_inputs", True),
            getattr(config, "full_precision_modules", ()),
        )

    def convert_buffers(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Convert the floating buffers of `module` for good."""
        for name, buffer in module.named_buffers():
            if self.buffer_dtype is not None and buffer.is_floating_point() and name not in ignored:
                buffer.data = buffer.data.to(self.buffer_dtype)

    def stay_in_backward(self, module: nn.Module) -> None:
        """Let parts that run again in backward, under activation checkpoints, use the casts of forward."""
        for part in module.modules() if self.param_dtype is not None else ():
            part.register_forward_pre_hook(self._put_casts)
            part.register_forward_hook(self._take_casts_away, always_call=True)
        if self.param_dtype is not None:
            self._cast_around(self._full(module), _in_backward)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_casts": {}}

    def _put_casts(self, module: nn.Module, _: Any) -> None:
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for part in module.modules() if _in_backward() else ():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None and (low := self._casts.get((id(part), name))) is not None:
                    replaced.append((part, name, parameter))
                    part._parameters[name] = low  # type: ignore[assignment]
        self._replaced.append(replaced)

    def _take_casts_away(self, *_: Any) -> None:
        for part, name, parameter in self._replaced.pop():
            part._parameters[name] = parameter

    def call(self, module: nn.Module, inputs: Any, kwargs: Any, ignored: Collection[str]) -> Any:
        """Return what `module` returns, computed in low precision."""
        if self.param_dtype is None:
            return module(*inputs, **kwargs)
        if self.casts_inputs:
            inputs, kwargs = cast(inputs, self.param_dtype), cast(kwargs, self.param_dtype)
        with self._low(module, ignored):
            return module(*inputs, **kwargs)

    @contextmanager
    def _low(self, module: nn.Module, ignored: Collection[str]) -> Iterator[None]:
        """Replace the parameters of all parts of `module` by casts, one cast for each parameter."""
        full = self._full(module)
        kept = {id(parameter) for part in full for parameter in part.parameters()}
        kept |= {id(parameter) for name, parameter in module.named_parameters() if name in ignored}
        casts: dict[int, Tensor] = {}
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None and parameter.is_floating_point() and id(parameter) not in kept:
                    replaced.append((part, name, parameter))
                    casts.setdefault(id(parameter), _Cast.apply(parameter, self.param_dtype))
        if torch.is_grad_enabled():  # without gradients, nothing runs again in backward
            self._casts = {(id(part), name): casts[id(parameter)] for part, name, parameter in replaced}
        handles = self._cast_around(full, lambda: True)
        for part, name, parameter in replaced:
            part._parameters[name] = casts[id(parameter)]  # type: ignore[assignment]
        try:
            yield
        finally:
            for part, name, parameter in replaced:
                part._parameters[name] = parameter
            for handle in handles:
                handle.remove()

    def _full(self, module: nn.Module) -> list[nn.Module]:
        """Return the outermost parts of `module` that compute in full precision."""
        full = [part for part in module.modules() if isinstance(part, self.full_precision_modules)]
        within = {inner for part in full for inner in part.modules() if inner is not part}
        return [part for part in full if part not in within]

    def _cast_around(self, full: Sequence[nn.Module], applies: Callable[[], bool]) -> list[Any]:
        """Cast the inputs of these modules up and their outputs down wherever it `applies`; return handles."""

        def cast_up(_: nn.Module, given: Any) -> Any:
            return cast(given, torch.float32) if applies() else None

        def cast_down(_: nn.Module, __: Any, output: Any) -> Any:
            return cast(output, self.param_dtype) if applies() else None

        ups = [part.register_forward_pre_hook(cast_up) for part in full]
        return ups + [part.register_forward_hook(cast_down) for part in full]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Cast(torch.autograd.Function):
    """`tensor.to(dtype)`, whose gradient may be sparse."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.own = tensor.dtype
        return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.own), None


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with every floating tensor in its containers converted; None leaves all as they are."""
    return map_tensors(lambda each: each.to(dtype) if dtype is not None and each.is_floating_point() else each, value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any, made: dict[int, Any] | None = None) -> Any:
    """Return `value` with every tensor in its tuples, lists, dictionaries and dataclasses replaced, at any depth.

    `made`: what came in the place of each container around `value`, which may hold itself.
    """
    made = {} if made is None else made
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(function, item, made) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if not (isinstance(value, list | dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type))):
        return value
    if id(value) in made:
        return made[id(value)]
    replaced: Any = made.setdefault(id(value), copy.copy(value))  # its constructor may take anything
    if isinstance(value, list):
        replaced[:] = [map_tensors(function, item, made) for item in value]
        return replaced
    for name, item in list((value if isinstance(value, dict) else stored(value)).items()):
        if isinstance(value, dict):
            replaced[name] = map_tensors(function, item, made)
        else:
            object.__setattr__(replaced, name, map_tensors(function, item, made))
    return replaced
