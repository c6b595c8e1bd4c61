"""Checks of the constructor's arguments, before anything is done."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import NoneType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.torch_internals.distributed import GroupBackend


def check_arguments(module: Any, device_ids: Any, output_device: Any, delayed: Any, delay_trigger: Any) -> None:
    """Raise `TypeError` or `ValueError` for arguments of other types than theirs, or that contradict each other."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedDataParallel wraps an nn.Module; got {type(module).__name__}")
    if (delayed is None) != (delay_trigger is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce must be given together")
    if delayed is not None:
        known = dict(module.named_parameters(remove_duplicate=False))
        pairs = delayed if isinstance(delayed, (list, tuple)) else [delayed]
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
            raise TypeError(f"delay_all_reduce_named_params is a list of pairs (name, parameter); got {delayed!r}")
        for name, parameter in pairs:
            if known.get(name) is not parameter:
                raise ValueError(
                    f"delay_all_reduce_named_params: '{name}' is not the name of the parameter given with it; names "
                    "are those of module.named_parameters()"
                )
        if not any(delay_trigger is parameter for parameter in known.values()) or not delay_trigger.requires_grad:
            raise ValueError(
                "param_to_hook_all_reduce must be a parameter of the module that requires a gradient; got "
                f"{type(delay_trigger).__name__}"
            )
    if not isinstance(device_ids, (list, tuple, range, NoneType)):
        raise TypeError(f"device_ids is None or a list with one device; got {device_ids!r}")
    if not isinstance(output_device, (int, str, torch.device, NoneType)):
        raise TypeError(f"output_device is a device or its index; got {output_device!r}")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element: one process drives one device; got {device_ids}"
        )


def check_flags(**given: Any) -> None:
    """Raise `TypeError` for an argument that is neither true nor false."""
    for name, value in given.items():
        if not isinstance(value, int) and type(value).__name__ not in ("bool", "bool_"):  # NumPy's, too
            raise TypeError(f"{name} is True or False; got {value!r} ({type(value).__name__})")


def check_nested(module: nn.Module, members: Sequence[ManagedParameter], gradient_as_bucket_view: bool) -> None:
    """Raise `ValueError` where a DDP inside `module` averages one of `members` too, and one of the two has views."""
    averaged = {id(member.parameter) for member in members}
    for name, inner in module.named_modules():
        is_ddp = isinstance(inner, Joinable) and hasattr(inner, "reducer")
        if not is_ddp or not (gradient_as_bucket_view or getattr(inner, "gradient_as_bucket_view", False)):
            continue
        own = inner.module.named_parameters(remove_duplicate=False)  # of a DDP of whatever make
        requires = (name for name, parameter in own if parameter.requires_grad and id(parameter) in averaged)
        twice = next((name for name in requires if name not in inner.parameters_to_ignore), None)
        if twice is not None:
            raise ValueError(
                f"module contains {f'at {name!r} ' if name else ''}a {type(inner).__name__}, which averages the "
                f"gradient of its '{twice}' already; with gradient_as_bucket_view it can live in the buckets of one "
                "DDP only. Wrap the whole module once, leave gradient_as_bucket_view out of both, or have one of them "
                "ignore it (_set_params_and_buffers_to_ignore_for_model)"
            )


def resolve_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Return the group to average over; raises `RuntimeError` when there is none or more than one answer."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments. Give one of them")
    if device_mesh is not None:
        if not hasattr(device_mesh, "ndim") or not hasattr(device_mesh, "get_group"):
            raise TypeError(f"device_mesh must be a torch.distributed.device_mesh.DeviceMesh; got {device_mesh!r}")
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, that of data parallelism, but got {device_mesh}. "
                "Slice a larger mesh, e.g. mesh['dp']"
            )
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        return _checked_group(process_group)
    if not dist.is_initialized():
        raise RuntimeError(
            "Default process group has not been initialized: call torch.distributed.init_process_group before "
            "wrapping a module, or pass process_group"
        )
    return cast(dist.ProcessGroup, dist.group.WORLD)


def _checked_group(group: Any) -> dist.ProcessGroup:
    """Return `group` if this process can communicate in it; raises `TypeError` or `ValueError` saying what it is."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group is GroupMember.NON_GROUP_MEMBER: this rank is not in the group that new_group has made. "
            "Wrap the module on the ranks of the group only"
        )
    if not isinstance(group, dist.ProcessGroup):
        is_backend = isinstance(group, GroupBackend)
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup; got {type(group).__name__}"
            + (
                ", which is the backend of one. Let torch.distributed.new_group make the group, or make one of it: "
                "group = ProcessGroup(rank, size); group._register_backend(device, backend_type, backend)"
                if is_backend
                else ", which torch.distributed.new_group does not return"
            )
        )
    return group


def resolve_devices(
    members: Sequence[ManagedParameter], device_ids: Any, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """Return the device index to move inputs to and that of the outputs; (None, None) for CPU and several devices."""
    devices = {member.parameter.device for member in members}
    if not device_ids or len(devices) > 1 or next(iter(devices)).type == "cpu":
        if device_ids or output_device:
            raise ValueError(
                "device_ids and output_device arguments only work with modules on a single accelerator; got "
                f"device_ids={device_ids}, output_device={output_device} and parameters on "
                f"{', '.join(sorted(map(str, devices)))}"
            )
        return None, None
    index = _device_index(device_ids[0], "device_ids")
    return [index], index if output_device is None else _device_index(output_device, "output_device")


def buffer_policy(broadcast: bool | None, forward_sync: bool | None) -> tuple[bool, bool]:
    """Return whether buffers are copied (before forward, at construction), from the old argument and the new one."""
    if broadcast is not None:
        warnings.warn(
            "broadcast_buffers is ignored, because forward_sync_buffers is given too"
            if forward_sync is not None
            else "broadcast_buffers is deprecated; use forward_sync_buffers (which, unlike broadcast_buffers=False, "
            "still copies buffers at construction)",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync is not None:
        return forward_sync, True
    effective = True if broadcast is None else broadcast
    return effective, effective


def _device_index(device: int | str | torch.device, argument: str) -> int:
    if isinstance(device, int):
        return device
    try:
        index = torch.device(device).index
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{argument} names no device; got {device!r}") from error
    return torch.accelerator.current_device_index() if index is None else index
