"""A comm hook as users write them: the mean of a bucket, sent in wider numbers than the gradients have."""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from conformance.errors import present


def mean_in_wider_numbers(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Return the bucket's future mean over the default group; the sum is computed in float64 or complex128."""
    buffer = bucket.buffer()
    wide = buffer.to(torch.complex128 if buffer.is_complex() else torch.float64)
    work = present(dist.all_reduce(wide, async_op=True))
    world_size = dist.get_world_size()

    def narrowed(future: Future[Any]) -> Tensor:
        future.wait()  # its value would be the real view of complex numbers
        return (wide / world_size).to(buffer.dtype)

    return work.get_future().then(narrowed)
