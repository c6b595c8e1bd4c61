"""Which buckets may leave within a backward where ranks may differ in what they use, and in their layers' order."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_impl.reducer import company as module
from ddp_impl.reducer.company import Order, Tally
from ddp_impl.reducer.expectations import FindUnused
from ddp_impl.reducer.planning import encoded
from ddp_impl.wire.round import Answer


def may_launch(certain: list[bool], in_order: list[bool]) -> list[bool]:
    some: Any = object.__new__(FindUnused)
    some.members = certain
    some.reduction = SimpleNamespace(learnt=SimpleNamespace(in_order=in_order))
    return list(some.certain_in_order(Answer([2 * one for one in certain], [], [], num_contributing=2, num_ranks=2)))


def test_a_gradient_is_awaited_in_backward_where_it_is_certain_and_in_order() -> None:
    assert may_launch([True, True, False, False], [True, False, True, False]) == [True, False, False, False]
    assert may_launch([True, True], []) == [False, False], "ranks have not compared their orders"


def test_places_are_encoded_apart_from_each_other_and_from_none() -> None:
    places = [None, *itertools.product(range(12), range(40))]
    numbers = encoded(places)
    found = set(zip(numbers[::2], numbers[1::2], strict=True))
    assert len(found) > 0.98 * len(places)
    assert max(numbers) < 256, "ranks sum their squares as int32"
    assert numbers[:2] == [0, 0]


def test_a_place_counts_the_users_collectives_and_what_arrived_at_other_wrappers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = [0]
    monkeypatch.setattr(module, "size_of", lambda group: 2)
    monkeypatch.setattr(module, "counter_of", lambda group, device: lambda: begun[0])
    group: Any = None
    one, other = (Order(group, torch.device("cpu")) for _ in range(2))
    assert one.position_of_arrival() == (0, 0), "nobody counts"
    begun[0] = 5
    one.iteration_begins()
    tally = Tally()
    one.backward_begins(tally)
    other.backward_begins(tally)
    begun[0] += 1
    with other.counting_own_collectives():
        begun[0] += 3
    other.count_arrival()
    one.count_arrival()
    assert one.position_of_arrival() == (1, 1)
    with contextlib.suppress(ValueError), one.counting_own_collectives():
        begun[0] += 1
        raise ValueError
    assert one.position_of_arrival() == (2, 1), "an exception may have begun none"


def test_what_arrived_at_other_wrappers_counts_where_a_backend_numbers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "size_of", lambda group: 2)
    monkeypatch.setattr(module, "counter_of", lambda group, device: None)
    group: Any = None
    one, other = (Order(group, torch.device("cpu")) for _ in range(2))
    tally = Tally()
    one.backward_begins(tally)
    other.backward_begins(tally)
    other.count_arrival()
    assert one.position_of_arrival() == (0, 1)
