"""DDPs that are wrong about modules that are sharded over a mesh, each in one way: `ddp_impl`, changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from conformance.mutants.reductions import Reducing
from ddp_impl import DistributedDataParallel, wrapped_module
from ddp_impl.bucket import ManagedParameter
from ddp_impl.reducer import Reducer


class ComparesNoPlacements(DistributedDataParallel):
    """BUG: nobody asks whether ranks hold the same shards before these are averaged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(wrapped_module, "describe_placement", return_value=""):
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
