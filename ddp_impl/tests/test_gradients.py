"""Gradients are copied into a bucket and divided in one of two ways, with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddp_impl.bucket import LARGE_NUMEL, Bucket, ManagedParameter
from ddp_impl.gradient_homes import GRAD_ATTRIBUTE
from ddp_impl.gradients import collect


def bucket_of(shapes: list[tuple[int, ...]], dtype: torch.dtype, *, holds_gradients: bool = False) -> Bucket:
    generator = torch.Generator().manual_seed(0)
    members = []
    for index, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, dtype=dtype, generator=generator)
        members.append(ManagedParameter(index, f"p{index}", parameter))
    return Bucket(0, members, holds_gradients=holds_gradients)


def gradients_of(bucket: Bucket) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in bucket.parameters]


@pytest.mark.parametrize("holds_gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("divisor", [1, 2, 3])
@pytest.mark.parametrize("large", [False, True])
def test_every_gradient_is_divided_once(large: bool, divisor: int, dtype: torch.dtype, holds_gradients: bool) -> None:
    shapes = [(3, 5), (), (LARGE_NUMEL, 1) if large else (7,), (2,)]
    bucket = bucket_of(shapes, dtype, holds_gradients=holds_gradients)
    assert bucket.has_large == (large and not holds_gradients)
    before = gradients_of(bucket)
    bucket.flat.fill_(99)
    with torch.no_grad():
        assert collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=divisor) == []
    for view, gradient in zip(bucket.views, before, strict=True):
        assert gradient is not None
        assert torch.equal(view, gradient / divisor)


@pytest.mark.parametrize("large", [False, True])
def test_missing_gradients_are_zero(large: bool) -> None:
    bucket = bucket_of([(4,), (LARGE_NUMEL,) if large else (6,), (5,)], torch.float32)
    bucket.parameters[2].grad = None
    bucket.flat.fill_(99)
    with torch.no_grad():
        assert collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=2) == [2]
    assert not bucket.views[2].any()
    first = bucket.parameters[0].grad
    assert first is not None
    assert torch.equal(bucket.views[0], first / 2)
