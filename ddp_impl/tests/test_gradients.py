"""Gradients are copied into a bucket and divided in one of two ways, with the same bits."""

from __future__ import annotations

import pytest
import torch

from ddp_impl.base.options import LARGE_NUMEL
from ddp_impl.buckets.gradients import GRAD_ATTRIBUTE, collect, hand_out
from ddp_impl.tests.buckets import bucket_of, gradients_of


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


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_gradients_become_views_where_they_fit_and_were_used(fits: bool, used: bool) -> None:
    """A parameter that was laid out anew after it was wrapped has gradients like it."""
    bucket = bucket_of([(2, 3), (4,)], torch.float32, holds_gradients=True)
    first = bucket.parameters[0]
    if not fits:
        first.data = first.data.t().contiguous().t()
    kept = first.grad
    with torch.no_grad():
        assert collect(bucket, GRAD_ATTRIBUTE, set() if used else {0}, "", divisor=2) == []
    assert bucket.parameters[1].grad is bucket.views[1]
    assert first.grad is (bucket.views[0] if fits and used else kept)
    assert bucket.detached_from_view == ([] if fits and used else [0])


@pytest.mark.parametrize("in_place", [(), (0,), (1,), (0, 1, 2)])
def test_large_gradients_beside_some_that_live_in_the_bucket_are_divided_once(in_place: tuple[int, ...]) -> None:
    bucket = bucket_of([(LARGE_NUMEL,), (5,), (LARGE_NUMEL,)], torch.float32, holds_gradients=True)
    before = gradients_of(bucket)
    for place in in_place:  # as after a backward under `no_sync`
        bucket.views[place].copy_(before[place])
        bucket.parameters[place].grad = bucket.views[place]
    with torch.no_grad():
        assert collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=3) == []
    for view, parameter, gradient in zip(bucket.views, bucket.parameters, before, strict=True):
        assert parameter.grad is view
        assert torch.equal(view, gradient / 3)


@pytest.mark.parametrize("holds_gradients", [False, True])
def test_a_large_gradient_of_another_shape_is_refused_and_leaves_the_bucket_as_it_is(holds_gradients: bool) -> None:
    """The parameter was given other data; dividing into the view would give that the other shape."""
    bucket = bucket_of([(LARGE_NUMEL,), (5,)], torch.float32, holds_gradients=holds_gradients)
    grown = bucket.parameters[0]
    grown.grad = None
    grown.data = torch.zeros(2 * LARGE_NUMEL)
    grown.grad = torch.ones(2 * LARGE_NUMEL)
    with torch.no_grad(), pytest.raises(RuntimeError):
        collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=2)
    assert bucket.views[0].shape == (LARGE_NUMEL,)


@pytest.mark.parametrize("put", ["a copy", "nothing"])
def test_what_is_in_the_place_of_a_view_when_averages_come_gives_way_to_it(put: str) -> None:
    """A hook that came after the launch has put it there."""
    bucket = bucket_of([(4,), (5,)], torch.float32, holds_gradients=True)
    with torch.no_grad():
        collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=2)
        late = bucket.parameters[1]
        late.grad = None if put == "nothing" else bucket.views[1].clone()
        hand_out(bucket, GRAD_ATTRIBUTE, bucket.flat, None)
    assert all(parameter.grad is view for parameter, view in zip(bucket.parameters, bucket.views, strict=True))
