"""Mutants of chapter tensor_parallel: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.base.nested_tensors import local_tensor, set_local_gradient
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.buckets.gradients import GradientHome
from ddp_impl.module import replicas
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


@replaces(Ours, "__init__")
def ComparesNoPlacements(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: shards are averaged without a check that ranks hold the same ones."""
    with mock.patch.object(replicas, "describe_placement", return_value=""):
        init(*args, **kwargs)


@replaces(Reducer, "finalize")
def DropsShardedGradients(reducer: Reducer, finalize: Call) -> None:
    """BUG: gradients of DTensors are dropped after they were averaged, as if they were not needed."""
    finalize()
    for member in reducer.members:
        if isinstance(member.parameter.grad, DTensor):
            member.parameter.grad = None


@replaces(Ours, "attach_reducer")
def AveragesShardsOfAllRanks(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: shards are divided by the number of all ranks, not of those that hold the same one."""
    attach_reducer(members)
    ddp.reducer.reduction.divisor = dist.get_world_size()


@replaces(Ours, "synchronise_state")
def StartsFromOwnShards(ddp: Ours, synchronise_state: Call, with_buffers: bool, group_src: int = 0) -> None:
    """BUG: rows start from their own shards, which are not copied from the first row."""


@replaces(Reduction, "home_of")
def TakesPartialSums(reduction: Reduction, home_of: Call, bucket: Bucket) -> GradientHome:
    """BUG: a gradient that is a partial sum over the row is taken for the whole."""
    return GradientHome(_local_part, set_local_gradient, movable=False)


def _local_part(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local_tensor(parameter.grad)


@replaces(Ours, "_sync_buffers")
def KeepsOwnBuffers(ddp: Ours, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: buffers are never synchronised before forward."""


@replaces(Ours, "_pre_forward")
def AsksAllRanks(ddp: Ours, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: each forward in training asks all ranks something, and not those of its own group alone."""
    if torch.is_grad_enabled():
        dist.all_reduce(torch.zeros(1))
    return pre_forward(*inputs, **kwargs)


@replaces(Ours, "__init__")
def TakesAnyMesh(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: of a mesh of several dimensions the first is taken."""
    mesh = kwargs.get("device_mesh")
    if mesh is not None and mesh.ndim > 1:
        kwargs["device_mesh"] = mesh[mesh.mesh_dim_names[0]]
    init(*args, **kwargs)


@replaces(ParameterWatch, "computed")
def TakesComputedForRemoved(watch: ParameterWatch, computed: Call, names: Iterable[str]) -> dict[str, Tensor]:
    """BUG: takes a computed DTensor in the place of a parameter for a parameter that was removed."""
    return {}


@replaces(Ours, "state_dict")
def StatesWithoutPrefix(ddp: Ours, state_dict: Call, *args: Any, **kwargs: Any) -> Any:
    """BUG: the state dict has the module's names, without `module.`."""
    return ddp.module.state_dict(*args, **kwargs)
