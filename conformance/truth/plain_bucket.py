"""The argument of a comm hook: the surface of `torch.distributed.GradBucket` over the gradient of one parameter."""

from typing import Any

import torch
from torch import Tensor


class PlainBucket:
    """A copy of one parameter's gradient as a bucket: flat unless it is sparse, and not divided."""

    def __init__(self, index: int, parameter: Tensor, gradient: Tensor, *, is_last: bool) -> None:
        self._index = index
        self._parameter = parameter
        self._is_last = is_last
        own = gradient.detach()
        self._buffer = own.clone() if own.is_sparse else own.clone(memory_format=torch.contiguous_format).view(-1)

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return [self._buffer if self._buffer.is_sparse else self._buffer.view_as(self._parameter)]

    def parameters(self) -> list[Tensor]:
        return [self._parameter]

    def is_last(self) -> bool:
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        self._buffer = tensor

    def reduced(self, result: Any) -> Tensor:
        """Return what a hook's future holds in the parameter's shape and dtype unless it is sparse."""
        tensor: Tensor = result[0] if isinstance(result, (list, tuple)) else result
        if self._parameter.is_complex() and not tensor.is_complex():  # torch's collectives return real views
            tensor = torch.view_as_complex(tensor.view(-1, 2))
        return tensor if tensor.is_sparse else tensor.view_as(self._parameter).to(self._parameter.dtype)
