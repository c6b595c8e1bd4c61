"""What DDP reads off the module it wraps: which parameters it averages, where they are, how to describe them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_impl.bucket import ManagedParameter


def managed_parameters(module: nn.Module, ignored: Collection[str]) -> list[ManagedParameter]:
    """Return the parameters that require a gradient and are not `ignored`, each once, in order of registration.

    Names are those of `named_parameters()`, so a parameter of the root module is ignored by its bare name
    (pytorch/pytorch#44826). Raises `RuntimeError` for uninitialised parameters and when there is nothing to average.
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
            if parameter.requires_grad:
                seen.add(parameter)
                members.append(ManagedParameter(len(members), name, parameter, sparse))
    if not members:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient; "
            "use the module itself"
        )
    return members


def device_type(module: nn.Module, ignored: Collection[str]) -> str:
    """Return the one type of device that all parameters are on; raises `ValueError` when there are several."""
    types = {parameter.device.type for name, parameter in module.named_parameters() if name not in ignored}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices; its parameters are on "
            f"{', '.join(sorted(types))}"
        )
    return types.pop()


def describe(members: Sequence[ManagedParameter], ignored: Collection[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return JSON data that must be equal on all ranks."""
    return {
        "parameters": [
            [
                member.name,
                list(member.parameter.shape),
                list(member.parameter.stride()),
                str(member.parameter.dtype),
                member.sparse,
            ]
            for member in members
        ],
        "ignored": sorted(ignored),
        "options": options,
    }


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in its containers on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, move(item, device)) for key, item in value.items())
    return value
