"""Mutants of chapter buffers: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_impl import DistributedDataParallel, collectives
from ddp_impl.buffers import broadcast_state


class StaleBuffers(TorchDDP):
    """BUG: buffers are synchronised at construction and never again, so that they drift apart."""

    def _sync_buffers(self) -> None:
        pass


class TellsAutograd(TorchDDP):
    """BUG: synchronising buffers counts as changing them, which invalidates graphs that saved them."""

    def _sync_buffers(self) -> None:
        super()._sync_buffers()
        with torch.no_grad():
            for buffer in self.modules_buffers:
                buffer.copy_(buffer.clone())


class FloatingBuffersOnly(TorchDDP):
    """BUG: only floating-point buffers are synchronised."""

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()
        self.modules_buffers = [buffer for buffer in self.modules_buffers if buffer.is_floating_point()]


class KeepsFirstBuffers(TorchDDP):
    """BUG: the buffers that were there at construction are synchronised, not those that took their places."""

    def _assign_modules_buffers(self) -> None:
        if not hasattr(self, "modules_buffers"):
            super()._assign_modules_buffers()


class BuffersOfLastRank(DistributedDataParallel):
    """BUG: buffers come from the last rank."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        broadcast_state(self.modules_buffers, self.process_group, self.device, self.process_group.size() - 1)


class MeanOfBuffers(DistributedDataParallel):
    """BUG: floating-point buffers are averaged before forward, so that those of rank 0 change too."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        super()._sync_buffers(authoritative)
        for buffer in self.modules_buffers:
            if buffer.is_floating_point():
                buffer.data.add_(self.process_group.rank())
                collectives.all_reduce_now(buffer.data, self.process_group)
                buffer.data.div_(self.process_group.size())


class PersistentBuffersOnly(DistributedDataParallel):
    """BUG: buffers that the state dict leaves out are not synchronised."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers of the state dict."""
        kept = self.module.state_dict()
        return {name: buffer for name, buffer in super().named_module_buffers.items() if name in kept}


class WideIntegersOnly(DistributedDataParallel):
    """BUG: of integer buffers only those of 64 bits are synchronised before forward."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Buffers that are not integers, and wide integers."""
        narrow = (torch.int8, torch.int16, torch.int32)
        return {name: buffer for name, buffer in super().named_module_buffers.items() if buffer.dtype not in narrow}


class LosesImaginaryParts(DistributedDataParallel):
    """BUG: of a complex buffer only the real part is copied."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        kept = {buffer: buffer.imag.clone() for buffer in self.modules_buffers if buffer.is_complex()}
        super()._sync_buffers(authoritative)
        for buffer, imaginary in kept.items():
            buffer.data.imag.copy_(imaginary)


class SkipsUncarriedBuffers(DistributedDataParallel):
    """BUG: buffers of a dtype that gloo does not carry stay each rank's own, and nobody is told."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Buffers of dtypes that all backends know."""
        known = (torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool)
        buffers = super().named_module_buffers.items()
        return {
            name: buffer
            for name, buffer in buffers
            if buffer.dtype in known or (buffer.dtype.is_complex or buffer.dtype.is_floating_point)
        }


class SyncsBuffersThoughTold(DistributedDataParallel):
    """BUG: `forward_sync_buffers=False` and `broadcast_buffers=False` are ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forward_sync_buffers = True


class InitSyncsAllBuffers(DistributedDataParallel):
    """BUG: `broadcast_buffers=False` does not keep buffers out of the synchronisation at construction."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        super()._synchronise_state(True, group_src)


class DeprecatesInSilence(DistributedDataParallel):
    """BUG: deprecated arguments do not warn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(*args, **kwargs)


class SyncsIgnoredBuffers(DistributedDataParallel):
    """BUG: ignored buffers are synchronised."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """All buffers."""
        return dict(self.module.named_buffers())


class SyncsNoBuffers(DistributedDataParallel):
    """BUG: a collective precedes every synchronised forward, also where there is no buffer."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            collectives.broadcast_from(torch.zeros(1), self.process_group, 0)
        return super()._pre_forward(*inputs, **kwargs)


class SyncsBuffersWithGradients(DistributedDataParallel):
    """BUG: buffers are copied in exactly the synchronised forwards: also after one under `no_sync`, never inside."""

    def will_sync_module_buffers(self) -> bool:
        """Ask whether this forward synchronises, instead of the one before."""
        return self._synchronises and self.forward_sync_buffers and self._has_buffers


class SyncsBuffersInTrainingOnly(DistributedDataParallel):
    """BUG: in eval mode buffers are each rank's own."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        if self.training:
            super()._sync_buffers(authoritative)
