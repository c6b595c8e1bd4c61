"""Mutants of chapter composed: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel


class DrawsRandomNumbers(DistributedDataParallel):
    """BUG: the constructor draws from torch's random generator, so that dropout differs from training without DDP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.rand(1)


class LeavesADefaultDtype(DistributedDataParallel):
    """BUG: a forward under no_grad leaves another default dtype behind."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        output = super().forward(*inputs, **kwargs)
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            torch.set_default_dtype(torch.float64)
        return output


class TurnsPartsToEvaluation(DistributedDataParallel):
    """BUG: the constructor switches the module's parts to evaluation mode."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        for part in list(self.module.children()):
            part.eval()


class LeavesAHook(DistributedDataParallel):
    """BUG: the constructor leaves a forward hook on the user's module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module.register_forward_hook(lambda module, args, output: None)


class ChangesInputs(DistributedDataParallel):
    """BUG: forward asks for gradients of its floating-point inputs."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and torch.is_grad_enabled():
                tensor.requires_grad_(True)
        return super().forward(*inputs, **kwargs)
