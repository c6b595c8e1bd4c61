"""`ReducerSurface`: the methods of torch's reducer that other projects call (docs/private_names.md)."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.reducer.parameter_usage import ParameterUsage
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reduction import BucketReduction
from ddp_impl.wire import collectives


class _Reducer(Protocol):
    """What stands behind torch's names."""

    planning: BucketPlanning
    reduction: BucketReduction
    usage: ParameterUsage
    _hooks: AutogradHooks

    def rebuild_buckets(self) -> None: ...

    def check_finished(self) -> None: ...

    def remove_hooks(self) -> None: ...


class ReducerSurface:
    """Base class of the reducer, which adds torch's names to it."""

    def _rebuild_buckets(self: _Reducer) -> bool:
        before = self.planning.has_rebuilt_buckets
        self.rebuild_buckets()
        return self.planning.has_rebuilt_buckets and not before

    def _check_reducer_finalized(self: _Reducer) -> None:
        self.check_finished()

    def _remove_autograd_hooks(self: _Reducer) -> None:
        self.remove_hooks()

    @property
    def is_deaf(self: _Reducer) -> bool:
        """Whether the hooks are removed, so that gradients stay local, in compiled backwards, too."""
        return self._hooks.are_removed

    def _set_forward_pass_work_handle(self: _Reducer, work: dist.Work, _: bool) -> None:
        """Have the first bucket wait for what a join context was told of this forward."""
        self.reduction.agreements.append(partial(collectives.finished, work, "all_reduce"))

    def _delay_all_reduce(self) -> None:
        """Do nothing: what torch flushes by hand after a static graph's first backward is reduced when it ends."""

    def _get_local_used_map(self: _Reducer) -> Tensor:
        """Return, per parameter, how many ranks used it in the last iteration; int32, 0 if ranks exchanged nothing."""
        return torch.tensor(self.usage.num_users(), dtype=torch.int32, device="cpu")

    def _ddp_graph_static(self: _Reducer) -> bool:
        return self.usage.looks_static
