"""Adapter of FairScale's `ShardedDataParallel`.

It reduces each gradient to one rank, its owner. For the comparison with other DDPs the owners broadcast FairScale's
gradients after every backward that reduces.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from conformance.subjects.adapters.adapter import group_of, only


def sharded(module: nn.Module, **options: Any) -> nn.Module:
    """Return `module` in a `ShardedDataParallel` whose gradients reach every rank; every rank must call it."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    taken = only(options, "process_group", "broadcast_buffers")
    group = group_of(options)
    owners = OSS(module.parameters(), optim=torch.optim.SGD, group=group, lr=0.0)  # assigns the parameters to ranks
    # Without buckets, which require that only FairScale's own zero_grad clears gradients.
    wrapped: nn.Module = ShardedDataParallel(module, owners, reduce_buffer_size=0, **taken)
    _Gathering(wrapped, group)
    return wrapped


class _Gathering:
    """Broadcasts gradients from their owners at the end of a backward."""

    def __init__(self, wrapped: Any, group: dist.ProcessGroup) -> None:
        self._wrapped = wrapped
        self._group = group
        self._queued = False
        for parameter in wrapped.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        if not self._queued and not self._wrapped._should_accumulate_grads:
            self._queued = True
            # FairScale's own end of the backward is queued after this call: queueing twice comes after it.
            engine: Any = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._broadcast))

    def _broadcast(self) -> None:
        self._queued = False
        owners: dict[Tensor, int] = self._wrapped._trainable_param_to_rank
        for parameter, owner in owners.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.grad, group_src=owner, group=self._group)
