"""Running a wrapped module on tensors that say of themselves that all ranks hold the same (pytorch/pytorch#75753)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddp_impl.api.distributed import DistributedDataParallel
from ddp_impl.module.parameter_swap import ParameterSwap
from ddp_impl.torch_internals.tensors import tree_map_only

#: How many blocks are open: torch's `implicit_replication` ends for all when the innermost is left.
_open_blocks = 0


@contextlib.contextmanager
def replicated_parameters(ddp: DistributedDataParallel) -> Iterator[None]:
    """Let forwards of the module that `ddp` wraps see its parameters as replicated tensors while the block runs.

    They are `DTensor`s with a `Replicate()` placement over the ranks of `ddp`, on the parameters' own storage. Only the
    forward of the module and of its parts sees them: `ddp.parameters()`, `state_dict()` and optimizers keep the
    parameters, whose gradients arrive and are averaged as ever, and outputs are plain tensors. Ignored parameters,
    which may differ between ranks, and those that are `DTensor`s already stay what they are.

    A forward and its backward both belong in the block: plain tensors that meet a `DTensor` count as replicated in it,
    and torch refuses to mix them elsewhere. So it does with operators that `DTensor` does not know, recurrent layers on
    CPU for one. Attention on a CPU is therefore computed by torch's kernel that consists of others. Nothing is
    communicated on entry, and blocks may be nested.
    """
    global _open_blocks
    view = ReplicatedView(ddp)
    handles = [
        handle
        for module in ddp.module.modules()
        for handle in (
            module.register_forward_pre_hook(view.enter, with_kwargs=True),
            module.register_forward_hook(view.leave, prepend=True, always_call=True),
        )
    ]
    _open_blocks += 1
    try:
        with implicit_replication() if _open_blocks == 1 else contextlib.nullcontext():
            yield
    finally:
        _open_blocks -= 1
        for handle in handles:
            handle.remove()


class ReplicatedView:
    """Swaps parameters for the outermost forward: of the module, or of a part that checkpointing computes again."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        mesh = getattr(ddp, "device_mesh", None)
        self._mesh = DeviceMesh.from_group(ddp.process_group, ddp.device_type) if mesh is None else mesh
        self._ignored = {
            id(parameter) for name, parameter in ddp.module.named_parameters() if name in ddp.parameters_to_ignore
        }
        self._running: list[nn.Module] = []
        self._swap = contextlib.ExitStack()

    def enter(self, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        """Before a forward: show replicated tensors unless a forward around this one does already."""
        self._running.append(module)
        if len(self._running) > 1:
            return None
        # Found anew for each forward: mixed precision has put casts in the place of parameters by now, and these are
        # the tensors to replicate.
        self._swap.enter_context(ParameterSwap(module).swapped(self._replicated_parameter))
        if self._mesh.device_type == "cpu":  # DTensor knows the fused kernels of accelerators, and not the CPU's
            self._swap.enter_context(sdpa_kernel(SDPBackend.MATH))
        return tree_map_only(Tensor, self._replicated_input, (inputs, kwargs))

    def leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        """After a forward, also one that raised: put parameters back, and hand out plain tensors."""
        if not self._running or self._running[-1] is not module:
            return None  # another hook raised before `enter` could run
        self._running.pop()
        if self._running:
            return None
        self._swap.close()
        return tree_map_only(DTensor, self._plain_output, output)

    def _replicated_parameter(self, parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor) or id(parameter) in self._ignored:
            return parameter
        return self.replicated(parameter)

    def _replicated_input(self, tensor: Tensor) -> Tensor:
        # Its gradient must come back as a plain one.
        return self.replicated(tensor) if tensor.requires_grad and not isinstance(tensor, DTensor) else tensor

    def replicated(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as a DTensor that every rank of the mesh has whole; they share memory."""
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)

    def _plain_output(self, tensor: DTensor) -> Tensor:
        return tensor.to_local() if tensor.device_mesh == self._mesh else tensor
