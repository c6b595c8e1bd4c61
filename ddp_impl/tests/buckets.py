"""Buckets for tests, of parameters that have gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddp_impl.base.options import LARGE_NUMEL
from ddp_impl.buckets.bucket import Bucket, ManagedParameter


def bucket_of(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    *,
    holds_gradients: bool = False,
    large_numel: int = LARGE_NUMEL,
) -> Bucket:
    """Return a bucket of parameters of these shapes, each with a random gradient of its own, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    members = []
    for index, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, dtype=dtype, generator=generator)
        members.append(ManagedParameter(index, f"p{index}", parameter))
    return Bucket(0, members, holds_gradients=holds_gradients, large_numel=large_numel)


def gradients_of(bucket: Bucket) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in bucket.parameters if parameter.grad is not None]
