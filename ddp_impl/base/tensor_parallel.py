"""Parameters that are DTensors: what DDP averages of them is this rank's local shard.

A module parallelised over one dimension of a mesh keeps its parameters, in name, type and placement, when it is
wrapped over another dimension: ranks that hold the same shard average it, each in its own place. torch's own way
replaces parameters by plain tensors around each forward, and they are gone from `parameters()` meanwhile
(pytorch/pytorch#106583, #120479).
"""

from __future__ import annotations

import torch
from torch import Tensor

_DTENSOR: type | None = None
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_distributed(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; costs nothing where none is in use."""
    global _DTENSOR
    if _DTENSOR is None:
        if type(tensor) in _PLAIN or not torch.distributed.is_available():
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
    """Return the gradient's local tensor, in the parameter's placement.

    Autograd may leave a gradient in another one: that of a normalisation whose inputs are split over the sequence is a
    partial sum. It is brought into the parameter's placement, as the optimizer would have to do it in every operation.
    Averages could be of partial sums as well, but a rank that did not use the parameter would not know that they are,
    and would take them for the whole. It is a collective of the tensor-parallel group, if it is one at all, and
    placements are equal on all its ranks: they come to it alike.
    """
    gradient = parameter.grad
    if gradient is None or not is_distributed(parameter):
        return gradient
    if gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        gradient = gradient.detach().redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        parameter.grad = gradient
    return local_tensor(gradient)


def set_local_gradient(parameter: Tensor, local: Tensor) -> None:
    """Give `parameter` a gradient whose local shard is `local`."""
    parameter.grad = with_shard(parameter, local) if is_distributed(parameter) else local


def with_shard(like: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor that is laid out as the DTensor `like` and whose local shard is `local`. Nothing is checked."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def describe_placement(tensor: Tensor) -> str:
    """Return how a DTensor is laid out over its mesh, and which shard this rank holds; empty for any other tensor.

    Ranks that average it must hold the same shard: text that differs between them shows that they do not, because the
    group is the wrong dimension of a mesh or ranks spread the module differently.
    """
    if not is_distributed(tensor):
        return ""
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    text = f"{list(placements)} of {list(tensor.shape)} over {'x'.join(map(str, mesh.shape))} ranks"
    if all(placement.is_replicate() for placement in placements):
        return text
    return f"{text}, this rank in place {mesh.get_coordinate()} of them"
