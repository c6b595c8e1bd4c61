"""Which buckets may leave within a backward where ranks may differ in what they use, and in their layers' order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_impl.reducer import order as module
from ddp_impl.reducer.order import Order
from ddp_impl.wire.round import Answer


@pytest.fixture(autouse=True)
def _no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "size_of", lambda group: 1)


def bucket(index: int, *members: int) -> Any:
    held = tuple(SimpleNamespace(index=member) for member in members)
    return SimpleNamespace(index=index, indices=frozenset(members), members=held)


def order() -> Order:
    group: Any = None
    return Order(group, torch.device("cpu"))


def told(*certain: bool, alike: bool = True, by_all: bool = True) -> Answer:
    num_telling = 2 if by_all else 1
    return Answer([num_telling * one for one in certain], [alike], [], num_telling, num_ranks=2)


def test_a_bucket_leaves_early_when_it_could_have_left_alike_before() -> None:
    first, buckets = order(), [bucket(0, 0), bucket(1, 1)]
    assert first.may_launch_in_backward(told(True, False), buckets) == [False, False]
    assert first.may_launch_in_backward(told(True, True), buckets) == [True, False]
    assert first.may_launch_in_backward(told(True, True), buckets) == [True, True]
    assert first.may_launch_in_backward(told(True, True), [bucket(0, 0, 1)]) == [False, False], "it is new"


def test_none_leaves_early_once_ranks_have_differed() -> None:
    first, buckets = order(), [bucket(0, 0, 1)]
    for alike in (True, False, True, True):
        may_leave = first.may_launch_in_backward(told(True, True, alike=alike), buckets)
    assert may_leave == [False, False]
    assert first.ranks_diverge


@pytest.mark.parametrize("by_all", [True, False])
def test_digests_differ_where_a_bucket_was_full_elsewhere_unless_a_rank_was_idle(by_all: bool) -> None:
    first, second = order(), order()
    for number, one in enumerate((first, second)):
        one.may_launch_in_backward(told(True, True, by_all=by_all), [bucket(0, 0, 1)])
        one.iteration_ends({0: number}, {})
    assert (first.digest() != second.digest()) == by_all


def test_a_new_bucket_leaves_early_when_its_gradients_came_alike() -> None:
    first, buckets = order(), [bucket(0, 0, 1), bucket(1, 2)]
    first.may_launch_in_backward(told(True, True, False), [bucket(0, 0, 1, 2)])
    first.iteration_ends({}, {0: (0, 0), 1: (1, 0), 2: (1, 0)})
    may_leave = first.may_launch_in_backward(told(True, True, True), buckets)
    assert may_leave == [True, True, False], "2 may not have come"


def test_digests_differ_where_a_gradient_came_elsewhere() -> None:
    first, second, third = order(), order(), order()
    for one, place in ((first, 0), (second, 1), (third, 0)):
        one.may_launch_in_backward(told(True, False), [bucket(0, 0, 1)])
        one.iteration_ends({}, {0: (place, 0), 1: (0, 0)} if one is not third else {0: (place, 0)})
    assert first.digest() != second.digest()
    assert first.digest() == third.digest(), "whether a gradient comes that not all ranks were sure of says nothing"
