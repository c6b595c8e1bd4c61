"""Computing and reducing in a lower precision than the one parameters are kept in (pytorch/pytorch#92882).

Parameters stay in full precision at all times. While the wrapped module runs, it sees casts of them; the casts are part
of the autograd graph, so gradients arrive at the parameters in full precision through the ordinary hooks. Hence every
other feature (unused parameters, join, comm hooks, optimizers in backward) works unchanged, on any device. Gradients
travel in `reduce_dtype`: buckets are allocated in it, and copying in and out casts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_impl.nested_tensors import cast
from ddp_impl.parameter_swap import ParameterSwap
from ddp_impl.torch_internals import in_backward


@dataclass(frozen=True)
class MixedPrecision:
    """What is cast to what; None leaves it as it is.

    `param_dtype`: parameters and inputs during forward and backward. `reduce_dtype`: gradients in collectives;
    `param_dtype` if None. `buffer_dtype`: floating-point buffers, for good, at construction. `cast_forward_inputs`:
    whether inputs of the wrapper are cast to `param_dtype`. Modules of `full_precision_modules` (say
    `nn.BatchNorm2d`) compute in full precision: their inputs are cast up and their outputs down again. So do embeddings
    with sparse gradients. Complex gradients are never reduced in another dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    full_precision_modules: tuple[type[nn.Module], ...] = ()

    @staticmethod
    def of(config: Any) -> MixedPrecision:
        """Read our own or torch's `_MixedPrecision`; raises `TypeError` for anything else and for integer dtypes."""
        if isinstance(config, MixedPrecision):
            checked = config
        else:
            try:
                checked = MixedPrecision(
                    config.param_dtype,
                    config.reduce_dtype,
                    config.buffer_dtype,
                    getattr(config, "cast_forward_inputs", True),
                    tuple(getattr(config, "full_precision_modules", ())),
                )
            except AttributeError:
                raise TypeError(
                    "mixed_precision must have param_dtype, reduce_dtype and buffer_dtype (ddp_impl.MixedPrecision or "
                    f"torch's _MixedPrecision); got {type(config).__name__}"
                ) from None
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(checked, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"mixed_precision.{name} must be a floating-point torch.dtype or None; got {dtype!r}")
        return checked

    @property
    def communication_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced; None for that of the parameter."""
        return self.reduce_dtype or self.param_dtype


class PrecisionCaster:
    """Applies a `MixedPrecision` to one module."""

    def __init__(self, module: nn.Module, config: MixedPrecision, ignored: Collection[str]) -> None:
        """Cast buffers for good and prepare the casts of parameters; `ignored` names stay untouched."""
        self.config = config
        self._swap = ParameterSwap(module, ignored, self._stays_full)
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)
        if config.param_dtype is not None:
            self._cast_while_recomputing()
            self._keep_full_precision(module)

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """Let the module compute in `param_dtype` while the block runs."""
        if self.config.param_dtype is None:
            yield
            return
        with self._swap.swapped(self._cast):
            yield

    def cast_inputs(self, value: Any) -> Any:
        """Cast every floating-point tensor in nested containers to `param_dtype`, if inputs are to be cast."""
        if self.config.param_dtype is None or not self.config.cast_forward_inputs:
            return value
        return cast(value, self.config.param_dtype)

    def _cast(self, parameter: Tensor) -> Tensor:
        return parameter.to(self.config.param_dtype) if parameter.is_floating_point() else parameter

    def _cast_while_recomputing(self) -> None:
        # Checkpointing runs modules again during backward, when the wrapper's forward is long over.
        def before(owner: nn.Module, _: Any) -> None:
            if not self._swap.active and in_backward():
                self._swap.show(owner, self._cast)

        def after(owner: nn.Module, _: Any, __: Any) -> None:
            if not self._swap.active and in_backward():
                self._swap.hide(owner)

        for owner in self._swap.owners:
            owner.register_forward_pre_hook(before)
            owner.register_forward_hook(after, always_call=True)

    def _keep_full_precision(self, module: nn.Module) -> None:
        def up(_: nn.Module, inputs: Any) -> Any:
            return cast(inputs, torch.float32) if self._casts_now() else None

        def down(_: nn.Module, __: Any, output: Any) -> Any:
            return cast(output, self.config.param_dtype) if self._casts_now() else None

        for owner in module.modules():
            if self._stays_full(owner):
                owner.register_forward_pre_hook(up)
                owner.register_forward_hook(down)

    def _stays_full(self, owner: nn.Module) -> bool:
        # The backward of a cast cannot carry a sparse gradient; such a table gives its rows in lower precision instead.
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        return sparse or isinstance(owner, self.config.full_precision_modules)

    def _casts_now(self) -> bool:
        return self._swap.active or in_backward()
