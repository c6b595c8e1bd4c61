"""Data-parallel training without DDP and without collectives: all ranks' replicas in one process.

For programs that plain ranks cannot run: compiled ones, and users of a device's streams. `plain_ddp` is for all others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.exact import exact_mean
from conformance.truth.means import sparse_like


def broadcasts_buffers(options: Mapping[str, Any]) -> bool:
    """Whether DDP `options` broadcast buffers before forward.

    `forward_sync_buffers` overrides the older `broadcast_buffers`; both default to True (torch 2.13 DDP documentation).
    """
    chosen = options.get("forward_sync_buffers")
    return bool(options.get("broadcast_buffers", True) if chosen is None else chosen)


class Replicas:
    """One module per rank. The caller runs every rank's forward and backward; this class does what DDP must do."""

    def __init__(
        self, modules: Sequence[nn.Module], *, ignored: frozenset[str] = frozenset(), broadcast_buffers: bool = True
    ) -> None:
        self.modules = list(modules)
        self._ignored = ignored
        self._broadcast_buffers = broadcast_buffers
        self._buffers_due = True
        self._used: set[str] = set()
        # As they are now: a program may rename them.
        self._named = [dict(module.named_parameters()) for module in self.modules]
        for named in self._named:
            for name, parameter in named.items():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_use(name))

    def before_forward(self) -> None:
        """Give every replica rank 0's buffers, if the forward before this one synchronised or this is the first."""
        if not (self._broadcast_buffers and self._buffers_due):
            return
        root = dict(self.modules[0].named_buffers())
        with torch.no_grad():
            for module in self.modules[1:]:
                for name, buffer in module.named_buffers():
                    if name not in self._ignored:
                        buffer.copy_(root[name])

    def after_forward(self, *, synchronised: bool) -> None:
        """Note whether the forward of all ranks was synchronised: not under `no_sync` or `torch.no_grad`."""
        self._buffers_due = synchronised

    def average_gradients(self) -> None:
        """Replace each gradient by its mean over ranks; a rank without one counts as zero.

        A parameter that no rank has used since the last mean keeps its gradient, or None. Raises `InexactError` where
        the mean is not exact.
        """
        for name in self._named[0]:
            if name in self._used and name not in self._ignored:
                average([parameters[name] for parameters in self._named])
        self._used.clear()

    def _note_use(self, name: str) -> Any:
        def note(parameter: Tensor) -> None:
            if parameter.requires_grad:  # else it was frozen since the forward: autograd calls this without a gradient
                self._used.add(name)

        return note


def average(parameters: Sequence[Tensor]) -> None:
    """Replace the gradients of one parameter, one tensor per rank, by their mean; no gradient counts as zero.

    Each keeps its layout, or gets the parameter's. Raises `InexactError` where the mean is not exact.
    """
    gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    mean = exact_mean(dense)
    present = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if present and all(gradient.is_sparse for gradient in present):
        mean = sparse_like(mean, present)
    for parameter, own in zip(parameters, dense, strict=True):
        parameter.grad = mean.clone() if mean.is_sparse else torch.empty_like(own).copy_(mean)
