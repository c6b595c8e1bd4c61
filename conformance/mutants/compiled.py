"""DDPs that are wrong under `torch.compile`, each in one way: torch's DistributedDataParallel, changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class NeverCuts(DistributedDataParallel):
    """BUG: the compiler is not told where buckets end, so that no reduction begins before the backward is over."""

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        yield


class ReducesInDefaultGroup(DistributedDataParallel):
    """BUG: asked to reduce in the graph, it forgets its own process group and averages over all ranks."""

    def _register_accum_grad_hook(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Any) -> None:
        group = dist.group.WORLD
        assert group is not None
        if self.require_backward_grad_sync:
            mean: Tensor = functional.all_reduce(parameter.grad / group.size(), "sum", group)
            parameter.grad.copy_(mean)
