"""Module state that is copied instead of averaged: buffers before forward, everything once at construction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_impl import collectives
from ddp_impl.errors import ReplicaMismatchError


def synchronised_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """Return the buffers that DDP copies from one rank to all others, by name.

    Asked for anew before each forward, because a module may replace its buffers (pytorch/pytorch#63916). Those on the
    meta device hold no data that could be copied.
    """
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored and not buffer.is_meta}


def broadcast_state(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, group_src: int = 0
) -> None:
    """Overwrite `tensors` with those of the group's rank `group_src`, whatever device each is on.

    A tensor on another kind of device than `device` (say a CPU buffer in a module on an accelerator,
    pytorch/pytorch#109103) travels through `device`, since the group's backend may serve only that one.
    All ranks must call it.
    """
    here = [tensor for tensor in tensors if tensor.device.type == device.type]
    collectives.broadcast_coalesced(here, group, group_src)
    elsewhere = [tensor for tensor in tensors if tensor.device.type != device.type]
    if elsewhere:
        moved = [tensor.detach().to(device) for tensor in elsewhere]
        collectives.broadcast_coalesced(moved, group, group_src)
        for tensor, copy in zip(elsewhere, moved, strict=True):
            tensor.data.copy_(copy)


def verify_replicas(description: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that every rank of the group describes its module and options the same way; all ranks must call it.

    `description` is JSON data: what `wrapped_module.describe` returns.
    One small collective when all agree. Raises `ReplicaMismatchError` on every rank, naming the first parameter that
    differs; torch tells only the ranks above 0, and rank 0 sees a broken connection (pytorch/pytorch#73547).
    """
    digest = hashlib.sha256(json.dumps(_without_names(description)).encode()).digest()
    digests = collectives.gather_bytes(digest, group, device)
    if len(set(digests)) == 1:
        return
    everyone = collectives.gather_values(description, group, device)
    rank = dist.get_rank(group)
    other = next(index for index, item in enumerate(digests) if item != digests[0])
    raise ReplicaMismatchError(f"[rank {rank}] {_first_difference(everyone[0], everyone[other], other)}")


def _without_names(description: dict[str, Any]) -> dict[str, Any]:
    # Names are for messages: replicas whose modules only name things differently are averaged correctly.
    return {**description, "parameters": [entry[1:] for entry in description["parameters"]]}


def _first_difference(first: dict[str, Any], second: dict[str, Any], rank: int) -> str:
    if first["ignored"] != second["ignored"]:
        only_first = sorted(set(first["ignored"]) - set(second["ignored"]))
        only_second = sorted(set(second["ignored"]) - set(first["ignored"]))
        return (
            "DDP expects the same parameters and buffers to be ignored on every rank "
            f"(_ddp_params_and_buffers_to_ignore), but only rank 0 ignores {only_first} and only rank {rank} ignores "
            f"{only_second}; give every rank the same set"
        )
    for ours, theirs in zip(first["parameters"], second["parameters"], strict=False):
        if ours[1:] != theirs[1:]:
            differing = " and ".join(
                f"{what} {ours[place]} on rank 0, {theirs[place]} on rank {rank}"
                for place, what in ((1, "shape"), (2, "stride"), (3, "dtype"), (4, "sparse"), (5, "placement"))
                if ours[place] != theirs[place]
            )
            name = f"'{ours[0]}'" if ours[0] == theirs[0] else f"'{ours[0]}' (rank {rank} calls it '{theirs[0]}')"
            hint = "build the module in the same way on every rank"
            if ours[5] or theirs[5]:
                hint = (
                    "average over the dimension of the mesh that parameters are not spread over "
                    "(device_mesh=mesh['dp'], say), and spread the module in the same way on every rank"
                )
            return f"DDP expects the same parameters on every rank, but parameter {name} has {differing}; {hint}"
    if len(first["parameters"]) != len(second["parameters"]):
        longer, shorter = first["parameters"], second["parameters"]
        where, missing = 0, rank
        if len(longer) < len(shorter):
            longer, shorter, where, missing = shorter, longer, rank, 0
        name = longer[len(shorter)][0]
        return (
            f"DDP expects the same parameters on every rank, but rank 0 has {len(first['parameters'])} that require a "
            f"gradient and rank {rank} has {len(second['parameters'])}: parameter '{name}' of rank {where} has no "
            f"counterpart on rank {missing}"
        )
    differing = ", ".join(
        f"{name}={first['options'][name]!r} on rank 0, {second['options'][name]!r} on rank {rank}"
        for name in first["options"]
        if first["options"][name] != second["options"].get(name)
    )
    return f"DDP expects the same options on every rank, but {differing}"
