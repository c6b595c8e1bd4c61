"""Whatever comes, goes missing or is excluded, in any order: a bucket is full once, and nothing is counted twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddp_impl.buckets.arrivals import Arrivals


def arrivals(bucket_of: list[int], *, num_to_learn_from: int = 0) -> Arrivals:
    counter = Arrivals(len(bucket_of))
    counter.forget(num_to_learn_from)
    counter.regroup(bucket_of, max(bucket_of) + 1)
    return counter


def arrive(counter: Arrivals, *indices: int) -> list[int]:
    """Let gradients arrive; return the buckets that become full."""
    return [counter.bucket_of[index] for index in indices if counter.take(index)]


def check_invariants(counter: Arrivals) -> None:
    awaited = [0] * len(counter.pending)
    for index, left in enumerate(counter.due):
        awaited[counter.bucket_of[index]] += left != 0
    assert awaited == counter.pending, f"buckets await {counter.pending} gradients, but {awaited} are due"
    assert not (any(left > 0 for left in counter.due) and any(left < 0 for left in counter.due)), "some are reported"
    assert len(counter.order) == len(set(counter.order)) == len(counter.ready_ns), "the order names a parameter twice"


class Iteration(RuleBasedStateMachine):
    """One iteration after the other, judged by the sets of parameters that came and that were excluded."""

    @initialize(bucket_of=st.lists(st.integers(0, 2), min_size=1, max_size=6), num_to_learn_from=st.integers(0, 2))
    def begin(self, bucket_of: list[int], num_to_learn_from: int) -> None:
        dense = {bucket: place for place, bucket in enumerate(sorted(set(bucket_of)))}
        self.counter = arrivals([dense[bucket] for bucket in bucket_of], num_to_learn_from=num_to_learn_from)
        self.is_armed = False

    @rule()
    @precondition(lambda self: not self.is_armed)
    def arm(self) -> None:
        self.counter.arm(static=False)
        self.arrived: list[int] = []
        self.excluded: set[int] = set()
        self.full: list[int] = []
        self.is_armed = True
        self.learns = self.counter.learns

    @rule(data=st.data())
    @precondition(lambda self: self.is_armed)
    def gradient(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.counter.due) - 1))
        if index not in self.arrived:  # again, and it is an error that the reducer raises
            self.full += arrive(self.counter, index)
            self.arrived.append(index)

    @rule(data=st.data())
    @precondition(lambda self: self.is_armed and not self.excluded)
    def exclude(self, data: st.DataObject) -> None:
        absent = data.draw(st.sets(st.integers(0, len(self.counter.due) - 1)))
        self.full += self.counter.exclude(absent)
        self.excluded = absent - set(self.arrived)

    @rule()
    @precondition(lambda self: self.is_armed)
    def another_backward(self) -> None:
        self.counter.report_next()

    @rule()
    @precondition(lambda self: self.is_armed)
    def end(self) -> None:
        absent = self.counter.conclude()
        assert set(absent) == set(range(len(self.counter.due))) - set(self.arrived) - self.excluded
        if self.learns and self.arrived:
            assert self.counter.order == self.arrived
        self.counter.end_iteration()
        self.is_armed = False

    @invariant()
    def every_bucket_is_full_once_when_nothing_is_awaited(self) -> None:
        if not getattr(self, "is_armed", False):
            return
        done = set(self.arrived) | self.excluded
        awaited = {bucket for index, bucket in enumerate(self.counter.bucket_of) if index not in done}
        assert sorted(self.full) == sorted(set(self.counter.bucket_of) - awaited)
        assert set(self.counter.missing) == set(range(len(self.counter.due))) - done

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "counter"):
            check_invariants(self.counter)


TestIteration = Iteration.TestCase


def test_a_gradient_that_has_come_is_not_absent() -> None:
    counter = arrivals([0, 0, 0])
    counter.arm(static=False)
    assert arrive(counter, 1) == []
    assert counter.exclude([1, 2]) == []
    assert counter.pending == [1], "the gradient of parameter 1 was counted again as absent"
    assert arrive(counter, 0) == [0]


def test_hooks_report_the_first_gradient_of_a_backward_and_no_other() -> None:
    counter = arrivals([0, 1, 1])
    counter.arm(static=False)
    assert counter.due == [-1, -1, -1]
    arrive(counter, 0)
    assert counter.due == [0, 1, 1]
    counter.report_next()
    assert counter.due == [0, -1, -1]


def test_hooks_report_every_gradient_of_an_iteration_that_is_learnt_from() -> None:
    counter = arrivals([0, 0, 0], num_to_learn_from=2)
    for order in ([2, 0, 1], [1, 2, 0]):
        counter.arm(static=False)
        for place, index in enumerate(order):
            assert counter.due[index] == -1
            counter.take(index, ready_ns=10 * place)
        counter.end_iteration()
        assert (counter.order, counter.ready_ns) == (order, [0, 10, 20])
    assert not counter.num_to_learn_from


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_static_graph_awaits_what_it_has_learnt(times: list[int], random: object) -> None:
    gradients = [index for index, count in enumerate(times) for _ in range(count)]
    counter = arrivals([0] * len(times), num_to_learn_from=1)
    counter.arm(static=True)
    assert arrive(counter, *gradients) == [], "how often gradients come is known when the backward ends"
    assert counter.conclude() == [index for index, count in enumerate(times) if count == 0]
    counter.end_iteration()
    for _ in range(2):
        random.shuffle(gradients)  # type: ignore[attr-defined]
        counter.arm(static=True)
        check_invariants(counter)
        assert counter.never_used == [index for index, count in enumerate(times) if count == 0]
        assert counter.exclude(counter.never_used) == ([] if any(times) else [0])
        full = arrive(counter, *gradients)
        assert full == ([0] if any(times) else [])
        assert counter.missing == []
        counter.end_iteration()


def test_what_a_static_graph_brings_in_part_is_not_absent() -> None:
    counter = arrivals([0, 1], num_to_learn_from=1)
    counter.arm(static=True)
    arrive(counter, 0, 0, 1)
    counter.conclude()
    counter.end_iteration()
    counter.arm(static=True)
    assert arrive(counter, 1, 0) == [1]
    assert counter.missing == [0]
    assert counter.arrived_in_part(0)
    assert counter.conclude() == []
    check_invariants(counter)


def test_what_was_learnt_is_forgotten() -> None:
    counter = arrivals([0], num_to_learn_from=1)
    counter.arm(static=True)
    arrive(counter, 0, 0)
    counter.conclude()
    counter.end_iteration()
    assert counter.learnt == (2,)
    counter.forget(1)
    counter.regroup([0], 1)
    assert counter.learns
    assert counter.order == []
    counter.arm(static=True)
    assert counter.due == [-1]


def test_invariants_see_a_double_count() -> None:
    counter = arrivals([0, 0])
    counter.arm(static=False)
    counter.pending[0] -= 1
    with pytest.raises(AssertionError, match="are due"):
        check_invariants(counter)
