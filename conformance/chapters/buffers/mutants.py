"""Mutants of chapter buffers: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api import copied_state
from ddp_impl.api.copied_state import broadcast_state
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.wire import collectives
from ddp_impl.wire.peers import Peers


@replaces(TorchDDP, "_sync_buffers")
def StaleBuffers(ddp: TorchDDP, sync_buffers: Call) -> None:
    """BUG: buffers are synchronised at construction and never again, so that they drift apart."""


@replaces(TorchDDP, "_sync_buffers")
def TellsAutograd(ddp: TorchDDP, sync_buffers: Call) -> None:
    """BUG: synchronising buffers counts as changing them, which invalidates graphs that saved them."""
    sync_buffers()
    with torch.no_grad():
        for buffer in ddp.modules_buffers:
            buffer.copy_(buffer.clone())


@replaces(TorchDDP, "_assign_modules_buffers")
def FloatingBuffersOnly(ddp: TorchDDP, assign_modules_buffers: Call) -> None:
    """BUG: only floating-point buffers are synchronised."""
    assign_modules_buffers()
    ddp.modules_buffers = [buffer for buffer in ddp.modules_buffers if buffer.is_floating_point()]


@replaces(TorchDDP, "_assign_modules_buffers")
def KeepsFirstBuffers(ddp: TorchDDP, assign_modules_buffers: Call) -> None:
    """BUG: the buffers that were there at construction are synchronised, not those that took their places."""
    if not hasattr(ddp, "modules_buffers"):
        assign_modules_buffers()


@replaces(TorchDDP, "_sync_buffers")
def SendsOneBufferAsItLies(ddp: TorchDDP, sync_buffers: Call) -> None:
    """BUG: one buffer alone is sent without a copy, as much of its memory as it has elements, gaps included."""
    if len(ddp.modules_buffers) == 1:
        (buffer,) = ddp.modules_buffers
        dist.broadcast(buffer.data.as_strided((buffer.numel(),), (1,)), group_src=0, group=ddp.process_group)
    else:
        sync_buffers()


@replaces(Ours, "_sync_buffers")
def BuffersOfLastRank(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: buffers are copied from the last rank."""
    broadcast_state(ddp.modules_buffers, ddp.process_group, ddp.device, ddp.process_group.size() - 1)


@replaces(Ours, "_sync_buffers")
def MeanOfBuffers(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: floating-point buffers are averaged before forward, so that those of rank 0 change too."""
    sync_buffers(authoritative)
    for buffer in ddp.modules_buffers:
        if buffer.is_floating_point():
            buffer.data.add_(ddp.process_group.rank())
            collectives.all_reduce_now(buffer.data, ddp.process_group)
            buffer.data.div_(ddp.process_group.size())


@replaces(Ours, "named_module_buffers")
def PersistentBuffersOnly(ddp: Ours, named_module_buffers: Call) -> dict[str, Tensor]:
    """BUG: buffers that the state dict leaves out are not synchronised."""
    kept = ddp.module.state_dict()
    return {name: buffer for name, buffer in named_module_buffers().items() if name in kept}


@replaces(Ours, "named_module_buffers")
def WideIntegersOnly(ddp: Ours, named_module_buffers: Call) -> dict[str, Tensor]:
    """BUG: of integer buffers only those of 64 bits are synchronised before forward."""
    narrow = (torch.int8, torch.int16, torch.int32)
    return {name: buffer for name, buffer in named_module_buffers().items() if buffer.dtype not in narrow}


@replaces(Ours, "_sync_buffers")
def LosesImaginaryParts(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: of a complex buffer only the real part is copied."""
    kept = {buffer: buffer.imag.clone() for buffer in ddp.modules_buffers if buffer.is_complex()}
    sync_buffers(authoritative)
    for buffer, imaginary in kept.items():
        buffer.data.imag.copy_(imaginary)


@replaces(Ours, "named_module_buffers")
def SkipsUncarriedBuffers(ddp: Ours, named_module_buffers: Call) -> dict[str, Tensor]:
    """BUG: buffers of a dtype that gloo does not carry stay each rank's own, without an error."""
    known = (torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool)
    buffers = named_module_buffers().items()
    return {
        name: buffer
        for name, buffer in buffers
        if buffer.dtype in known or (buffer.dtype.is_complex or buffer.dtype.is_floating_point)
    }


@replaces(Ours, "__init__")
def SyncsBuffersThoughTold(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: `forward_sync_buffers=False` and `broadcast_buffers=False` are ignored."""
    init(*args, **kwargs)
    ddp.forward_sync_buffers = True


@replaces(Ours, "synchronise_state")
def InitSyncsAllBuffers(ddp: Ours, synchronise_state: Call, with_buffers: bool, group_src: int = 0) -> None:
    """BUG: `broadcast_buffers=False` does not keep buffers out of the synchronisation at construction."""
    synchronise_state(True, group_src)


@replaces(Ours, "__init__")
def DeprecatesInSilence(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: deprecated arguments do not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        init(*args, **kwargs)


@replaces(Ours, "named_module_buffers")
def SyncsIgnoredBuffers(ddp: Ours, named_module_buffers: Call) -> dict[str, Tensor]:
    """BUG: ignored buffers are synchronised."""
    return dict(ddp.module.named_buffers())


@replaces(Ours, "_pre_forward")
def SyncsNoBuffers(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a collective precedes every synchronised forward, also where there is no buffer."""
    if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        collectives.broadcast_coalesced([torch.zeros(1)], ddp.process_group, 0)
    return pre_forward(*inputs, **kwargs)


@replaces(Ours, "will_sync_module_buffers")
def SyncsBuffersWithGradients(ddp: Ours, will_sync_module_buffers: Call) -> bool:
    """BUG: buffers are copied in exactly the synchronised forwards: also after one under `no_sync`, never inside."""
    return ddp._synchronises and ddp.forward_sync_buffers and ddp._has_buffers


@replaces(Ours, "_sync_buffers")
def SyncsBuffersInTrainingOnly(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: in eval mode buffers are each rank's own."""
    if ddp.training:
        sync_buffers(authoritative)


@replaces(ParameterWatch, "check")
def CountsBuffersOnce(watch: ParameterWatch, check: Call, /, **kwargs: Any) -> bool:
    """BUG: a module without buffers at construction is taken for one that never has any."""
    check(**kwargs)
    return False


@replaces(Ours, "_sync_buffers")
def CopiesListsByKernels(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: where no kernel copies lists of a dtype, every rank but the one that sends raises."""
    with mock.patch.object(collectives, "foreach_copy_", _by_kernels):
        sync_buffers(authoritative)


@replaces(Ours, "_sync_buffers")
def ComparesNoChangedBuffers(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: ranks copy buffers that have changed without having compared them."""
    with mock.patch.object(copied_state, "verify_buffers"):
        sync_buffers(authoritative)


@replaces(Ours, "_sync_buffers")
def ComparesNoBuffersAtFirst(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: without `init_sync` ranks agree on no name for their run, and copy buffers without a comparison."""
    with mock.patch.object(copied_state, "agree_on_run", return_value=""):
        sync_buffers(authoritative)


@replaces(Peers, "answer")
def AnswersNobodyWhoCompares(peers: Peers, answer: Call, *_: Any) -> None:
    """BUG: a rank whose buffers have changed alone waits for the others until the group's timeout."""


def _by_kernels(targets: list[Tensor], sources: list[Tensor]) -> None:
    if any(target.dtype not in _WITH_KERNELS for target in targets):
        raise RuntimeError('"foreach_tensor_copy" not implemented for this dtype')
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


_WITH_KERNELS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
