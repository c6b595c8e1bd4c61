"""`Scaled`: a layer whose backward needs the value that a buffer had in forward."""

import torch
from torch import Tensor, nn

from conformance.models.integers import integers


class Scaled(nn.Module):
    """A layer whose output a buffer scales, which is of integers up to `largest` that tell the rank."""

    scale: Tensor

    def __init__(self, rank: int, *, largest: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", integers(2, key=("scale", rank), largest=largest, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        return output * self.scale
