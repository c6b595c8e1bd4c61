"""What DDP reads off the module it wraps: which parameters it averages, and where they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from types import MappingProxyType

import torch
from torch import nn

from ddp_impl.base.inner_tensors import refuse_composite
from ddp_impl.base.tensor_parallel import local_tensor
from ddp_impl.buckets.bucket import Layout, ManagedParameter


def managed_parameters(
    module: nn.Module, ignored: Collection[str], averaged: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> list[ManagedParameter]:
    """Return the parameters that require a gradient and are not `ignored`, each once, in order of registration.

    Those with names in `averaged` count although they are frozen now, and keep the strides that it has for their
    gradients: a copy averages what the original did, as other ranks' copies do.
    Names are those of `named_parameters()`, so a parameter of the root module is ignored by its bare name
    (pytorch/pytorch#44826). Raises `RuntimeError` for uninitialised parameters, for those that are made of others,
    and when there is nothing to average.
    """
    members: list[ManagedParameter] = []
    seen: set[nn.Parameter] = set()
    for module_name, owner in module.named_modules():
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        for own_name, parameter in owner.named_parameters(recurse=False):
            name = f"{module_name}.{own_name}" if module_name else own_name
            if name in ignored or parameter in seen:
                continue
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    f"parameter '{name}' is uninitialized: modules with uninitialized parameters can't be used with "
                    "`DistributedDataParallel`; run one forward of the bare module (a dummy input will do) first"
                )
            if parameter.requires_grad or name in averaged:
                refuse_composite(name, parameter)
                seen.add(parameter)
                layout = Layout.of(local_tensor(parameter), averaged.get(name))
                members.append(ManagedParameter(len(members), name, parameter, sparse, layout))
    if not members:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient; "
            "use the module itself"
        )
    return members


def device_type(module: nn.Module, ignored: Collection[str]) -> str:
    """Return the one type of device that all parameters are on; raises `ValueError` for several, and for meta."""
    type_of = {name: parameter.device.type for name, parameter in module.named_parameters() if name not in ignored}
    types = set(type_of.values())
    if types == {"meta"}:
        raise ValueError(
            f"parameter '{next(iter(type_of))}' is on the meta device, as all are, and has no values that ranks could "
            "be given: move the module to its device (to_empty(device=...)) and initialise it before wrapping it"
        )
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices; its parameters are on "
            f"{', '.join(sorted(types))}"
        )
    return types.pop()


def refuse_expanded(module: nn.Module, ignored: Collection[str]) -> None:
    """Raise `RuntimeError` for tensors with elements that share memory: no rank could be given the first one's."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        layout = zip(tensor.stride(), tensor.shape, strict=True) if tensor.layout is torch.strided else ()
        if name not in ignored and any(stride == 0 and extent > 1 for stride, extent in layout):
            raise RuntimeError(
                f"'{name}' of shape {list(tensor.shape)} was made by expand(): several of its elements are one place "
                "in memory, and DDP cannot write the values of rank 0 there. Make it contiguous() before wrapping the "
                "module"
            )
