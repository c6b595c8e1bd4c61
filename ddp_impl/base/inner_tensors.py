"""The memory behind tensors of classes of their own: what ranks copy of them, and compare before they do.

An operation on a tensor that is made of several is one on each of them. A broadcast of it would be as many collectives,
of which whoever waits for its work waits for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor

from ddp_impl.base.tensor_parallel import is_distributed, local_tensor
from ddp_impl.torch_internals.tensors import has_operators, plain_alias

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_LAYOUT = attrgetter("layout")
_REMEDY = (
    "name it, before wrapping, in DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names), "
    "which keeps such names in module._ddp_params_and_buffers_to_ignore"
)


def memory(kind: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the plain dense tensors that hold the values of these, in their order, sharing their storage.

    Of a DTensor they are those of the local shard; of a class with `__tensor_flatten__` those of all that it is made
    of. Raises `RuntimeError` with kind ("buffer") and name of one whose values cannot be copied: they have no memory
    that is known, or no place of their own, as a sparse tensor's.
    """
    given = list(tensors.values())
    if _PLAIN.issuperset(map(type, given)) and {torch.strided}.issuperset(map(_LAYOUT, given)):  # in C, as mostly
        return given
    return [part for name, tensor in tensors.items() for part in _parts(f"{kind} '{name}'", tensor)]


def described(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return in words how the memory of each tensor has to be on every rank; raises as `memory` does."""
    return {name: _described(f"{kind} '{name}'", tensor) for name, tensor in tensors.items()}


def _described(name: str, tensor: Tensor) -> str:
    parts = _parts(name, tensor)
    texts = [f"{list(part.shape)} {part.dtype} on {part.device.type}" for part in parts]
    return texts[0] if len(parts) == 1 and parts[0] is tensor else f"{type(tensor).__name__} of {', '.join(texts)}"


def refuse_composite(name: str, parameter: Tensor) -> None:
    """Raise `RuntimeError` for a parameter that is made of other tensors: a bucket has one place for its gradient."""
    local = local_tensor(parameter) if is_distributed(parameter) else parameter
    if has_operators(local) and plain_alias(local) is None:
        raise RuntimeError(
            f"parameter '{name}' is a {type(local).__name__}, a tensor that is made of others, and requires a gradient "
            f"of which DistributedDataParallel could average one part only. Freeze it (requires_grad_(False)), or "
            f"{_REMEDY}"
        )


def _parts(name: str, tensor: Tensor) -> list[Tensor]:
    if is_distributed(tensor):
        return _parts(name, local_tensor(tensor))
    if type(tensor) not in _PLAIN and tensor.layout is torch.strided:
        is_composite, flatten = has_operators(tensor), getattr(tensor, "__tensor_flatten__", None)
        if is_composite and flatten is not None:
            return [part for inner in flatten()[0] for part in _parts(f"{name}.{inner}", getattr(tensor, inner))]
        alias = plain_alias(tensor)
        if alias is None and is_composite:
            raise RuntimeError(
                f"{name} is a {type(tensor).__name__}, which has no memory of its own and does not say what it is made "
                f"of (__tensor_flatten__), so that rank 0's values cannot be copied to it. Give its class that method, "
                f"or {_REMEDY}"
            )
        tensor = tensor if alias is None else alias
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f"{name} has layout {tensor.layout}, and only dense tensors can be copied from rank 0. Keep it dense "
            f"(to_dense()), take it out of the module, or {_REMEDY}"
        )
    return [tensor]
