"""Gradients are copied into a bucket and divided in one of two ways, with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.gradient_homes import GRAD_ATTRIBUTE
from ddp_impl.gradients import collect
from ddp_impl.options import LARGE_NUMEL


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
    assert bucket.has_large == large
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


@pytest.mark.parametrize("holds_gradients", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_a_gradient_in_a_narrower_dtype_is_not_rounded_to_it(large: bool, holds_gradients: bool) -> None:
    """A parameter that was converted after it was wrapped: the bucket keeps the dtype that ranks have compared."""
    bucket = bucket_of([(LARGE_NUMEL,) if large else (6,), (5,)], torch.float32, holds_gradients=holds_gradients)
    smallest = torch.finfo(torch.float16).smallest_normal * 2.0**-10
    converted = bucket.parameters[0]
    converted.grad = None
    converted.data = converted.data.half()
    converted.grad = torch.full_like(converted, smallest)
    with torch.no_grad():
        collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=4)
    assert (bucket.views[0] == smallest / 4).all()


@pytest.mark.parametrize("in_place", [(), (0,), (1,), (0, 1, 2)])
def test_large_gradients_beside_some_that_live_in_the_bucket_are_divided_once(in_place: tuple[int, ...]) -> None:
    bucket = bucket_of([(LARGE_NUMEL,), (5,), (LARGE_NUMEL,)], torch.float32, holds_gradients=True)
    before = [gradient for gradient in gradients_of(bucket) if gradient is not None]
    for place in in_place:  # as after a backward under `no_sync`
        bucket.views[place].copy_(before[place])
        bucket.parameters[place].grad = bucket.views[place]
    with torch.no_grad():
        assert collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=3) == []
    for view, parameter, gradient in zip(bucket.views, bucket.parameters, before, strict=True):
        assert parameter.grad is view
        assert torch.equal(view, gradient / 3)
