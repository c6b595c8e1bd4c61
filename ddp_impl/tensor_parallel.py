"""Parameters that are DTensors: what DDP averages of them is this rank's local shard.

A module parallelised over one dimension of a mesh keeps its parameters, in name, type and placement, when it is
wrapped over another dimension: ranks that hold the same shard average it. Averaging over data parallelism commutes with
whatever a placement means (a partial sum stays a partial sum), so gradients are reduced in the placement in which
autograd left them. torch's own way replaces parameters by plain tensors around each forward, and they are gone from
`parameters()` meanwhile (pytorch/pytorch#106583, #120479).
"""

from __future__ import annotations

import torch
from torch import Tensor

_DTENSOR: type | None = None


def is_distributed(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; costs nothing where none is in use."""
    global _DTENSOR
    if _DTENSOR is None:
        if type(tensor) in (Tensor, torch.nn.Parameter) or not torch.distributed.is_available():
            return False
        from torch.distributed.tensor import DTensor

        _DTENSOR = DTensor
    return isinstance(tensor, _DTENSOR)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, detached and sharing its storage; any other tensor detached."""
    if not is_distributed(tensor):
        return tensor.detach()
    return tensor.detach().to_local()  # type: ignore[attr-defined, no-any-return]


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient's local tensor, in the parameter's local shape.

    Where autograd left the gradient in a placement of another local shape, it is first brought into the parameter's.
    That is a collective of the tensor-parallel group, which all its ranks come to alike.
    """
    gradient = parameter.grad
    if gradient is None or not is_distributed(parameter):
        return gradient
    local = local_tensor(gradient)
    if local.shape != local_tensor(parameter).shape:
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        parameter.grad = gradient
        local = local_tensor(gradient)
    return local


def set_local_gradient(parameter: Tensor, local: Tensor) -> None:
    """Give `parameter` a gradient whose local shard is `local`."""
    if not is_distributed(parameter):
        parameter.grad = local
        return
    from torch.distributed.tensor import DTensor

    parameter.grad = DTensor.from_local(
        local,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def describe_placement(tensor: Tensor) -> str:
    """Return how a DTensor is laid out over its mesh; empty for any other tensor."""
    if not is_distributed(tensor):
        return ""
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return f"{list(tensor.placements)} over {mesh.size()} ranks"  # type: ignore[attr-defined]
