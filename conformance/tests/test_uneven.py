"""The truth about uneven inputs: who takes part in a step, what sums are divided by, and what the end is like."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from conformance.chapters.join.plan import UnevenPlan
from conformance.chapters.join.scenarios import UNEVEN
from conformance.errors import ScenarioError
from conformance.programs.truth import truth_of
from conformance.recorder.recorder import Recorder
from conformance.scenario import Scenario
from conformance.truth.on_processes import PlainDDP
from conformance.truth.plain_group import PlainGroup
from conformance.truth.plain_ranks import on_plain_ranks


def uneven(*num_inputs: int, **arguments: object) -> Scenario:
    return Scenario(
        id="join/JOIN-01/x", requirements=("JOIN-01",), program="uneven_training", world_size=len(num_inputs),
        arguments={"num_inputs": list(num_inputs), **arguments},
    )  # fmt: skip


#: A unit whose multiples by whole numbers are exact, also divided by 2 or 3.
UNIT = 12 * 2.0**-19


def gradients_of(
    num_inputs: tuple[int, ...], factors: tuple[tuple[float, ...], ...], *, by_initial: bool = True
) -> dict[int, list[float | None]]:
    """Return the gradients of one weight after each input of each rank; `factors[r][i]` is that of its own loss."""

    def main(rank: int, group: PlainGroup) -> list[float | None]:
        model: Any = PlainDDP(nn.Linear(1, 1, bias=False), group)
        found: list[float | None] = []
        with model.join(divide_by_initial_world_size=by_initial):
            for index in range(num_inputs[rank]):
                model.zero_grad()
                (model(torch.ones(1, 1)) * factors[rank][index]).sum().backward()
                gradient = model.module.weight.grad
                found.append(None if gradient is None else gradient.item())
        return found

    return dict(on_plain_ranks(len(num_inputs), main))


def test_a_plan_tells_who_has_data_and_who_joins_last() -> None:
    plan = UnevenPlan.of(uneven(0, 3, 2, 3, sync_every=2))
    assert [plan.active(index) for index in range(3)] == [[1, 2, 3], [1, 2, 3], [1, 3]]
    assert plan.last_joiners() == [1, 3]
    assert [plan.is_synchronised(index) for index in range(4)] == [False, True, False, True]
    assert plan.step_number(2, 1) == 7


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ScenarioError, match="num_inputs of 2 ranks for 3"):
        UnevenPlan.of(uneven(1, 2).replace(world_size=3))


@pytest.mark.parametrize(("by_initial", "expected"), [(True, 9), (False, 13.5)])
def test_sums_are_over_active_ranks_and_the_divisor_is_what_was_asked_for(by_initial: bool, expected: float) -> None:
    factors = ((9 * UNIT,), (), (18 * UNIT,))
    found = gradients_of((1, 0, 1), factors, by_initial=by_initial)
    assert found == {0: [expected * UNIT], 1: [], 2: [expected * UNIT]}


def test_a_rank_that_has_joined_adds_nothing() -> None:
    assert gradients_of((1, 2), ((6 * UNIT,), (12 * UNIT, 4 * UNIT))) == {0: [9 * UNIT], 1: [9 * UNIT, 2 * UNIT]}


def test_all_ranks_leave_with_the_weights_of_the_one_that_joined_last_and_gradients_of_their_own() -> None:
    def main(rank: int, group: PlainGroup) -> tuple[float, float]:
        model: Any = PlainDDP(nn.Linear(1, 1, bias=False), group)
        with model.join():
            for index in range(1 + rank):
                model.zero_grad()
                (model(torch.ones(1, 1)) * (6 * UNIT)).sum().backward()
                with torch.no_grad():
                    model.module.weight.fill_(10.0 * rank + index)
        return model.module.weight.item(), model.module.weight.grad.item()

    assert on_plain_ranks(2, main) == {0: (11.0, 6 * UNIT), 1: (11.0, 3 * UNIT)}


@pytest.mark.parametrize("num_inputs", [inputs for group in UNEVEN.values() for inputs in group], ids=str)
def test_all_ranks_end_with_the_same_model(num_inputs: tuple[int, ...]) -> None:
    facts = truth_of(uneven(*num_inputs))
    names = [name for name in facts[0] if name.startswith("final/parameter")]
    assert names
    for name in names:
        assert all(torch.equal(facts[0][name], facts[rank][name]) for rank in facts)
    assert [sum(name.endswith("/loss") for name in facts[rank]) for rank in facts] == list(num_inputs)


def test_a_recorded_work_outlives_the_last_reference_to_it() -> None:
    """C++ code that was handed a work by Python, as torch's reducer is by a join context, keeps its C++ part only."""
    gloo = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
    group = Recorder().wrap(gloo, "alone")
    work = group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    alive = weakref.ref(work)
    del work
    gc.collect()
    assert alive() is not None
