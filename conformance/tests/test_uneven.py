"""The truth about uneven inputs: who takes part in a step, what sums are divided by, and what the end is like."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from conformance.chapters.join.plan import UnevenPlan
from conformance.errors import ScenarioError
from conformance.recorder.recorder import Recorder
from conformance.scenario import Scenario


def uneven(*num_inputs: int, **arguments: object) -> Scenario:
    return Scenario(
        id="join/JOIN-01/x", requirements=("JOIN-01",), program="uneven_training", world_size=len(num_inputs),
        arguments={"num_inputs": list(num_inputs), **arguments},
    )  # fmt: skip


def test_a_plan_has_the_ranks_with_data_and_the_last_to_join() -> None:
    plan = UnevenPlan.of(uneven(0, 3, 2, 3, sync_every=2))
    assert [plan.active(index) for index in range(3)] == [[1, 2, 3], [1, 2, 3], [1, 3]]
    assert plan.last_joiners() == [1, 3]
    assert [plan.is_synchronised(index) for index in range(4)] == [False, True, False, True]
    assert plan.step_number(2, 1) == 7


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ScenarioError, match="num_inputs of 2 ranks for 3"):
        UnevenPlan.of(uneven(1, 2).replace(world_size=3))


def test_a_recorded_work_outlives_the_last_reference_to_it() -> None:
    """C++ code that was handed a work by Python, as torch's reducer is by a join context, keeps its C++ part only."""
    gloo = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
    group = Recorder().wrap(gloo, "alone")
    work = group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    alive = weakref.ref(work)
    del work
    gc.collect()
    assert alive() is not None
