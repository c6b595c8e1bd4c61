"""Plans are pure: every property that the reducer relies on holds for any parameters, order and caps."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from ddp_impl.base.options import BucketCaps
from ddp_impl.buckets.plan import BucketPlan, ParameterSpec, plan_for_order, plan_for_unknown_order

KINDS = [("float32", "cpu"), ("float16", "cpu"), ("float32", "meta")]


def specs_of(sizes: list[int], **changes: dict[int, object]) -> list[ParameterSpec]:
    return [ParameterSpec(i, f"p{i}", size, KINDS[0]) for i, size in enumerate(sizes)]


@st.composite
def planning_problems(draw: st.DrawFn) -> tuple[list[ParameterSpec], list[int], BucketCaps]:
    count = draw(st.integers(1, 12))
    releases = draw(st.integers(-1, count - 1))
    specs = [
        ParameterSpec(
            index,
            f"p{index}",
            draw(st.integers(1, 100)),
            draw(st.sampled_from(KINDS)),
            sparse=draw(st.booleans()) and draw(st.booleans()),
            delayed=draw(st.booleans()) and draw(st.booleans()),
            releases_delayed=index == releases,
        )
        for index in range(count)
    ]
    order = draw(st.permutations(range(count)))[: draw(st.integers(0, count))]
    caps = BucketCaps(draw(st.integers(0, 80)), draw(st.integers(0, 200)))
    if draw(st.booleans()):
        listed = tuple(draw(st.lists(st.integers(0, 200), min_size=1, max_size=4)))
        caps = BucketCaps(listed[0], max(listed), listed)
    return specs, list(order), caps


def check_partition(specs: list[ParameterSpec], plan: BucketPlan) -> None:
    assert sorted(index for bucket in plan.buckets for index in bucket) == [spec.index for spec in specs]
    for bucket in plan.buckets:
        members = [specs[index] for index in bucket]
        assert len({member.kind for member in members}) == 1
        assert len({member.delayed for member in members}) == 1
        assert len(members) == 1 or not any(member.sparse for member in members)
    at_release = next((at for at, b in enumerate(plan.buckets) if any(specs[i].releases_delayed for i in b)), None)
    for at, bucket in enumerate(plan.buckets):
        if specs[bucket[0]].delayed and at_release is not None:
            is_held_back = at > at_release or specs[plan.buckets[at_release][0]].delayed
            assert is_held_back, "a delayed bucket must be launched after the gradient that it waits for"
    assert all(plan.bucket_of(len(specs))[index] == at for at, bucket in enumerate(plan.buckets) for index in bucket)


@given(planning_problems())
def test_every_parameter_is_in_one_bucket_of_its_kind(
    problem: tuple[list[ParameterSpec], list[int], BucketCaps],
) -> None:
    specs, order, caps = problem
    check_partition(specs, plan_for_order(specs, order, caps))
    check_partition(specs, plan_for_unknown_order(specs))


@given(planning_problems())
def test_a_bucket_is_launched_when_its_last_gradient_is_ready(
    problem: tuple[list[ParameterSpec], list[int], BucketCaps],
) -> None:
    specs, order, caps = problem
    full_order = order + [spec.index for spec in reversed(specs) if spec.index not in order]
    prompt = [bucket for bucket in plan_for_order(specs, order, caps).buckets if not specs[bucket[0]].delayed]
    last = [max(full_order.index(index) for index in bucket) for bucket in prompt]
    assert last == sorted(last)


@given(planning_problems())
def test_only_the_last_parameter_exceeds_the_cap(problem: tuple[list[ParameterSpec], list[int], BucketCaps]) -> None:
    specs, order, caps = problem
    largest = max(caps.first_bytes, caps.cap_bytes, *caps.per_bucket_bytes, 0)
    for bucket in plan_for_order(specs, order, caps).buckets:
        if not specs[bucket[0]].delayed:
            assert sum(specs[index].num_bytes for index in bucket[:-1]) < max(largest, 1)


def delaying(sizes: list[int], delayed: set[int], releases: int) -> list[ParameterSpec]:
    return [
        dataclasses.replace(spec, delayed=spec.index in delayed, releases_delayed=spec.index == releases)
        for spec in specs_of(sizes)
    ]


def test_delayed_gradients_are_launched_right_behind_the_one_that_they_wait_for() -> None:
    plan = plan_for_order(delaying([10] * 6, {0, 1}, releases=3), range(6), BucketCaps(100, 100))
    assert plan.buckets == ((2, 3), (0, 1), (4, 5))


def test_delayed_gradients_that_come_later_than_the_one_that_they_wait_for_split_no_bucket() -> None:
    plan = plan_for_order(delaying([10] * 6, {4}, releases=2), range(6), BucketCaps(20, 20))
    assert plan.buckets == ((0, 1), (2, 3), (4,), (5,))


def test_delayed_gradients_come_last_while_the_order_is_unknown() -> None:
    assert plan_for_unknown_order(delaying([10] * 4, {0}, releases=2)).buckets == ((1, 2, 3), (0,))


def test_first_cap_then_the_others() -> None:
    plan = plan_for_order(specs_of([10] * 6), range(6), BucketCaps(first_bytes=10, cap_bytes=20))
    assert plan.buckets == ((0,), (1, 2), (3, 4), (5,))


def test_caps_per_bucket_and_the_last_serves_the_rest() -> None:
    plan = plan_for_order(specs_of([10] * 6), range(6), BucketCaps(10, 30, (10, 30, 20)))
    assert plan.buckets == ((0,), (1, 2, 3), (4, 5))


def test_unknown_order_has_no_caps() -> None:
    assert plan_for_unknown_order(specs_of([10] * 4)).buckets == ((0, 1, 2, 3),)


def test_parameters_that_were_not_seen_come_last() -> None:
    plan = plan_for_order(specs_of([10] * 4), [2, 0], BucketCaps(20, 20))
    assert plan.buckets == ((2, 0), (3, 1))
