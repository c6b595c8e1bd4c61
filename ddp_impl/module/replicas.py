"""What ranks compare when they wrap their modules: parameters, ignored names, options. Averaging needs them equal."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl.base.errors import ReplicaMismatchError
from ddp_impl.base.nested_tensors import describe_placement, described, local_tensor
from ddp_impl.base.options import ReducerOptions
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.wire import collectives
from ddp_impl.wire.collectives import rank_in


@dataclass(frozen=True, slots=True)
class ReplicatedParameter:
    """A parameter as other ranks must have it, in words: ranks compare and print them and do nothing else."""

    name: str
    shape: str
    stride: str
    dtype: str
    sparse: bool
    placement: str

    @staticmethod
    def of(member: ManagedParameter) -> ReplicatedParameter:
        """Describe a parameter; of a DTensor, the local shard and its place among the shards."""
        local = local_tensor(member.parameter)
        return ReplicatedParameter(
            name=member.name,
            shape=str(list(local.shape)),
            stride=str(list(local.stride())),
            dtype=str(member.parameter.dtype),
            sparse=member.sparse,
            placement=describe_placement(member.parameter),
        )

    def differences(self, other: ReplicatedParameter) -> list[str]:
        """Return the names of the fields in which `other` differs; what parameters are called does not count."""
        fields = [field.name for field in dataclasses.fields(self) if field.name != "name"]
        return [field for field in fields if getattr(self, field) != getattr(other, field)]


@dataclass(frozen=True, slots=True)
class Replica:
    """One rank's module and options, as text; `copied`: how what rank 0 gives lies in memory, by kind and name."""

    parameters: tuple[ReplicatedParameter, ...]
    copied: Mapping[str, Mapping[str, str]]
    ignored: tuple[str, ...]
    options: Mapping[str, str]

    def encoded(self) -> dict[str, Any]:
        """Return JSON data that `decoded` reads."""
        return dataclasses.asdict(self)

    @staticmethod
    def decoded(data: dict[str, Any]) -> Replica:
        """Return the replica that `data`, made by `encoded`, describes."""
        parameters = tuple(ReplicatedParameter(**parameter) for parameter in data["parameters"])
        return Replica(parameters, data["copied"], tuple(data["ignored"]), data["options"])

    @property
    def digest(self) -> list[bytes]:
        """Hashes that ranks compare first: all but names; then for each kind of names the names, and their order."""
        nameless = tuple(dataclasses.replace(parameter, name="") for parameter in self.parameters)
        layouts = [list(layouts.values()) for layouts in self.copied.values()]
        content = _hash([dataclasses.replace(self, parameters=nameless, copied={}).encoded(), layouts])
        return [content, *(_hash(order) for names in self.copied.values() for order in (sorted(names), list(names)))]


@dataclass(frozen=True, slots=True)
class Agreed:
    """The result of a comparison of replicas: whether any rank has other wrappers, and a unique name of the run."""

    has_other_wrappers: bool
    run: str


_HASH_BYTES = 16
_RUN_BYTES = 8
#: In the last byte of what ranks exchange: whether the rank has other wrappers, or that it compares nothing.
_DECLINES = 2


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(json.dumps(data).encode(), digest_size=_HASH_BYTES).digest()


def describe(
    members: Sequence[ManagedParameter],
    copied: Mapping[str, Mapping[str, Tensor]],
    ignored: Collection[str],
    options: ReducerOptions,
    *,
    forward_sync_buffers: bool,
) -> Replica:
    """Return this rank's replica; `copied` has the parameters and buffers that all get from rank 0."""
    caps = options.caps
    compared = {
        "bucket caps": [caps.first_bytes, caps.cap_bytes, *caps.per_bucket_bytes],
        "bucket_cap_mb": "auto" if caps.measured else "",
        "find_unused_parameters": options.find_unused_parameters,
        "static_graph": options.static_graph,
        "skip_all_reduce_unused_params": options.skip_all_reduce_unused_params,
        "forward_sync_buffers": forward_sync_buffers,
        "delayed parameters": sorted(options.delayed),
        "param_to_hook_all_reduce": options.releases_delayed,
        "reduce dtype": str(options.reduce_dtype),
    }
    return Replica(
        parameters=tuple(ReplicatedParameter.of(member) for member in members),
        copied={kind: described(kind[:-1], tensors) for kind, tensors in copied.items()},
        ignored=tuple(sorted(ignored)),
        options={name: repr(value) for name, value in compared.items()},
    )


def verify_replicas(
    mine: Replica,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    has_other_wrappers: bool,
    meanwhile: Callable[[], None] | None = None,
) -> Agreed:
    """Check that the replicas of all ranks are equal, in one small collective if they are; all ranks must call it.

    `has_other_wrappers`: this rank has other wrappers. `meanwhile`: see `collectives.stack_ranks`. Raises
    `ReplicaMismatchError` on every rank, naming the first difference (pytorch/pytorch#73547).
    """
    besides = secrets.token_bytes(_RUN_BYTES) + bytes([has_other_wrappers])
    told = collectives.gather_bytes(b"".join(mine.digest) + besides, group, device, meanwhile)
    for rank in (rank for rank, data in enumerate(told) if data[-1] == _DECLINES):
        if meanwhile is not None:
            meanwhile()
        raise ReplicaMismatchError(f"[rank {rank_in(group)}] rank {rank} compares no module, and has raised an error")
    places = range(0, len(told[0]) - len(besides), _HASH_BYTES)
    digests = [[data[place : place + _HASH_BYTES] for place in places] for data in told]
    reordered = first_reordered(digests)
    others = [rank for rank, digest in enumerate(digests) if digest[0] != digests[0][0]]
    if not reordered and not others:
        return Agreed(any(data[-1] for data in told), run=told[0][-len(besides) : -1].hex())
    everyone = [Replica.decoded(data) for data in collectives.gather_values(mine.encoded(), group, device)]
    if reordered:
        text = first_misplaced({rank: everyone[rank] for rank in reordered})
    else:
        text = first_difference(everyone[0], everyone[others[0]], others[0])
    raise ReplicaMismatchError(f"[rank {rank_in(group)}] {text}")


def decline(group: dist.ProcessGroup, device: torch.device) -> dist.Work:
    """Begin the collective of `verify_replicas` on a rank that compares nothing; wait for no other rank."""
    length = sum(map(len, Replica((), {"parameters": {}, "buffers": {}}, (), {}).digest)) + _RUN_BYTES
    return collectives.leave_bytes(bytes(length) + bytes([_DECLINES]), group, device)


def agree_on_run(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return a name that no other run has, for ranks that compare no replicas; all ranks must call it."""
    return collectives.gather_bytes(secrets.token_bytes(_RUN_BYTES), group, device)[0].hex()


def first_reordered(digests: Sequence[Sequence[bytes]]) -> tuple[int, int] | None:
    """Return the first two ranks that have the same names of a kind in different orders; None if there are none."""
    for place in range(1, len(digests[0]), 2):
        first: dict[bytes, int] = {}
        for rank, digest in enumerate(digests):
            earlier = first.setdefault(digest[place], rank)
            if digest[place + 1] != digests[earlier][place + 1]:
                return earlier, rank
    return None


def first_misplaced(replicas: Mapping[int, Replica]) -> str:
    """Return where the replicas of two ranks have the same names in different orders, and what to do."""
    (one, ours), (other, theirs) = replicas.items()
    for kind, names in ours.copied.items():
        if sorted(names) != sorted(theirs.copied[kind]):
            continue
        for place, (name, their_name) in enumerate(zip(names, theirs.copied[kind], strict=True)):
            if name != their_name:
                return (
                    f"DDP expects {kind} in the same order on every rank, because ranks match them by their place, but "
                    f"of the same {len(names)} names, that at place {place} is '{name}' on rank {one} and "
                    f"'{their_name}' on rank {other}; register {kind} and modules in the same order on every rank, "
                    "which a loop over a set does not do (loop over a list, or over sorted(names))"
                )
    raise AssertionError("two ranks have the same names in different orders")


def first_difference(first: Replica, second: Replica, rank: int) -> str:
    """Return in what the replica of rank 0 and that of `rank`, which are not equal, differ, and what to do."""
    if first.ignored != second.ignored:
        return (
            "DDP expects the same parameters and buffers to be ignored on every rank "
            f"(_ddp_params_and_buffers_to_ignore), but only rank 0 ignores {_only_in(first, second)} and only rank "
            f"{rank} ignores {_only_in(second, first)}; give every rank the same set"
        )
    for ours, theirs in zip(first.parameters, second.parameters, strict=False):
        if ours.differences(theirs):
            return _parameter_difference(ours, theirs, rank)
    if len(first.parameters) != len(second.parameters):
        longer, shorter, where, missing = first.parameters, second.parameters, 0, rank
        if len(longer) < len(shorter):
            longer, shorter, where, missing = shorter, longer, rank, 0
        return (
            f"DDP expects the same parameters on every rank, but rank 0 has {len(first.parameters)} that require a "
            f"gradient and rank {rank} has {len(second.parameters)}: parameter '{longer[len(shorter)].name}' of rank "
            f"{where} has no counterpart on rank {missing}"
        )
    differing = ", ".join(
        f"{name}={value} on rank 0, {second.options.get(name)} on rank {rank}"
        for name, value in first.options.items()
        if value != second.options.get(name)
    )
    if differing:  # told before buffers, which are copied or not as an option says
        return f"DDP expects the same options on every rank, but {differing}"
    for kind, layouts in first.copied.items():
        if list(layouts.values()) != list(second.copied[kind].values()):
            return _layout_difference(kind, layouts, second.copied[kind], rank)
    raise AssertionError("two replicas differ in nothing")


def verify_buffers(everyone: Sequence[Mapping[str, str]], own_rank: int) -> None:
    """Raise `ReplicaMismatchError`, naming a buffer, unless all ranks have alike ones, each in words by its name."""
    for rank, theirs in enumerate(everyone):
        if list(theirs.values()) != list(everyone[0].values()):
            text = _layout_difference("buffers", everyone[0], theirs, rank)
            raise ReplicaMismatchError(f"[rank {own_rank}] {text}")


def _layout_difference(kind: str, first: Mapping[str, str], second: Mapping[str, str], rank: int) -> str:
    """Return in which of its tensors `rank` differs from rank 0, which has them `first`, and what to do."""
    expected = f"DDP expects the same {kind} on every rank, because all get those of rank 0, but {kind[:-1]}"
    hint = "build the module in the same way on every rank, or name it in _ddp_params_and_buffers_to_ignore on all"
    for (name, layout), (their_name, their_layout) in zip(first.items(), second.items(), strict=False):
        if layout != their_layout:
            called = f"'{name}'" if name == their_name else f"'{name}' (rank {rank} has '{their_name}' in its place)"
            return f"{expected} {called} is {layout} on rank 0, {their_layout} on rank {rank}; {hint}"
    longer, where, missing = (first, 0, rank) if len(first) > len(second) else (second, rank, 0)
    name = list(longer)[min(len(first), len(second))]
    return f"{expected} '{name}' of rank {where} has no counterpart on rank {missing}; {hint}"


def _only_in(one: Replica, other: Replica) -> list[str]:
    return sorted(set(one.ignored) - set(other.ignored))


def _parameter_difference(ours: ReplicatedParameter, theirs: ReplicatedParameter, rank: int) -> str:
    differing = " and ".join(
        f"{field} {getattr(ours, field)} on rank 0, {getattr(theirs, field)} on rank {rank}"
        for field in ours.differences(theirs)
    )
    name = f"'{ours.name}'" if ours.name == theirs.name else f"'{ours.name}' (rank {rank} calls it '{theirs.name}')"
    hint = "build the module in the same way on every rank"
    if ours.placement or theirs.placement:
        hint = (
            "average over the dimension of the mesh that parameters are not spread over "
            "(device_mesh=mesh['dp'], say), and spread the module in the same way on every rank"
        )
    return f"DDP expects the same parameters on every rank, but parameter {name} has {differing}; {hint}"
