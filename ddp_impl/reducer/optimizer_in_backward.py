"""Steps a parameter's own optimizer as soon as the parameter has its averaged gradient (pytorch/pytorch#89194)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.torch_internals.tensors import in_backward_hooks, in_backward_optimizers


def take_over_optimizers(members: Sequence[ManagedParameter]) -> bool:
    """Whether any member has an optimizer of its own; their hooks, which would step on local gradients, are removed.

    Parameters get such optimizers from `torch.distributed.optim._apply_optimizer_in_backward`, called before or after
    wrapping, but before the first forward.
    """
    owners = [member.parameter for member in members if in_backward_optimizers(member.parameter)]
    if not owners:
        return False
    for parameter in owners:
        for handle in in_backward_hooks(parameter):
            handle.remove()
    return True


def step_parameters(bucket: Bucket, used: Sequence[bool] | None) -> bool:
    """Step the optimizers of the parameters in `bucket`, whose gradients are averages now.

    Return whether none of the parameters has a gradient any more.

    Afterwards those gradients are None, unless `DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE=0` is in the environment.
    A parameter that no rank has used, by its index in `used`, is not stepped: what it has for a gradient is the user's.
    """
    set_to_none = os.environ.get("DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE", "1") != "0"
    for member in bucket.members:
        parameter = member.parameter
        if parameter.grad is not None and (used is None or used[member.index]):
            for optimizer in in_backward_optimizers(parameter):
                optimizer.step()
            if set_to_none and in_backward_optimizers(parameter):
                parameter.grad = None
    return all(parameter.grad is None for parameter in bucket.parameters)
