"""What a comm hook is given: the surface of `torch.distributed.GradBucket` over the gradient of one parameter."""

from __future__ import annotations

import torch
from torch import Tensor


class PlainBucket:
    """One parameter's gradient as a bucket; flat, or as it is where it is sparse."""

    def __init__(self, index: int, parameter: Tensor, gradient: Tensor, *, is_last: bool) -> None:
        """Take a copy of `gradient`."""
        self._index = index
        self._parameter = parameter
        self._is_last = is_last
        own = gradient.detach()
        self._buffer = own.clone() if own.is_sparse else own.clone(memory_format=torch.contiguous_format).view(-1)

    def index(self) -> int:
        """Return the bucket's number."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the gradient as a vector, not divided by the number of ranks."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradient in the parameter's shape, as a view of the buffer."""
        return [self._buffer if self._buffer.is_sparse else self._buffer.view_as(self._parameter)]

    def parameters(self) -> list[Tensor]:
        """Return the parameter."""
        return [self._parameter]

    def is_last(self) -> bool:
        """Whether it is the last one."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Let `tensor` stand for the buffer from now on."""
        self._buffer = tensor
