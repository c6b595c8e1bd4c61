"""Mutants of chapter tensor_parallel: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel, replicas
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.gradient_homes import GradientHome
from ddp_impl.reducer import Reducer
from ddp_impl.tensor_parallel import local_tensor, set_local_gradient


class ComparesNoPlacements(DistributedDataParallel):
    """BUG: nobody asks whether ranks hold the same shards before these are averaged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(replicas, "describe_placement", return_value=""):
            super().__init__(*args, **kwargs)


class DropsShardedGradients(Reducing):
    """BUG: gradients of DTensors are dropped after they were averaged, as if nobody needed them."""

    class OwnReducer(Reducer):
        """Drops gradients."""

        def _finalize(self) -> None:
            super()._finalize()
            for member in self.members:
                if isinstance(member.parameter.grad, DTensor):
                    member.parameter.grad = None


class AveragesShardsOfAllRanks(DistributedDataParallel):
    """BUG: shards are divided by the number of all ranks, not of those that hold the same one."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.divisor = dist.get_world_size()


class StartsFromOwnShards(DistributedDataParallel):
    """BUG: rows start from their own shards, which are not copied from the first row."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        pass


class TakesPartialSums(Reducing):
    """BUG: a gradient that is a partial sum over the row is taken for the whole."""

    class OwnReducer(Reducer):
        """Asks for no placement."""

        def _home_of(self, bucket: Bucket) -> GradientHome:
            return GradientHome(_local_part, set_local_gradient, movable=False)


def _local_part(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local_tensor(parameter.grad)


class KeepsOwnBuffers(DistributedDataParallel):
    """BUG: buffers are never synchronised before forward."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        pass


class AsksAllRanks(DistributedDataParallel):
    """BUG: each forward in training asks all ranks something, and not those of its own group alone."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            dist.all_reduce(torch.zeros(1))
        return super()._pre_forward(*inputs, **kwargs)


class TakesAnyMesh(DistributedDataParallel):
    """BUG: of a mesh of several dimensions the first is taken."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        mesh = kwargs.get("device_mesh")
        if mesh is not None and mesh.ndim > 1:
            kwargs["device_mesh"] = mesh[mesh.mesh_dim_names[0]]
        super().__init__(*args, **kwargs)


class StatesWithoutPrefix(DistributedDataParallel):
    """BUG: the state dict has the module's names, without `module.`."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict."""
        return self.module.state_dict(*args, **kwargs)
