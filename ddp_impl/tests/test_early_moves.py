"""Gradients that move into their bucket when they come: this rank's own until the bucket is launched, divided once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.buckets.bucket import Bucket
from ddp_impl.buckets.gradients import GRAD_ATTRIBUTE, EarlyMoves, collect
from ddp_impl.tests.buckets import bucket_of, gradients_of
from ddp_impl.tests.ranks import run_ranks

SHAPES = ((3, 5), (40,), (), (7, 6), (1,))
#: What may have become of a gradient when its bucket is full.
WAYS = ("came", "stayed", "lives there", "lives there and came", "missing", "not used", "frozen")


def held_bucket(dtype: torch.dtype) -> Bucket:
    return bucket_of(SHAPES, dtype, holds_gradients=True, large_numel=30)


def moves_into(bucket: Bucket) -> EarlyMoves:
    moves = EarlyMoves(len(bucket.members))
    moves.regroup([bucket])
    moves.backward_begins(is_first=True)
    assert all(moves.takes)
    return moves


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("divisor", [1, 2, 3, 4])
def test_whatever_became_of_each_every_gradient_is_divided_once(divisor: int, dtype: torch.dtype) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        ways = [draw.choice(WAYS) for _ in SHAPES]
        bucket = held_bucket(dtype)
        moves = moves_into(bucket)
        before = gradients_of(bucket)
        unused, left_out = set[int](), set[int]()
        for place, (way, parameter) in enumerate(zip(ways, bucket.parameters, strict=True)):
            if way.startswith("lives"):
                bucket.views[place].copy_(before[place])
                parameter.grad = bucket.views[place]
            if way == "missing":
                parameter.grad = None
            elif way != "stayed" and way != "lives there":
                moves.move(place)
            if way == "not used":
                unused.add(place)
            if way == "frozen":
                left_out.add(place)
        with torch.no_grad():
            missing = collect(bucket, GRAD_ATTRIBUTE, unused, "", divisor=divisor, left_out=left_out)
        for place, (way, parameter) in enumerate(zip(ways, bucket.parameters, strict=True)):
            sent, expected = bucket.views[place], before[place] / divisor
            if way in ("missing", "frozen"):
                assert place in missing
                assert not sent.any(), (seed, ways)
            else:
                assert torch.equal(sent, expected), (seed, ways, place)
            if way in ("not used", "frozen"):  # perhaps nobody used it: then it keeps what it has
                assert parameter.grad is not None
                assert parameter.grad is not sent
                assert torch.equal(parameter.grad, before[place]), (seed, ways, place)


@pytest.mark.parametrize("put", [lambda own: own.clone(), lambda own: own * 2, lambda own: own.add_(1)])
def test_whoever_looks_at_a_gradient_that_has_moved_finds_this_ranks_own(put: Any) -> None:
    """And may put another in its place, in the hook of a module say."""
    bucket = held_bucket(torch.float32)
    moves = moves_into(bucket)
    before = gradients_of(bucket)
    for place in range(len(SHAPES)):
        moves.move(place)
    assert all(parameter.grad is view for parameter, view in zip(bucket.parameters, bucket.views, strict=True))
    assert all(map(torch.equal, gradients_of(bucket), before))
    for place in (0, 1):
        bucket.parameters[place].grad = put(bucket.parameters[place].grad)
    with torch.no_grad():
        collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=2)
    expected = [put(gradient) if place in (0, 1) else gradient for place, gradient in enumerate(before)]
    assert all(torch.equal(view, own / 2) for view, own in zip(bucket.views, expected, strict=True))


def test_what_autograd_keeps_elsewhere_is_not_moved() -> None:
    bucket = held_bucket(torch.float32)
    moves = moves_into(bucket)
    before = [parameter.grad for parameter in bucket.parameters]
    moves.movable = False  # torch.distributed.autograd keeps gradients in its context
    for place in range(len(SHAPES)):
        moves.move(place)
    assert all(parameter.grad is own for parameter, own in zip(bucket.parameters, before, strict=True))


def test_storage_that_was_given_up_is_claimed_again() -> None:
    bucket = held_bucket(torch.float32)
    bucket.release()
    moves = moves_into(bucket)
    before = gradients_of(bucket)
    for place in range(len(SHAPES)):
        moves.move(place)
    with torch.no_grad():
        collect(bucket, GRAD_ATTRIBUTE, set(), "", divisor=2)
    assert all(torch.equal(view, gradient / 2) for view, gradient in zip(bucket.views, before, strict=True))
    assert all(p.grad is view for p, view in zip(bucket.parameters, bucket.views, strict=True))


def test_a_gradient_that_a_users_hook_will_see_stays_as_it_is() -> None:
    bucket = held_bucket(torch.float32)
    moves = moves_into(bucket)
    before = gradients_of(bucket)
    hooked = bucket.parameters[1]
    assert isinstance(hooked, nn.Parameter)
    for _ in range(2):  # the reducer's own, and the user's
        hooked.register_post_accumulate_grad_hook(lambda _: None)
    moves.move(1)
    assert hooked.grad is not bucket.views[1]
    assert hooked.grad is not None
    assert torch.equal(hooked.grad, before[1])


def test_only_buckets_that_hold_gradients_and_have_a_large_one_are_moved_into() -> None:
    members = held_bucket(torch.float32).members
    moves = EarlyMoves(len(SHAPES))
    moves.regroup([Bucket(0, members[:2], large_numel=30), Bucket(1, members[2:], holds_gradients=True)])
    assert not any(moves.takes)


def _raises_in_its_third_backward(rank: int) -> tuple[bool, bool, str]:
    module: Any = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    alone: Any = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model: Any = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=100)
    alone.load_state_dict(module.state_dict())
    inputs = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))

    def refuse(gradient: Tensor) -> Tensor:
        raise ValueError("the first layer's gradient")

    for _ in range(2):
        model(inputs).square().sum().backward()
        model.zero_grad()
    handle = module[0].weight.register_hook(refuse)
    with pytest.raises(ValueError, match="first layer"):
        model(inputs).square().sum().backward()
    handle.remove()
    alone(inputs).square().sum().backward()
    mine: Any = module[1].weight.grad
    moved = any(mine is view for view in model.reducer.buckets[0].views)
    try:
        model(inputs)
        said = ""
    except RuntimeError as error:
        said = str(error)
    return moved, torch.equal(mine, alone[1].weight.grad), said


def test_after_a_backward_that_raised_what_came_is_this_ranks_own(tmp_path: Path) -> None:
    """It is in the bucket, which nothing was launched of, and not a half of what this rank computed."""
    for moved, is_own, said in run_ranks(_raises_in_its_third_backward, 2, tmp_path):
        assert moved
        assert is_own
        assert said


def _nested(rank: int, views: bool) -> list[Tensor] | str:
    inner = nn.Linear(256, 256, bias=False)
    try:
        wrapped = DistributedDataParallel(inner, gradient_as_bucket_view=views)
        outer = nn.Sequential(nn.Linear(256, 256, bias=False), wrapped)
        for name, parameter in outer.named_parameters():
            nn.init.constant_(parameter, float(name == "0.weight"))
        model: Any = DistributedDataParallel(outer, bucket_cap_mb=0.1)
    except ValueError as error:
        return str(error)
    seen = []
    for _ in range(8):
        model.zero_grad()
        model(torch.full((4, 256), float(rank + 1))).sum().backward()
        seen.append(present(inner.weight.grad)[0, 0].clone())
    return seen


def present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("views", [False, True])
def test_a_ddp_inside_a_ddp_averages_the_same_or_is_refused(tmp_path: Path, views: bool) -> None:
    """Both average the inner module's gradients, which are large enough to be reduced where they are."""
    for seen in run_ranks(_nested, 2, tmp_path, views):
        if views:
            assert "Wrap the whole module once" in seen
        else:
            assert len({value.item() for value in seen}) == 1, seen
            assert seen[0].item() == 4 * 256 * 1.5
