"""Which buckets may leave within a backward where ranks may differ in what they use, and in their layers' order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ddp_impl.base.errors import ReductionError
from ddp_impl.reducer.order_check import OrderCheck
from ddp_impl.wire.forecast import Told


def bucket(index: int, *members: int) -> Any:
    return SimpleNamespace(index=index, members=tuple(SimpleNamespace(index=member) for member in members))


def order() -> OrderCheck:
    peers: Any = SimpleNamespace(group=None)
    return OrderCheck(peers, torch.device("cpu"), None, ["weight", "bias"], ReductionError)


BOTH = [True, True]


def test_a_bucket_leaves_early_when_it_could_have_left_alike_before() -> None:
    first, buckets = order(), [bucket(0, 0), bucket(1, 1)]
    assert first.early(Told([True, False], alike=True, by_all=True), buckets) == [False, False]
    assert first.early(Told(BOTH, alike=True, by_all=True), buckets) == [True, False]
    assert first.early(Told(BOTH, alike=True, by_all=True), buckets) == BOTH
    assert first.early(Told(BOTH, alike=True, by_all=True), [bucket(0, 0, 1)]) == [False, False], "it is new"


def test_none_leaves_early_once_ranks_have_differed() -> None:
    first, buckets = order(), [bucket(0, 0, 1)]
    for alike in (True, False, True, True):
        may_leave = first.early(Told(BOTH, alike=alike, by_all=True), buckets)
    assert may_leave == [False, False]


def test_an_iteration_with_an_idle_rank_says_nothing() -> None:
    first, second, buckets = order(), order(), [bucket(0, 0, 1)]
    for one in (first, second):
        one.early(Told(BOTH, alike=True, by_all=False), buckets)
    first.iteration_ends({0: 3}, {})
    second.iteration_ends({}, {})
    assert first.digest() == second.digest()


def test_digests_differ_where_a_bucket_was_full_elsewhere() -> None:
    first, second, buckets = order(), order(), [bucket(0, 0, 1)]
    for number, one in enumerate((first, second)):
        one.early(Told(BOTH, alike=True, by_all=True), buckets)
        one.iteration_ends({0: number}, {})
    assert first.digest() != second.digest()


def test_a_new_bucket_leaves_early_when_its_gradients_came_alike() -> None:
    first = order()
    first.early(Told([True, True, False], alike=True, by_all=True), [bucket(0, 0, 1, 2)])
    first.iteration_ends({}, {0: (0, 0), 1: (1, 0), 2: (1, 0)})
    buckets = [bucket(0, 0, 1), bucket(1, 2)]
    assert first.early(Told([True] * 3, alike=True, by_all=True), buckets) == [True, True, False], "2 may not have come"


def test_digests_differ_where_a_gradient_came_elsewhere() -> None:
    first, second, third = order(), order(), order()
    for one, place in ((first, 0), (second, 1), (third, 0)):
        one.early(Told([True, False], alike=True, by_all=True), [bucket(0, 0, 1)])
        one.iteration_ends({}, {0: (place, 0), 1: (0, 0)} if one is not third else {0: (place, 0)})
    assert first.digest() != second.digest()
    assert first.digest() == third.digest(), "whether a gradient comes that not all ranks were sure of says nothing"
